"""What is hooked, as data: the probe objects and the system calls.

A new probe object, call or handler is a row here; the logic in `session` does not change.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

from ttftprof.events import Wait

# What is added to a program's name where it looks at a function instead of a tracepoint: by fentry,
# or, where the kernel cannot do that, by a kprobe. See ON_ENTRY in probes/compat.bpf.h.
ON_ENTRY = ("_entry", "_kprobe")


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe object, `probes/<stem>.bpf.c`.

    `cost_of_absence` completes the sentence "without it, …". `needs` names the tracepoints it
    attaches to, with the kernel that brought each; `modules` those whose tracepoints they may be.
    `costs` are of single programs, where their absence costs less than that of the whole. A probe
    with `filesystems` matters only to a target with files on one of them. `types` are structures
    that a kernel's headers may not describe, where they are asked instead of its BTF.
    """

    stem: str
    title: str
    cost_of_absence: str
    needs: tuple[tuple[str, str], ...] = ()
    required: bool = False
    modules: tuple[str, ...] = ()
    filesystems: frozenset[str] = frozenset()
    costs: tuple[tuple[str, str], ...] = ()
    types: tuple[str, ...] = ()

    def cost_of(self, program: str) -> str:
        """What is lost without one program of it."""
        for form in ON_ENTRY:
            program = program.removesuffix(form)
        return dict(self.costs).get(program, self.cost_of_absence)

    def serves(self, fstype: str) -> bool:
        """Whether files of this type (with or without a subtype, `fuse.sshfs`) need it."""
        return fstype.partition(".")[0] in self.filesystems


PROBES = (
    Probe(
        "process",
        "process tree",
        "nothing can be followed",
        (
            ("sched_process_fork", "5.5"),
            ("sched_process_exec", "5.5"),
            ("sched_process_exit", "5.5"),
            ("signal_generate", "5.5"),
            ("task_newtask", "5.5"),
        ),
        required=True,
    ),
    Probe(
        "offcpu",
        "waits of threads",
        "waiting for storage, locks and timers cannot be told from computing",
        (("sched_switch", "5.5"),),
    ),
    Probe(
        "syscalls",
        "system calls",
        "opens, maps, reads and sockets of the target are not seen",
        (("sys_enter", "5.5"), ("sys_exit", "5.5")),
    ),
    Probe(
        "files",
        "model-file activity",
        "opens, maps, advice and reads of model files are not seen",
        (("sys_exit", "5.5"),),
    ),
    Probe(
        "sockets",
        "HTTP sockets",
        "requests and first tokens are not seen",
        (
            ("inet_sock_set_state", "5.5"),
            ("sk_data_ready", "6.3"),
            ("sock_send_length", "6.3"),
            ("sock_recv_length", "6.3"),
            ("tcp_probe", "5.5"),
        ),
        costs=(
            (
                "sockets__acknowledged",
                "a first token counts from its write, even where the kernel holds it back",
            ),
            (
                "sockets__ready",
                "a request counts from when the server read it, not from when it arrived",
            ),
            ("sockets__unseen_send", "answers by sendfile or io_uring are not seen"),
            ("sockets__unseen_receive", "requests read by io_uring are not seen"),
        ),
    ),
    Probe("logs", "server log lines", "log markers are missing", (("sys_exit", "5.5"),)),
    Probe(
        "pagecache",
        "page cache",
        "bytes from storage and residency of model files are unknown",
        (
            ("mm_filemap_add_to_page_cache", "5.5"),
            ("mm_filemap_delete_from_page_cache", "5.5"),
            ("mm_filemap_get_pages", "6.12"),
        ),
        costs=(
            ("pagecache__get", "a wait in read() may be put down to the file read before"),
            ("pagecache__delete", "what leaves the page cache is not seen"),
        ),
    ),
    Probe(
        "faults",
        "file page faults",
        "faults cannot be split by file",
        (("mm_filemap_fault", "6.12"), ("mm_filemap_map_pages", "6.12")),
    ),
    Probe(
        "block",
        "block requests",
        "request sizes, latencies and queue depth of disks are unknown",
        (
            ("block_rq_issue", "5.11"),
            ("block_rq_complete", "5.11"),
            ("block_rq_requeue", "5.11"),
            ("block_bio_queue", "5.12"),
            ("block_bio_complete", "5.12"),
        ),
        costs=(
            ("block__requeue", "a request given back to its queue counts as at the disk"),
            ("block__submitted", "what device-mapper, LUKS and RAID layers cost is unknown"),
            ("block__done", "what device-mapper, LUKS and RAID layers cost is unknown"),
        ),
    ),
    Probe("cpu", "CPU samples", "CPU time in page faults cannot be told from computing"),
    Probe(
        "uring",
        "io_uring reads",
        "reads through io_uring are not counted",
        (("io_uring_submit_req", "6.4"), ("io_uring_complete", "5.5")),
        types=("io_kiocb",),
    ),
    Probe("marks", "library calls", "phases rest on files, processes, sockets and logs alone"),
    Probe(
        "nfs",
        "NFS reads",
        "requests to the NFS server, and their split into queue, wire and server, are unknown",
        (
            ("nfs_initiate_read", "5.8"),
            ("nfs_readpage_done", "5.8"),
            ("nfs_readpage_short", "5.8"),
            ("nfs_aop_readahead", "6.0"),
            ("rpc_stats_latency", "5.5"),
        ),
        modules=("nfs", "sunrpc"),
        filesystems=frozenset({"nfs", "nfs4"}),
        costs=(
            ("nfs__readahead", "how much readahead the NFS client was asked for is unknown"),
            ("nfs__latency", "requests cannot be split into queue, wire and server"),
        ),
        types=("nfs_pgio_header", "rpc_task"),
    ),
    Probe(
        "smb",
        "SMB reads",
        "requests to the SMB server are unknown",
        (
            ("smb3_read_enter", "5.5"),
            ("smb3_read_done", "5.5"),
            ("smb3_read_err", "5.5"),
            ("smb3_cmd_enter", "5.5"),
            ("smb3_cmd_done", "5.5"),
            ("smb3_wait_credits", "5.19"),
        ),
        modules=("cifs",),
        filesystems=frozenset({"cifs", "smb3"}),
        costs=(("smb__starved", "a want of the server's credits is not seen"),),
    ),
    Probe(
        "fuse",
        "FUSE reads",
        "requests to the FUSE daemon are unknown",
        (
            ("fuse_request_send", "6.11"),
            ("fuse_request_end", "6.11"),
            ("page_cache_ra_unbounded", "6.18"),
        ),
        modules=("fuse",),
        filesystems=frozenset({"fuse", "fuseblk", "virtiofs"}),
        costs=(("fuse__readahead", "how much readahead the daemon was asked for is unknown"),),
        types=("fuse_req",),
    ),
    Probe(
        "netfs",
        "reads of 9P, Ceph and AFS",
        "requests to the file server are unknown",
        (("netfs_sreq", "5.18"),),  # of the name its requests have since (6a19114b8e9a)
        modules=("netfs",),
        filesystems=frozenset({"9p", "ceph", "afs"}),
        types=("netfs_io_subrequest",),
    ),
)

