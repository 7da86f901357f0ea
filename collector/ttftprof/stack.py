"""What lies under a file: mount, file system, block layers, disk or server, and their readahead.

Reads /proc and /sys only (through `System`, whose roots a test replaces); nothing is changed and
the file's content is not touched. What the kernel does not say is left out, never guessed.
"""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ttftprof.sources.mounts import Mount, mount_under, parse_mountinfo, unescape
from ttftprof.sources.overlay import OVERLAY, beneath

# File systems whose files live in memory: there is no storage to measure.
MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs", "rootfs"})
# File systems made of kernel data.
SYNTHETIC = frozenset({"proc", "sysfs", "cgroup", "cgroup2", "debugfs", "tracefs", "bpf", "devpts"})
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "lustre", "afs", "glusterfs"})
# Options that decide how a file is read; the rest is in `Mount.options`.
_TELLING = (
    "vers", "proto", "rsize", "nconnect", "max_channels", "rasize", "cache", "hard", "soft", "fsc",
    "sec", "actimeo", "noac", "trans", "msize", "max_read", "compress", "compress-force", "subvol",
    "dax", "sync", "ro",
)  # fmt: skip
_MAX_DEPTH = 12
_SECRET = re.compile(r"(?i)(pass|secret|cred|key)")


@dataclass(frozen=True, slots=True)
class System:
    """Where facts are read: the roots of /proc and /sys, and a test for a path's existence."""

    proc: Path = Path("/proc")
    sysfs: Path = Path("/sys")
    exists: Callable[[str], bool] = os.path.lexists


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer; `below` is what it reads from (several: a stripe, a mirror, a pool).

    `kind`: file system, partition, crypt, volume, multipath, raid, loop, cache, disk, memory,
    controller, target, server, interface. `read_ahead_kb` comes from the layer's own bdi, whose
    file is `read_ahead_file`. `line_rate` is the link's, in bytes per second after line coding,
    before any protocol: an upper bound.
    """

    kind: str
    name: str
    facts: tuple[tuple[str, str], ...] = ()
    read_ahead_kb: int | None = None
    read_ahead_file: Path | None = None
    line_rate: float | None = None
    below: tuple[Layer, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stack:
    """The layers under a path as a process sees it; `mount` is None if no mount was found."""

    path: str
    mount: Mount | None
    top: Layer
    notes: tuple[str, ...] = field(default=())

    def layers(self) -> Iterator[Layer]:
        """Every layer, top first."""
        yield from _walk(self.top)

    @property
    def fstype(self) -> str:
        return self.mount.fstype if self.mount else "?"

    @property
    def in_memory(self) -> bool:
        return self.fstype in MEMORY | SYNTHETIC

    @property
    def is_zfs(self) -> bool:
        return any(fact == ("type", "zfs") for layer in self.layers() for fact in layer.facts)

    @property
    def readahead(self) -> Layer | None:
        """The layer whose readahead the kernel uses for this file.

        That of the file system if it has a bdi of its own, else of the device it is mounted from
        (for a partition, its disk): a file takes it over when it is opened.
        """
        return next((layer for layer in self.layers() if layer.read_ahead_kb is not None), None)

    @property
    def line_rate(self) -> tuple[float, str] | None:
        """The narrowest link on the way, (bytes per second, what it is); None if none is known."""
        return _narrowest(self.top)


def _walk(layer: Layer) -> Iterator[Layer]:
    yield layer
    for lower in layer.below:
        yield from _walk(lower)


def _narrowest(layer: Layer) -> tuple[float, str] | None:
    """Of a chain the smallest; of several below one layer their sum, if all are known."""
    below = [_narrowest(lower) for lower in layer.below]
    known = [rate for rate in below if rate is not None]
    found: list[tuple[float, str]] = []
    if layer.line_rate is not None:
        found.append((layer.line_rate, f"{layer.kind} {layer.name}"))
    if len(known) == 1 == len(below):
        found.append(known[0])
    elif known and len(known) == len(below):
        found.append((sum(rate for rate, _ in known), " + ".join(what for _, what in known)))
    return min(found, default=None)


# -- from a path to its mount ----------------------------------------------------------------------


def read_mounts(pid: int | None, system: System) -> list[Mount]:
    """The mounts a process sees (None: this one)."""
    file = system.proc / ("self" if pid is None else str(pid)) / "mountinfo"
    return parse_mountinfo(file.read_text(errors="surrogateescape"))


def stack_of(
    path: str, mount_id: int | None = None, pid: int | None = None, system: System | None = None
) -> Stack:
    """The layers under `path`, which is absolute and without links in the namespace of `pid`.

    `mount_id` (of an open file, from its fdinfo) tells mounts apart that a path cannot, such as
    one that was mounted over since. Raises OSError if the mounts cannot be read.
    """
    system = system or System()
    return _describe(path, _pick(path, mount_id, read_mounts(pid, system)), system, 0)


def _pick(path: str, mount_id: int | None, mounts: list[Mount]) -> Mount | None:
    by_id = next((m for m in mounts if mount_id is not None and m.mount_id == mount_id), None)
    return by_id or mount_under(path, mounts)


def path_facts(path: str, pid: int | None, system: System | None = None) -> dict[str, Any]:
    """What a recording keeps of the stack under a file; nothing where it cannot be read.

    `read_ahead_kb`, `max_request_kb` (None: not known), `link` and `line_bytes_per_second` of the
    narrowest link, `layers` from the top down, `fstypes` of those that are file systems.
    """
    system = system or System()
    try:
        stack = stack_of(path, pid=pid, system=system)
    except OSError:
        return {}
    governing, line = stack.readahead, stack.line_rate
    return {
        "read_ahead_kb": governing.read_ahead_kb if governing else None,
        "max_request_kb": _max_request_kb(governing, system),
        "link": line[1] if line else None,
        "line_bytes_per_second": line[0] if line else None,
        "layers": [f"{layer.kind} {layer.name}" for layer in stack.layers()],
        "fstypes": [layer.name for layer in stack.layers() if layer.kind == "file system"],
    }


def _max_request_kb(layer: Layer | None, system: System) -> int | None:
    """The largest request of the device whose bdi the layer's is; a bdi of its own has no queue."""
    if layer is None or layer.read_ahead_file is None:
        return None
    number = layer.read_ahead_file.parent.name
    return _number(system.sysfs / "dev/block" / number / "queue/max_sectors_kb")


