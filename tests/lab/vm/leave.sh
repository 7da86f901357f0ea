# shellcheck shell=bash disable=SC2154
# Sourced by what runs as the first program of a VM, which has set `out`, the folder that the host sees.

leave() { # leave WORD: what is in /run/results goes to the host, with `done` if that is the word, and the VM is off
    dmesg >/run/results/dmesg
    cp -r /run/results/. "$out/"
    uptime
    [ "$1" != done ] || touch "$out/done"
    sync
    echo o >/proc/sysrq-trigger
    sleep 10
    echo b >/proc/sysrq-trigger
}