# Programs of which one serves, the first that this kernel has a hook for: one that passes so many
# arguments (0: any), or, where a tracepoint is younger than the kernel, a function.
VARIANTS: tuple[dict[str, int], ...] = (
    {"smb__make": 6, "smb__make_netfs": 8},
    {"smb__done": 6, "smb__done_netfs": 8},
    {"smb__failed": 7, "smb__failed_netfs": 9},
    {"uring__submit": 1, "uring__submit_sqe": 2},
    {"uring__complete": 3, "uring__complete_result": 7},
    {"offcpu__switch": 4, "offcpu__switch_before_5_18": 3},
    {"nfs__readahead": 3},
    *(
        dict.fromkeys((tracepoint, *(f"{function}{form}" for form in ON_ENTRY)), 0)
        for tracepoint, function in (
            ("faults__fault", "faults__fault"),
            ("faults__around", "faults__around"),
            ("pagecache__get", "pagecache__get"),
            ("sockets__ready", "sockets__ready"),
            ("fuse__send", "fuse__send"),
            ("fuse__send", "fuse__wait"),
            ("fuse__end", "fuse__end"),
        )
    ),
)


class Call:
    """`enum syscall_class` of probes/events.h."""

    OPEN = 1
    OPENAT = 2
    MMAP = 3
    MUNMAP = 4
    MADVISE = 5
    FADVISE = 6
    READAHEAD = 7
    READ = 8
    READV = 9
    RECVMSG = 10
    WRITE = 11
    WRITEV = 12
    SENDMSG = 13
    ACCEPT = 14
    CONNECT = 15
    PREAD = 16
    PREADV = 17
    RECV = 18
    SEND = 19
    IOCTL = 20
    CLOSE = 21
    URING = 22
    PWRITE = 23


# `enum handler`: which program of the dispatch array serves which slot.
HANDLERS = {
    "files__open": 0,
    "files__mmap": 1,
    "files__munmap": 2,
    "files__advise": 3,
    "files__read": 4,
    "sockets__receive": 5,
    "sockets__send": 6,
    "logs__write": 7,
    "sockets__connection": 8,
    "files__device": 9,
}


@dataclass(frozen=True, slots=True)
class Syscall:
    """One system call: its number by machine, its class, and what a block in it waits for."""

    name: str
    x86_64: int | None
    aarch64: int | None
    call: int = 0
    wait: Wait = Wait.OTHER