def _describe(path: str, mount: Mount | None, system: System, depth: int) -> Stack:
    if mount is None:
        return Stack(path, None, Layer("file system", "?", notes=("no mount was found",)))
    layer = _file_system(path, mount, system, depth)
    if mount.root not in ("/", _option(mount, "subvol")):
        note = f"{mount.point} is a bind mount of {mount.root}"
        layer = replace(layer, notes=(*layer.notes, note))
    return Stack(path, mount, layer)


def options_of(mount: Mount) -> dict[str, str]:
    """{name: value} of the options in force, '' for flags; octal escapes undone."""
    found: dict[str, str] = {}
    for part in mount.options.split(","):
        name, _, value = part.partition("=")
        if name:
            found[unescape(name)] = unescape(value)
    return found


def _option(mount: Mount, name: str) -> str:
    return options_of(mount).get(name, "")


def telling_options(mount: Mount) -> str:
    """The options that decide how a file is read, as `name=value`, in a fixed order."""
    given = options_of(mount)
    shown = (f"{n}={given[n]}" if given[n] else n for n in _TELLING if n in given)
    return ",".join(shown)


def safe_options(mount: Mount) -> str:
    """All options, the values of secret-looking ones blotted out."""
    shown = []
    for part in mount.options.split(","):
        name, equals, _ = part.partition("=")
        shown.append(f"{name}=…" if equals and _SECRET.search(name) else part)
    return ",".join(shown)


# -- file systems ----------------------------------------------------------------------------------


