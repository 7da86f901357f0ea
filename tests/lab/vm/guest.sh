#!/bin/bash
# Runs in the VM, as root on the host's own (read-only) root: NFS and SMB servers on loopback with their
# mounts, layers over loop devices, and guest.py, which records while they come. Arguments: the checkout, the
# folder for results, the reader.
repo=$1 out=$2 reader=$3
exec </dev/null >"$out/guest.log" 2>&1
PS4='+ $EPOCHREALTIME '
set -x
export PATH=/usr/sbin:/usr/bin:/sbin:/bin DM_DISABLE_UDEV=1
echo vm >/proc/sys/kernel/hostname
# The recorder turns the kernel's BPF statistics on for short windows, and each time the kernel patches
# its own code. QEMU's threaded emulation can keep the breakpoint that stands there meanwhile for good:
# both CPUs then trap for ever at a place where memory holds no trap. On from the start, nothing is patched.
echo 1 >/proc/sys/kernel/bpf_stats_enabled
mkdir /run/results
# Python takes longest to start under emulation: it does so while the servers do.
cd "$repo" || exit 1
PYTHONPATH=$repo/collector .venv/bin/python tests/lab/vm/guest.py "$reader" /run/results &
guest=$!

end() { # end WORDS: what there is goes to the host, and the VM is off
    echo "$@"
    dmesg >/run/results/dmesg
    cp -r /run/results/. "$out/"
    uptime
    [ "$1" != done ] || touch "$out/done"
    sync
    echo o >/proc/sysrq-trigger
    sleep 10
    echo b >/proc/sysrq-trigger
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

modprobe -a nfsd nfs nfsv3 nfsv4 loop ext4 dm-mod dm-delay dm-crypt raid1
ip link set lo up
mount -t tracefs t /sys/kernel/tracing
touch /run/results/modules
mkdir -p /run/exp /run/nfs42 /run/nfs3 /run/smb /run/few
mount -t tmpfs t /run/exp
head -c 67108864 /dev/urandom >/run/exp/model.gguf
head -c 16777216 /run/exp/model.gguf >/run/exp/part.gguf
head -c 4194304 /run/exp/model.gguf >/run/exp/few.gguf

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

serve_smb() { # serve_smb NAME PORT SETTING…: a server with folders of its own
    local own=/run/$1 port=$2
    shift 2
    mkdir -p $own
    {
        printf '%s\n' '[global]' 'map to guest = Bad User' 'server min protocol = SMB3' 'interfaces = lo' \
            'bind interfaces only = yes' "smb ports = $port" "log file = $own/log" "$@"
        for folder in 'lock directory' 'state directory' 'cache directory' 'pid directory' 'private dir' 'ncalrpc dir'; do
            mkdir -p $own/${folder% *}
            echo "$folder = $own/${folder% *}"
        done
        printf '%s\n' '[model]' 'path = /run/exp' 'guest ok = yes' 'read only = yes' 'force user = root'
    } >$own.conf
    smbd -D -s $own.conf
}
serve_smb server 445
serve_smb miser 446 'smb2 max credits = 2'

disk() { # disk NAME: a new loop device of 24 MiB, whose file lies in memory
    truncate -s 24M /run/img/$1
    losetup --find --show /run/img/$1
}
fill() { # fill DEVICE BYTES: a file system with a model in it
    mkfs.ext4 -q -O ^has_journal $1 && mount $1 /run/fill
    head -c $2 /run/exp/model.gguf >/run/fill/model.gguf
    umount /run/fill
}
mkdir -p /run/img /run/fill /run/delay /run/crypt /run/raid
mount -t tmpfs t /run/img
plain=$(disk delay)
fill $plain 2097152
dmsetup create slow --table "0 $(blockdev --getsz $plain) delay $plain 0 200"
mount -o ro /dev/mapper/slow /run/delay || end "no delay"
secret=$(disk crypt)
printf key | cryptsetup luksFormat -q --pbkdf pbkdf2 --pbkdf-force-iterations 1000 $secret - &&
    printf key | cryptsetup open --key-file - $secret secret
fill /dev/mapper/secret 4194304
mount -o ro /dev/mapper/secret /run/crypt || end "no LUKS"
one=$(disk raid1) two=$(disk raid2)
mdadm --create /dev/md0 --quiet --run --assume-clean --metadata=1.2 --level=1 --raid-devices=2 $one $two
fill /dev/md0 4194304
mount -o ro /dev/md0 /run/raid || end "no RAID"

# The module of SMB comes while recording runs, as with a share that is mounted then. What hooks it holds it.
await 300 test -e /run/results/armed
modprobe cifs
held() { [ "$(cat /sys/module/cifs/refcnt)" != 0 ]; }
await 120 held
echo 1 >/sys/kernel/tracing/events/cifs/smb3_read_enter/enable
await 30 mount -t cifs -o guest,vers=3.1.1 //127.0.0.1/model /run/smb
await 30 mount -t cifs -o guest,vers=3.1.1,port=446,nosharesock //127.0.0.1/model /run/few

ls /sys/class/bdi
wait $guest || end "guest.py: $?"
cp /proc/self/mountinfo /run/results/mountinfo
for event in nfs/nfs_initiate_read nfs/nfs_readpage_done nfs/nfs_readpage_short \
    nfs/nfs_aop_readahead sunrpc/rpc_stats_latency cifs/smb3_read_enter cifs/smb3_read_done \
    cifs/smb3_cmd_done cifs/smb3_wait_credits netfs/netfs_sreq; do
    mkdir -p /run/results/formats/${event%/*}
    cp /sys/kernel/tracing/events/$event/format /run/results/formats/$event
done
end done
