#!/bin/bash
# Runs in the VM, as root on the host's own (read-only) root: NFS and SMB servers on loopback with their
# mounts, layers over loop devices, and guest.py, which records while they come. Arguments: the checkout, the
# folder for results, the folder of what was made for it.
repo=$1 out=$2 vm=$3
exec </dev/null >"$out/guest.log" 2>&1
PS4='+ $EPOCHREALTIME '
# shellcheck source=tests/lab/vm/leave.sh
. "$repo/tests/lab/vm/leave.sh"
set -x
export PATH=/usr/sbin:/usr/bin:/sbin:/bin DM_DISABLE_UDEV=1
echo vm >/proc/sys/kernel/hostname
# The recorder turns the kernel's BPF statistics on for short windows, and each time the kernel patches
# its own code. QEMU's threaded emulation can keep the breakpoint that stands there meanwhile for good:
# both CPUs then trap for ever at a place where memory holds no trap. On from the start, nothing is patched.
echo 1 >/proc/sys/kernel/bpf_stats_enabled
mount --make-rshared / # a recorder has mounts of its own, and is to see those that come
mkdir /run/results
# Python takes longest to start under emulation: it does so while the servers do.
cd "$repo" || exit 1
PYTHONPATH=$repo/collector .venv/bin/python tests/lab/vm/guest.py "$vm/reader" /run/results &
guest=$!

end() { # end WORDS: they are in the log, and the VM is left
    echo "$@"
    leave "$1"
}
await() { # await SECONDS COMMAND…: until it succeeds
    local left=$(($1 * 5))
    shift
    set +x
    until "$@"; do
        left=$((left - 1))
        [ $left -gt 0 ] || end "waited in vain: $*"
        kill -0 $guest || end "guest.py has ended"
        sleep 0.2
    done
    set -x
}

modprobe -a nfsd nfs nfsv3 nfsv4 overlay loop ext4 dm-mod dm-delay dm-crypt raid1
ip link set lo up
mount -t tracefs t /sys/kernel/tracing
touch /run/results/modules
mkdir -p /run/exp /run/nfs42 /run/nfs3 /run/smb /run/few /run/over /run/empty
mount -t tmpfs t /run/exp
head -c 67108864 /dev/zero >/run/exp/model.gguf # written, so that it has no holes
head -c 16777216 /dev/zero >/run/exp/part.gguf
head -c 4194304 /dev/zero >/run/exp/few.gguf

mkdir -p /var/lib/nfs/v4recovery /var/lib/nfs/rpc_pipefs
touch /var/lib/nfs/etab /var/lib/nfs/rmtab /var/lib/nfs/state # or exportfs fails and mounts hang
mount -t nfsd nfsd /proc/fs/nfsd
# Written before the server starts; with the default the first open would wait for 90 s.
echo 10 >/proc/fs/nfsd/nfsv4leasetime
echo 10 >/proc/fs/nfsd/nfsv4gracetime
exportfs -o rw,no_root_squash,insecure,fsid=0 127.0.0.1:/run/exp
rpcbind -w || rpcbind
rpc.mountd -N 2 &
rpc.nfsd -V 4.2 4
await 30 mount -t nfs -o vers=3,nolock,nconnect=2,proto=tcp,mountproto=tcp 127.0.0.1:/run/exp /run/nfs3
await 30 mount -t nfs4 -o vers=4.2 127.0.0.1:/ /run/nfs42
mount -t overlay overlay -o lowerdir=/run/nfs42:/run/empty /run/over || end "no overlay"

serve_smb() { # serve_smb NAME PORT SETTING…: a server with folders of its own
    local own=/run/$1 port=$2
    shift 2
    mkdir -p $own/{lock,state,cache,pid,private,ncalrpc}
    printf '%s\n' '[global]' 'map to guest = Bad User' 'server min protocol = SMB3' "smb ports = $port" \
        'interfaces = lo' 'bind interfaces only = yes' 'disable spoolss = yes' 'load printers = no' \
        "log file = $own/log" "lock directory = $own/lock" "state directory = $own/state" \
        "cache directory = $own/cache" "pid directory = $own/pid" "private dir = $own/private" \
        "ncalrpc dir = $own/ncalrpc" "$@" \
        '[model]' 'path = /run/exp' 'guest ok = yes' 'read only = yes' 'force user = root' >$own.conf
    smbd -D -s $own.conf
}
serve_smb server 445
serve_smb miser 446 'smb2 max credits = 8'

# Layers over loop devices, whose files lie in memory. The file systems were made on the host.
mkdir -p /run/img /run/delay /run/crypt /run/raid
mount -t tmpfs t /run/img
for name in delay raid1 raid2; do cp $vm/plain.img /run/img/$name; done
cp $vm/luks.img /run/img/crypt
disk() { losetup --find --show /run/img/$1; }
plain=$(disk delay) secret=$(disk crypt) one=$(disk raid1) two=$(disk raid2)
mdadm --build /dev/md0 --quiet --run --assume-clean --level=1 --raid-devices=2 $one $two
mount -t ext4 -o ro /dev/md0 /run/raid || end "no RAID"
cryptsetup open --key-file $vm/key $secret secret
mkfs.ext4 -q -O ^has_journal /dev/mapper/secret
mount -t ext4 /dev/mapper/secret /run/crypt || end "no LUKS"
head -c 4194304 /run/exp/model.gguf >/run/crypt/new
mv /run/crypt/new /run/crypt/model.gguf
{
    dmsetup create slow --table "0 $(blockdev --getsz $plain) delay $plain 0 1000" &&
        mount -t ext4 -o ro /dev/mapper/slow /run/delay || end "no delay"
} &

# The module of SMB comes while both recordings run, as with a share that is mounted then. Each of their hooks holds
# it: six of either.
await 300 test -e /run/results/armed
await 300 test -e /run/results/bcc/armed
modprobe cifs
held() { [ "$(cat /sys/module/cifs/refcnt)" -ge 12 ]; }
await 120 held
echo 1 >/sys/kernel/tracing/events/cifs/smb3_read_enter/enable
await 30 mount -t cifs -o guest,vers=3.1.1 //127.0.0.1/model /run/smb
await 30 mount -t cifs -o guest,vers=3.1.1,port=446,nosharesock //127.0.0.1/model /run/few

ls /sys/class/bdi
wait $guest || end "guest.py: $?"
cp /proc/self/mountinfo /run/results/mountinfo
# tests/fixtures/tracefs keeps these, and is held against them.
for event in nfs/nfs_aop_readahead sunrpc/rpc_stats_latency cifs/smb3_read_enter cifs/smb3_read_done \
    cifs/smb3_read_err cifs/smb3_cmd_enter cifs/smb3_cmd_done; do
    mkdir -p /run/results/formats/${event%/*}
    cp /sys/kernel/tracing/events/$event/format /run/results/formats/$event
done
end done