def _file_system(path: str, mount: Mount, system: System, depth: int) -> Layer:
    kind = mount.fstype
    facts = [("type", kind), ("mount", mount.point), ("source", mount.source)]
    if telling := telling_options(mount):
        facts.append(("options", telling))
    layer = Layer("file system", kind, tuple(facts))
    layer = _with_readahead(layer, _bdi_of_file_system(mount, system))
    if depth > _MAX_DEPTH:
        return replace(layer, notes=("too many layers to follow",))
    if kind in MEMORY | SYNTHETIC:
        return replace(layer, notes=("its files are in memory: there is no storage below",))
    if kind == OVERLAY:
        return _overlay(layer, path, mount, system, depth)
    if kind in NETWORK:
        return _network(layer, mount, system)
    if kind == "btrfs":
        return replace(layer, below=tuple(_btrfs_devices(mount, system, depth)))
    if kind == "zfs":
        return _zfs(layer, mount, system)
    if mount.dev[0] != 0:
        return replace(layer, below=(block_device(mount.dev, system, depth + 1),))
    return _user_space(layer, mount, system, depth)


def _with_readahead(layer: Layer, files: list[Path]) -> Layer:
    """The layer with its readahead: known if every bdi that may be its own agrees."""
    values = [(value, file) for file in files if (value := _number(file)) is not None]
    if not values:
        return layer
    if len({value for value, _ in values}) == 1:
        file = values[0][1] if len(values) == 1 else None
        return replace(layer, read_ahead_kb=values[0][0], read_ahead_file=file)
    shown = ", ".join(f"{file.parent.name}: {value} KiB" for value, file in values)
    return replace(layer, notes=(*layer.notes, f"readahead is one of {shown}"))


def _bdi_of_file_system(mount: Mount, system: System) -> list[Path]:
    """The read_ahead_kb files that may be this file system's own.

    NFS, FUSE and virtiofs name their bdi after the device number (FUSE on a block device with a
    suffix); cifs, 9p, ceph and zfs count up, `cifs-1`, and do not say which mount is which;
    btrfs links to it. Source: super_setup_bdi_name and its callers in the kernel.
    """
    bdis = system.sysfs / "class/bdi"
    number = "{}:{}".format(*mount.dev)
    if mount.dev[0] != 0:
        return []
    for name in (number, f"{number}-fuseblk"):
        if (bdis / name / "read_ahead_kb").exists():
            return [bdis / name / "read_ahead_kb"]
    if mount.fstype == "btrfs":
        folder = _btrfs_folder(mount, system)
        if folder is not None and (folder / "bdi/read_ahead_kb").exists():
            return [folder / "bdi/read_ahead_kb"]
    counted = re.compile(re.escape(mount.fstype) + r"-\d+")
    return [b / "read_ahead_kb" for b in _entries(bdis) if counted.fullmatch(b.name)]


def _btrfs_folder(mount: Mount, system: System) -> Path | None:
    """/sys/fs/btrfs/UUID of the file system that has the mount's source among its devices."""
    device = _by_source(mount.source, system)
    folders = [f for f in _entries(system.sysfs / "fs/btrfs") if (f / "devices").is_dir()]
    if device is None:
        return folders[0] if len(folders) == 1 else None
    own = device.resolve().name
    return next((f for f in folders if (f / "devices" / own).exists()), None)


def _btrfs_devices(mount: Mount, system: System, depth: int) -> Iterator[Layer]:
    folder = _btrfs_folder(mount, system)
    for device in _entries(folder / "devices") if folder else []:
        yield _block(device.resolve(), system, depth + 1)


def _overlay(layer: Layer, path: str, mount: Mount, system: System, depth: int) -> Layer:
    """Files are read from the layer that holds them, with that file system's readahead."""
    found = beneath(path, mount, system.exists)
    if found is None:
        return replace(layer, notes=("which layer holds the file cannot be seen from here",))
    folder, held = found
    facts = (*layer.facts, ("the file is in", folder))
    return replace(layer, facts=facts, below=(_seen_from_here(held, system, depth),))


def _seen_from_here(path: str, system: System, depth: int) -> Layer:
    """The file system of a path that is not the server's, but this program's to see."""
    mount = mount_under(path, read_mounts(None, system))
    return _describe(path, mount, system, depth + 1).top


def _zfs(layer: Layer, mount: Mount, system: System) -> Layer:
    pool = mount.source.partition("/")[0]
    size = _arc_bytes(system)
    facts = [("pool", pool)]
    if size is not None:
        facts.append(("ARC now", f"{size / 1e9:.2f} GB"))
    notes = ("ZFS caches in its ARC, which the kernel's page cache calls cannot see or drop",
             f"its disks: zpool status {pool}")  # fmt: skip
    return replace(layer, facts=(*layer.facts, *facts), notes=(*layer.notes, *notes))


