#!/bin/bash
# Runs in a VM booted with lockdown=integrity and AppArmor, as root on the host's own (read-only) root: every setting
# that a hardened machine has, and adverse.py. Arguments: the checkout, the folder for results, the folder of what was
# made for it.
repo=$1 out=$2 vm=$3
exec </dev/null >"$out/guest.log" 2>&1
PS4='+ $EPOCHREALTIME '
# shellcheck source=tests/lab/vm/leave.sh
. "$repo/tests/lab/vm/leave.sh"
set -x
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
echo vm >/proc/sys/kernel/hostname
# See guest.sh: the kernel is not to patch itself under emulation.
echo 1 >/proc/sys/kernel/bpf_stats_enabled
ip link set lo up
mount -t tracefs t /sys/kernel/tracing
mount -t securityfs s /sys/kernel/security
mkdir /run/results
cat /proc/cmdline /sys/kernel/security/{lsm,lockdown}
for setting in kernel.unprivileged_bpf_disabled=2 kernel.perf_event_paranoid=4 kernel.kptr_restrict=2 \
    kernel.dmesg_restrict=1 net.core.bpf_jit_harden=2 kernel.yama.ptrace_scope=3; do
    sysctl -w $setting
done
sysctl kernel.unprivileged_bpf_disabled kernel.perf_event_paranoid kernel.kptr_restrict net.core.bpf_jit_harden \
    kernel.yama.ptrace_scope >/run/results/settings
# --skip-cache: the host's root cannot be written to.
apparmor_parser --skip-cache --replace "$repo/tests/lab/vm/adverse.apparmor"
cat /sys/kernel/security/apparmor/profiles
cd "$repo" || exit 1
PYTHONPATH=$repo/collector:$repo/tests .venv/bin/python tests/lab/vm/adverse.py "$vm" /run/results &&
    end="done"
leave "${end:-failed}"
