#!/bin/sh
# Runs in the VM, as root on the host's own (read-only) root: NFS and SMB servers on loopback with their
# mounts, then guest.py. Arguments: the checkout, the folder for results, the reader.
repo=$1 out=$2 reader=$3
exec >"$out/guest.log" 2>&1
set -x
# The recorder turns the kernel's BPF statistics on for short windows, and each time the kernel patches
# its own code. QEMU's threaded emulation can keep the breakpoint that stands there meanwhile for good:
# both CPUs then trap for ever at a place where memory holds no trap. On from the start, nothing is patched.
echo 1 >/proc/sys/kernel/bpf_stats_enabled
mkdir /run/results
# Python takes longest to start under emulation: it does so while the servers do.
cd "$repo" || exit 1
PYTHONPATH=$repo/collector "$repo/.venv/bin/python" tests/lab/vm/guest.py "$reader" /run/results &
guest=$!

for module in nfsd nfs nfsv3 nfsv4 cifs; do modprobe $module; done
ip link set lo up
mountpoint -q /sys/kernel/tracing || mount -t tracefs t /sys/kernel/tracing
mkdir -p /run/exp /run/nfs42 /run/nfs3 /run/smb
mount -t tmpfs t /run/exp
head -c 67108864 /dev/urandom >/run/exp/model.gguf

mount -t tmpfs t /var/lib/nfs
mkdir -p /var/lib/nfs/v4recovery /var/lib/nfs/rpc_pipefs
touch /var/lib/nfs/etab /var/lib/nfs/rmtab /var/lib/nfs/state # or exportfs fails and mounts hang
mount -t nfsd nfsd /proc/fs/nfsd
# Written before the server starts; with the default the first open would wait for 90 s.
echo 10 >/proc/fs/nfsd/nfsv4leasetime
echo 10 >/proc/fs/nfsd/nfsv4gracetime
exportfs -o rw,no_root_squash,insecure,fsid=0 127.0.0.1:/run/exp
rpcbind -w || rpcbind
rpc.mountd -N 2 &

mount -t tmpfs t /var/lib/samba
mkdir -p /run/samba /var/lib/samba/private /var/log/samba /var/cache/samba
cat >/run/smb.conf <<CONFIG
[global]
    map to guest = Bad User
    server min protocol = SMB3
    smb ports = 445
    interfaces = lo
    bind interfaces only = yes
    log file = /run/smbd.log
    cache directory = /run/samba
[model]
    path = /run/exp
    guest ok = yes
    read only = yes
    force user = root
CONFIG
smbd -D -s /run/smb.conf
sleep 2
rpc.nfsd -V 4.2 4
mount -t nfs4 -o vers=4.2 127.0.0.1:/ /run/nfs42 || exit 1
mount -t nfs -o vers=3,nolock,nconnect=2,proto=tcp,mountproto=tcp 127.0.0.1:/run/exp /run/nfs3 || exit 1
mount -t cifs -o guest,vers=3.1.1 //127.0.0.1/model /run/smb || exit 1

# Layers over loop devices, whose files lie in memory: device-mapper (a delay, LUKS) and RAID.
export DM_DISABLE_UDEV=1
for module in loop ext4 dm-mod dm-delay dm-crypt raid1; do modprobe $module; done
mkdir -p /run/img /run/delay /run/crypt /run/raid
mount -t tmpfs t /run/img
disk() { # disk NAME: a new loop device of 24 MiB
    truncate -s 24M /run/img/$1
    losetup --find --show /run/img/$1
}
fill() { # fill DEVICE FOLDER BYTES: a file system with a model in it, mounted anew
    mkfs.ext4 -q -O ^has_journal $1 && mount $1 $2
    head -c $3 /dev/urandom >$2/model.gguf
    umount $2
}
plain=$(disk delay)
fill $plain /run/delay 2097152
dmsetup create slow --table "0 $(blockdev --getsz $plain) delay $plain 0 200"
mount -o ro /dev/mapper/slow /run/delay || exit 1
secret=$(disk crypt)
printf key | cryptsetup luksFormat -q --pbkdf pbkdf2 --pbkdf-force-iterations 1000 $secret - &&
    printf key | cryptsetup open --key-file - $secret secret
fill /dev/mapper/secret /run/crypt 4194304
mount -o ro /dev/mapper/secret /run/crypt || exit 1
one=$(disk raid1) two=$(disk raid2)
mdadm --create /dev/md0 --quiet --run --assume-clean --metadata=1.2 --level=1 --raid-devices=2 $one $two
fill /dev/md0 /run/raid 4194304
mount -o ro /dev/md0 /run/raid || exit 1

for mount in /run/nfs42 /run/nfs3 /run/smb; do mountpoint -d $mount; done
ls /sys/class/bdi
touch /run/results/prepared
wait $guest
echo "guest.py: $?"
cp /proc/self/mountinfo /run/results/mountinfo
for event in nfs/nfs_initiate_read nfs/nfs_readpage_done nfs/nfs_readpage_short \
    nfs/nfs_aop_readahead sunrpc/rpc_stats_latency cifs/smb3_read_enter cifs/smb3_read_done \
    cifs/smb3_cmd_done netfs/netfs_sreq; do
    mkdir -p /run/results/formats/${event%/*}
    cp /sys/kernel/tracing/events/$event/format /run/results/formats/$event
done
dmesg >/run/results/dmesg
cp -r /run/results/. "$out/"
uptime
touch "$out/done"