def _arc_bytes(system: System) -> int | None:
    for line in _text(system.proc / "spl/kstat/zfs/arcstats").splitlines():
        fields = line.split()
        if len(fields) == 3 and fields[0] == "size" and fields[2].isdigit():
            return int(fields[2])
    return None


def _user_space(layer: Layer, mount: Mount, system: System, depth: int) -> Layer:
    """FUSE, virtiofs, and whatever else has no device number of its own."""
    device = _by_source(mount.source, system)
    if device is not None:
        return replace(layer, below=(_block(device.resolve(), system, depth + 1),))
    if mount.fstype == "virtiofs":
        note = "what lies behind it is the host's: run this there too"
        return replace(layer, notes=(*layer.notes, note))
    if not mount.fstype.startswith("fuse"):
        return layer
    facts = layer.facts
    connection = system.sysfs / "fs/fuse/connections" / str(mount.dev[1])
    for name in ("max_background", "waiting"):
        if value := _text(connection / name):
            facts = (*facts, (name, value))
    layer = replace(layer, facts=facts)
    host = _ssh_host(mount.source) if mount.fstype == "fuse.sshfs" else None
    note = "a user-space program answers its requests"
    if host is None:
        return replace(layer, notes=(*layer.notes, note))
    return replace(layer, notes=(*layer.notes, note), below=(_server(host, system),))


def _ssh_host(source: str) -> str | None:
    """`user@host:/folder` → host."""
    host, colon, _ = source.rpartition("@")[2].partition(":")
    return host if colon and host else None


# -- servers and links -----------------------------------------------------------------------------


def _network(layer: Layer, mount: Mount, system: System) -> Layer:
    options = options_of(mount)
    address = options.get("addr") or monitor_of(options.get("mon_addr", ""))
    address = address or server_of(mount.fstype, mount.source)
    if not address:
        return replace(layer, notes=(*layer.notes, "its server is not named in the mount"))
    if mount.fstype == "9p" and options.get("trans") in ("virtio", "fd", "xen"):
        note = f"the host answers its requests over {options['trans']}"
        return replace(layer, notes=(*layer.notes, note))
    return replace(layer, below=(_server(address, system),))


def server_of(fstype: str, source: str) -> str:
    """The server's name or address in a mount's source; '' if it has none.

    `server:/export`, `[2001:db8::1]:/export`, `//server/share`, `a,b,c:/path` (the first).
    """
    if fstype in ("cifs", "smb3"):
        return source.lstrip("/").partition("/")[0]
    host, colon, _ = source.rpartition(":/")
    if not colon:
        return ""
    host = host.split(",")[0]
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def monitor_of(mon_addr: str) -> str:
    """The first address of Ceph's `mon_addr=192.0.2.1:3300/192.0.2.2:3300`: its mounts' sources
    (`user@fsid.name=/path`) name no server. '' if there is none. Source: mount.ceph(8)."""
    first = mon_addr.partition("/")[0]
    if first.startswith("["):
        return first[1:].partition("]")[0]
    return first.partition(":")[0] if first.count(":") == 1 else first


def _server(address: str, system: System) -> Layer:
    """A server and the network interface on the way to it."""
    if is_local(address, system):
        note = "this machine itself: requests do not leave it"
        return Layer("server", address, notes=(note,))
    name = interface_to(address, system)
    if name is None:
        return Layer("server", address, notes=("the interface on the way to it is not known",))
    return Layer("server", address, below=(interface(name, system),))


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return mapped or parsed


def is_local(address: str, system: System) -> bool:
    """Whether an address is one of this machine's own."""
    parsed = _ip(address)
    if parsed is None:
        return address == "localhost"
    if parsed.is_loopback:
        return True
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed) in local_addresses(_text(system.proc / "net/fib_trie"))
    return f"{int(parsed):032x}" in _text(system.proc / "net/if_inet6").split()


def local_addresses(fib_trie: str) -> set[str]:
    """The machine's own IPv4 addresses: leaves of the trie with a /32 entry of scope host."""
    found, leaf = set(), ""
    for line in fib_trie.splitlines():
        words = line.split()
        if words[:1] == ["|--"]:
            leaf = words[1] if len(words) > 1 else ""
        elif words == ["/32", "host", "LOCAL"]:
            found.add(leaf)
    return found