# Numbers: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
# A block in read() is a wait for a pipe until the probe looks at the file (see offcpu.bpf.c).
SYSCALLS = (
    Syscall("open", 2, None, Call.OPEN, Wait.STORAGE),
    Syscall("openat", 257, 56, Call.OPENAT, Wait.STORAGE),
    Syscall("openat2", 437, 437, Call.OPENAT, Wait.STORAGE),
    Syscall("mmap", 9, 222, Call.MMAP, Wait.STORAGE),
    Syscall("munmap", 11, 215, Call.MUNMAP, Wait.LOCK),
    Syscall("madvise", 28, 233, Call.MADVISE, Wait.STORAGE),
    Syscall("fadvise64", 221, 223, Call.FADVISE, Wait.STORAGE),
    Syscall("readahead", 187, 213, Call.READAHEAD, Wait.STORAGE),
    Syscall("read", 0, 63, Call.READ, Wait.PIPE),
    Syscall("readv", 19, 65, Call.READV, Wait.PIPE),
    Syscall("pread64", 17, 67, Call.PREAD, Wait.STORAGE),
    Syscall("preadv", 295, 69, Call.PREADV, Wait.STORAGE),
    Syscall("preadv2", 327, 286, Call.PREADV, Wait.STORAGE),
    Syscall("pwrite64", 18, 68, Call.PWRITE),
    Syscall("pwritev", 296, 70, Call.PWRITE),
    Syscall("pwritev2", 328, 287, Call.PWRITE),
    Syscall("recvfrom", 45, 207, Call.RECV, Wait.NETWORK),
    Syscall("recvmsg", 47, 212, Call.RECVMSG, Wait.NETWORK),
    Syscall("write", 1, 64, Call.WRITE, Wait.PIPE),
    Syscall("writev", 20, 66, Call.WRITEV, Wait.PIPE),
    Syscall("sendto", 44, 206, Call.SEND, Wait.NETWORK),
    Syscall("sendmsg", 46, 211, Call.SENDMSG, Wait.NETWORK),
    Syscall("accept", 43, 202, Call.ACCEPT, Wait.NETWORK),
    Syscall("accept4", 288, 242, Call.ACCEPT, Wait.NETWORK),
    Syscall("connect", 42, 203, Call.CONNECT, Wait.NETWORK),
    Syscall("close", 3, 57, Call.CLOSE),
    Syscall("stat", 4, None, wait=Wait.STORAGE),
    Syscall("lstat", 6, None, wait=Wait.STORAGE),
    Syscall("newfstatat", 262, 79, wait=Wait.STORAGE),
    Syscall("statx", 332, 291, wait=Wait.STORAGE),
    Syscall("getdents64", 217, 61, wait=Wait.STORAGE),
    Syscall("fsync", 74, 82, wait=Wait.STORAGE),
    Syscall("fdatasync", 75, 83, wait=Wait.STORAGE),
    Syscall("mlock", 149, 228, wait=Wait.STORAGE),
    Syscall("sendfile", 40, 71, wait=Wait.STORAGE),
    Syscall("splice", 275, 76, wait=Wait.STORAGE),
    Syscall("copy_file_range", 326, 285, wait=Wait.STORAGE),
    Syscall("io_uring_enter", 426, 426, Call.URING, Wait.STORAGE),
    Syscall("io_getevents", 208, 4, wait=Wait.STORAGE),
    Syscall("execve", 59, 221, wait=Wait.STORAGE),
    Syscall("poll", 7, None, wait=Wait.NETWORK),
    Syscall("ppoll", 271, 73, wait=Wait.NETWORK),
    Syscall("select", 23, None, wait=Wait.NETWORK),
    Syscall("pselect6", 270, 72, wait=Wait.NETWORK),
    Syscall("epoll_wait", 232, None, wait=Wait.NETWORK),
    Syscall("epoll_pwait", 281, 22, wait=Wait.NETWORK),
    Syscall("epoll_pwait2", 441, 441, wait=Wait.NETWORK),
    Syscall("nanosleep", 35, 101, wait=Wait.TIMER),
    Syscall("clock_nanosleep", 230, 115, wait=Wait.TIMER),
    Syscall("futex", 202, 98, wait=Wait.LOCK),
    Syscall("futex_waitv", 449, 449, wait=Wait.LOCK),
    Syscall("wait4", 61, 260, wait=Wait.CHILD),
    Syscall("waitid", 247, 95, wait=Wait.CHILD),
    Syscall("vfork", 58, None, wait=Wait.CHILD),
    Syscall("clone", 56, 220, wait=Wait.CHILD),
    Syscall("clone3", 435, 435, wait=Wait.CHILD),
    Syscall("ioctl", 16, 29, Call.IOCTL, Wait.DEVICE),
)

TABLE_SIZE = 512


def call_tables(machine: str = platform.machine()) -> tuple[bytes, bytes]:
    """(call_class, call_wait) of `struct settings`: 512 bytes each, by system call number."""
    classes = bytearray(TABLE_SIZE)
    waits = bytearray([Wait.OTHER] * TABLE_SIZE)
    for row in SYSCALLS:
        number = row.x86_64 if machine == "x86_64" else row.aarch64
        if number is not None:
            classes[number] = row.call
            waits[number] = row.wait
    return bytes(classes), bytes(waits)


def syscall_name(number: int, machine: str = platform.machine()) -> str | None:
    """The name of a call in the table, or None."""
    for row in SYSCALLS:
        if number == (row.x86_64 if machine == "x86_64" else row.aarch64):
            return row.name
    return None
