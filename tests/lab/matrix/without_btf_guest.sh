#!/bin/bash
# Runs in a VM whose kernel carries no BTF, as root on this machine's own (read-only) root: a disk of its own to read
# from, the kernel's modules and headers where a distribution has them, and without_btf_guest.py. Arguments: the
# checkout, the folder for results, the folder of what was made for it.
repo=$1 out=$2 vm=$3
exec </dev/null >"$out/guest.log" 2>&1
PS4='+ $EPOCHREALTIME '
# shellcheck source=tests/lab/vm/leave.sh
. "$repo/tests/lab/vm/leave.sh"
set -x
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/run
echo vm >/proc/sys/kernel/hostname
# See tests/lab/vm/guest.sh: the kernel is not to patch itself under emulation.
echo 1 >/proc/sys/kernel/bpf_stats_enabled
ip link set lo up
mount -t tracefs t /sys/kernel/tracing
mount -t tmpfs t /lib/modules
ln -s "$vm"/modules/* /lib/modules/
ls /sys/kernel/btf /lib/modules/*/build/
mkdir -p /run/disk /run/results
truncate -s 200M /run/disk.img
mkfs.ext4 -q -O ^has_journal /run/disk.img
mount -o loop /run/disk.img /run/disk
cp -r "$vm/build" /run/disk/
cd "$repo" || exit 1
PYTHONPATH=$repo/collector:$repo/tests .venv/bin/python tests/lab/matrix/without_btf_guest.py /run/disk /run/results &&
    end="done"
leave "${end:-failed}"