def interface_to(address: str, system: System) -> str | None:
    """The interface of the route with the longest prefix (main table only), or None."""
    parsed = _ip(address)
    if parsed is None:
        return None
    if isinstance(parsed, ipaddress.IPv4Address):
        routes = parse_routes(_text(system.proc / "net/route"))
    else:
        routes = parse_routes6(_text(system.proc / "net/ipv6_route"))
    fitting = [r for r in routes if parsed in r.network]
    best = max(fitting, key=lambda r: (r.network.prefixlen, -r.metric), default=None)
    return best.interface if best else None


@dataclass(frozen=True, slots=True)
class Route:
    network: ipaddress.IPv4Network | ipaddress.IPv6Network
    interface: str
    metric: int


_RTF_UP, _RTF_REJECT, _RTF_LOCAL = 0x1, 0x200, 0x80000000  # linux/route.h, linux/ipv6_route.h


def parse_routes(text: str) -> list[Route]:
    """/proc/net/route: addresses are big-endian numbers printed in host byte order."""
    routes = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        try:
            flags, metric = int(fields[3], 16), int(fields[6])
            address, mask = (
                int.from_bytes(bytes.fromhex(fields[i]), sys.byteorder) for i in (1, 7)
            )
            network = ipaddress.IPv4Network((address, bin(mask).count("1")), strict=False)
        except (IndexError, ValueError):
            continue
        if flags & _RTF_UP and not flags & _RTF_REJECT:
            routes.append(Route(network, fields[0], metric))
    return routes


def parse_routes6(text: str) -> list[Route]:
    """/proc/net/ipv6_route: destination, prefix length, …, metric, …, flags, device."""
    routes = []
    for line in text.splitlines():
        fields = line.split()
        try:
            flags, metric = int(fields[8], 16), int(fields[5], 16)
            destination = (int(fields[0], 16), int(fields[1], 16))
            network = ipaddress.IPv6Network(destination, strict=False)
        except (IndexError, ValueError):
            continue
        if flags & _RTF_UP and not flags & (_RTF_REJECT | _RTF_LOCAL):
            routes.append(Route(network, fields[9], metric))
    return routes


def interface(name: str, system: System, depth: int = 0) -> Layer:
    """A network interface with its speed; of a bond, bridge or VLAN those below it too."""
    folder = system.sysfs / "class/net" / name
    speed = _number(folder / "speed")
    known = speed is not None and 0 < speed < 0xFFFFFFFF  # SPEED_UNKNOWN is -1
    facts = [("speed", f"{speed} Mb/s")] if known else []
    facts += [(n, value) for n in ("duplex", "mtu") if (value := _text(folder / n))]
    notes = []
    if (folder / "wireless").exists() or (folder / "phy80211").exists():
        notes.append("wireless: its rate changes and is not in sysfs (iw dev … link)")
    elif not known:
        notes.append("its link speed is not known to the kernel")
    lower = sorted(p.name[6:] for p in _entries(folder) if p.name.startswith("lower_"))
    below = tuple(interface(n, system, depth + 1) for n in lower) if depth < 4 else ()
    rate = float(speed or 0) * 1e6 / 8 if known else None
    return Layer("interface", name, tuple(facts), None, None, rate, below, tuple(notes))


# -- block devices ---------------------------------------------------------------------------------


def _by_source(source: str, system: System) -> Path | None:
    """The sysfs folder of a device named as in a mount's source: /dev/sda1, /dev/mapper/NAME."""
    if not source.startswith("/dev/"):
        return None
    name = source.removeprefix("/dev/")
    if name.startswith("mapper/"):
        wanted = name.removeprefix("mapper/")
        blocks = _entries(system.sysfs / "class/block")
        return next((b for b in blocks if _text(b / "dm/name") == wanted), None)
    folder = system.sysfs / "class/block" / name.replace("/", "!")
    return folder if folder.exists() else None


def block_device(dev: tuple[int, int], system: System, depth: int = 0) -> Layer:
    """The layers from a block device down; `dev` is (major, minor)."""
    number = "{}:{}".format(*dev)
    folder = system.sysfs / "dev/block" / number
    if not folder.exists():
        return Layer("disk", number, notes=("sysfs does not show this device",))
    return _block(folder.resolve(), system, depth)


def _block(folder: Path, system: System, depth: int) -> Layer:
    name = folder.name.replace("!", "/")
    if depth > _MAX_DEPTH:
        return Layer("disk", name, notes=("too many layers to follow",))
    if (folder / "partition").exists():
        return Layer("partition", name, below=(_block(folder.parent, system, depth + 1),))
    own = _bdi_of_block(folder, system)
    if (folder / "dm").is_dir():
        return _with_readahead(_device_mapper(folder, system, depth), own)
    if (folder / "md").is_dir():
        return _with_readahead(_raid(folder, system, depth), own)
    if (folder / "loop").is_dir():
        return _with_readahead(_loop(folder, system, depth), own)
    if (folder / "bcache").is_dir() and _slaves(folder):
        below = tuple(_block(s, system, depth + 1) for s in _slaves(folder))
        return _with_readahead(Layer("cache", f"bcache {name}", below=below), own)
    if name.startswith(("zram", "ram", "pmem")):
        return _with_readahead(Layer("memory", name, tuple(_queue_facts(folder))), own)
    return _with_readahead(_disk(folder, system), own)


def _bdi_of_block(folder: Path, system: System) -> list[Path]:
    number = _text(folder / "dev")
    for file in (
        system.sysfs / "class/bdi" / number / "read_ahead_kb",
        folder / "bdi/read_ahead_kb",
        folder / "queue/read_ahead_kb",
    ):
        if number and file.exists():
            return [file]
    return []


def _slaves(folder: Path) -> list[Path]:
    return [entry.resolve() for entry in _entries(folder / "slaves")]


# Prefix of a device-mapper uuid → (kind, words). The prefix is a convention of the tools that
# create the devices (cryptsetup, LVM2, multipath-tools, kpartx, VDO).
_DM = (
    ("CRYPT-LUKS2", "crypt", "LUKS2"),
    ("CRYPT-LUKS1", "crypt", "LUKS1"),
    ("CRYPT-VERITY", "crypt", "dm-verity"),
    ("CRYPT-", "crypt", "dm-crypt"),
    ("LVM-", "volume", "LVM"),
    ("mpath-", "multipath", "multipath"),
    ("part", "partition", "partition of a mapped device"),
    ("VDO-", "volume", "VDO"),
)


def _device_mapper(folder: Path, system: System, depth: int) -> Layer:
    uuid = _text(folder / "dm/uuid")
    name = _text(folder / "dm/name") or folder.name
    kind, words = next(
        ((kind, words) for start, kind, words in _DM if uuid.startswith(start)),
        ("volume", "device mapper"),
    )
    below = tuple(_block(s, system, depth + 1) for s in _slaves(folder))
    return Layer(kind, f"{words} {name} ({folder.name})", below=below)


def _raid(folder: Path, system: System, depth: int) -> Layer:
    md = folder / "md"
    level, disks = _text(md / "level"), _text(md / "raid_disks")
    facts = [("level", level), ("disks", disks)]
    if chunk := _number(md / "chunk_size"):
        facts.append(("chunk", f"{chunk >> 10} KiB"))
    notes = []
    if (_number(md / "degraded") or 0) > 0:
        notes.append(f"degraded: {_text(md / 'degraded')} disk(s) missing")
    if (action := _text(md / "sync_action")) not in ("", "idle", "frozen"):
        notes.append(f"busy with {action}")
    below = tuple(_block(s, system, depth + 1) for s in _slaves(folder))
    return Layer("raid", folder.name, tuple(facts), below=below, notes=tuple(notes))


def _loop(folder: Path, system: System, depth: int) -> Layer:
    backing = _text(folder / "loop/backing_file").removesuffix(" (deleted)")
    direct = _text(folder / "loop/dio") == "1"
    facts = [("file", backing), ("direct I/O", "on" if direct else "off")]
    note = "what it reads is cached again below it, and that cache is not dropped"
    layer = Layer("loop", folder.name, tuple(facts), notes=() if direct else (note,))
    if not backing.startswith("/"):
        return layer
    return replace(layer, below=(_seen_from_here(backing, system, depth),))


# -- disks and their links -------------------------------------------------------------------------


def _queue_facts(folder: Path) -> Iterator[tuple[str, str]]:
    queue = folder / "queue"
    if scheduler := re.search(r"\[(\S+)\]", _text(queue / "scheduler")):
        yield "scheduler", scheduler[1]
    for name, unit in (("nr_requests", ""), ("max_sectors_kb", " KiB")):
        if value := _text(queue / name):
            yield name.removesuffix("_kb"), value + unit


def _disk(folder: Path, system: System) -> Layer:
    """A whole disk: what it is, how it turns, and the link it hangs on."""
    facts: list[tuple[str, str]] = []
    device = folder / "device"
    model = " ".join(f"{_text(device / 'vendor')} {_text(device / 'model')}".split())
    if _text(device / "vendor").startswith("0x"):  # a PCI or virtio id, not a name
        model = _text(device / "model")
    if model:
        facts.append(("model", model))
    if rotational := _text(folder / "queue/rotational"):
        # 1 is also what virtual disks say that do not know
        facts.append(("rotational", rotational))
    facts += _queue_facts(folder)
    layer = Layer("disk", folder.name.replace("!", "/"), tuple(facts))
    link = _link(folder, system)
    return replace(layer, below=(link,)) if link else layer


def _link(folder: Path, system: System) -> Layer | None:
    """What the disk hangs on; the first that knows."""
    real = folder.resolve()
    for find in (_nvme, _usb, _iscsi, _sata, _fibre_channel, _virtual):
        if (found := find(real, system)) is not None:
            return found
    return None


def _nvme(disk: Path, system: System) -> Layer | None:
    if not re.match(r"nvme\d", disk.name):
        return None
    device = (disk / "device").resolve()
    if _text(device / "transport"):
        return _nvme_controller(device, system)
    below = sorted(p.resolve() for p in _entries(device) if re.fullmatch(r"nvme\d+", p.name))
    if not below:  # a multipath head lies under its subsystem's name: nvme0n1 → nvme-subsys0
        return None
    if len(below) == 1:
        return _nvme_controller(below[0], system)
    paths = tuple(_nvme_controller(p, system) for p in below)
    return Layer("multipath", device.name, below=paths)


def _nvme_controller(controller: Path, system: System) -> Layer:
    transport = _text(controller / "transport")
    facts = [("transport", transport), ("address", _text(controller / "address"))]
    if transport in ("tcp", "rdma"):
        host = re.search(r"traddr=([^,\s]+)", _text(controller / "address"))
        server = (_server(host[1], system),) if host else ()
        return Layer("controller", controller.name, tuple(facts), below=server)
    pci = (controller / "device").resolve()
    link, rate = pcie_link(_text(pci / "current_link_speed"), _text(pci / "current_link_width"))
    most, most_rate = pcie_link(_text(pci / "max_link_speed"), _text(pci / "max_link_width"))
    if link:
        facts.append(("link", link))
    notes: tuple[str, ...] = ()
    if rate and most_rate and rate < most_rate:
        notes = (f"the device could do {most}",)
    return Layer("controller", controller.name, tuple(facts), line_rate=rate, notes=notes)


# Line coding: 8b/10b up to PCIe 2, 128b/130b from 3 on (64 GT/s: flit mode, taken without loss).
_PCIE_CODING = {2.5: 0.8, 5.0: 0.8, 8.0: 128 / 130, 16.0: 128 / 130, 32.0: 128 / 130, 64.0: 1.0}


def pcie_link(speed: str, width: str) -> tuple[str, float | None]:
    """(`8.0 GT/s × 4`, bytes per second) of sysfs's `8.0 GT/s PCIe` and `4`."""
    match = re.match(r"(\d+(?:\.\d+)?) GT/s", speed)
    if match is None or not width.isdigit() or not 0 < int(width) <= 64:
        return "", None
    transfers = float(match[1])
    coding = _PCIE_CODING.get(transfers)
    rate = transfers * 1e9 * coding * int(width) / 8 if coding else None
    return f"{match[1]} GT/s × {int(width)}", rate


# USB speeds as sysfs gives them (Mb/s) → share left by line coding: USB 2 sends bits as they are
# (but for bit stuffing), 5 Gb/s uses 8b/10b, 10 and 20 Gb/s 128b/132b.
_USB_CODING = {5000.0: 0.8, 10000.0: 128 / 132, 20000.0: 128 / 132}


def _usb(disk: Path, system: System) -> Layer | None:
    parent = next((p for p in disk.parents if (p / "idVendor").exists()), None)
    if parent is None:
        return None
    speed = _text(parent / "speed")
    try:
        megabits = float(speed)
    except ValueError:
        return None
    facts = [("speed", f"{speed} Mb/s")]
    if product := _text(parent / "product"):
        facts.append(("product", product))
    if version := _text(parent / "version"):
        facts.append(("device speaks USB", version))
    notes: tuple[str, ...] = ()
    if megabits <= 480 and (version or "0").startswith("3"):
        notes = ("a USB 3 device at USB 2 speed: its port, hub or cable is the limit",)
    rate = megabits * 1e6 / 8 * _USB_CODING.get(megabits, 1.0)
    return Layer("controller", f"USB {parent.name}", tuple(facts), line_rate=rate, notes=notes)


def _iscsi(disk: Path, system: System) -> Layer | None:
    session = next((p for p in disk.parents if re.fullmatch(r"session\d+", p.name)), None)
    if session is None:
        return None
    name = _text(system.sysfs / "class/iscsi_session" / session.name / "targetname")
    servers = []
    for entry in _entries(system.sysfs / "class/iscsi_connection"):
        if entry.name.startswith(f"connection{session.name[7:]}:"):
            address = _text(entry / "persistent_address") or _text(entry / "address")
            servers.append(_server(address, system))
    return Layer("target", f"iSCSI {name or session.name}", below=tuple(servers))


def _sata(disk: Path, system: System) -> Layer | None:
    port = next((p for p in disk.parents if re.fullmatch(r"ata\d+", p.name)), None)
    if port is None:
        return None
    for link in sorted(port.glob("link*/ata_link/link*")):
        rate = sata_rate(speed := _text(link / "sata_spd"))
        if rate is not None:
            facts = [("speed", speed)]
            most = sata_rate(limit := _text(link / "hw_sata_spd_limit"))
            notes = (f"the port could do {limit}",) if most and most > rate else ()
            return Layer(
                "controller", f"SATA {port.name}", tuple(facts), line_rate=rate, notes=notes
            )
    return Layer("controller", f"ATA {port.name}")


def sata_rate(speed: str) -> float | None:
    """`6.0 Gbps` → bytes per second after 8b/10b coding; None for `<unknown>`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) Gbps", speed)
    return float(match[1]) * 1e9 * 0.8 / 8 if match else None


def _fibre_channel(disk: Path, system: System) -> Layer | None:
    for parent in disk.parents:
        host = system.sysfs / "class/fc_host" / parent.name
        if parent.name.startswith("host") and host.exists():
            speed = _text(host / "speed")
            return Layer("controller", f"Fibre Channel {parent.name}", (("speed", speed),))
    return None


def _virtual(disk: Path, system: System) -> Layer | None:
    if re.match(r"(nbd|rbd|drbd)\d", disk.name):
        note = "a network block device: its server is not in sysfs"
        return Layer("server", disk.name, notes=(note,))
    if re.match(r"zd\d", disk.name):
        note = "a ZFS volume: the ARC caches its blocks too, and cannot be told to drop them"
        return Layer("volume", f"ZFS {disk.name}", (("type", "zfs"),), notes=(note,))
    buses = (("virtio", r"virtio\d+"), ("Xen", r"vbd-\d+"))
    for name, pattern in buses:
        if any(re.fullmatch(pattern, parent.name) for parent in disk.parents):
            note = "a virtual disk: what lies behind it is the host's"
            return Layer("controller", name, notes=(note,))
    return None


# -- reading ---------------------------------------------------------------------------------------


def _text(file: Path) -> str:
    """A sysfs or proc file without its line end; '' where there is none or it refuses."""
    try:
        return file.read_text(errors="surrogateescape").strip()
    except (OSError, ValueError):
        return ""


def _number(file: Path) -> int | None:
    try:
        return int(_text(file))
    except ValueError:
        return None


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
