# shellcheck shell=bash disable=SC2154
# Sourced by scripts/vm-test: a VM that is suspended while it records. Its root lies in memory, for 9P's driver does not
# come back from a suspend, and it has no device but its console, by which the recording comes out.

# All that suspend.py needs, as an initramfs.
suspend_initrd() { # suspend_initrd FOLDER
    local vm=$1 tree=$1/tree python packages name file
    python=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
    packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    rm -rf "$tree"
    mkdir -p "$tree"/{bin,proc,sys,dev,tmp,run,work,etc} "$tree/site" "$tree$python"
    cp "$(command -v busybox)" "$tree/bin/busybox"
    cp "$(readlink -f .venv/bin/python)" "$tree/bin/python"
    (cd "$python" && tar -c --exclude=test --exclude=idlelib --exclude=lib2to3 --exclude='config-*' .) | tar -x -C "$tree$python"
    for name in click rich numpy numpy.libs psutil elftools pynvml.py; do
        (cd "$packages" && tar -c --exclude=tests "$name") | tar -x -C "$tree/site"
    done
    cp -r collector/ttftprof "$tree/site/"
    mkdir -p "$tree/site/lab/vm"
    cp tests/lab/__init__.py "$tree/site/lab/"
    cp tests/lab/vm/{guest,suspend}.py "$tree/site/lab/vm/"
    # What these are linked with, and the libraries that are opened by name.
    {
        find "$tree/bin/python" "$tree/site" "$tree$python" \( -name '*.so*' -o -name python \) -exec ldd {} + 2>/dev/null
        ldd "$(ldconfig -p | awk '/libbpf.so.1 .*x86-64/ { print $NF }' | head -n 1)"
    } | awk '$2 == "=>" && $3 ~ /^\// { print $3 } $1 ~ /^\/lib.*ld-/ { print $1 }' | sort -u |
        grep -v "^$vm" >"$vm/libraries"
    ldconfig -p | awk '/libbpf.so.1 .*x86-64/ { print $NF }' >>"$vm/libraries"
    while read -r file; do
        mkdir -p "$tree$(dirname "$file")"
        cp -L "$file" "$tree$file"
    done <"$vm/libraries"
    printf '%s\n' '#!/bin/busybox sh' 'mount() { /bin/busybox mount "$@"; }' 'mount -t proc p /proc' \
        'mount -t sysfs s /sys' 'mount -t devtmpfs d /dev' 'mount -t tmpfs t /work' \
        'echo 1 >/proc/sys/kernel/bpf_stats_enabled' \
        'PYTHONPATH=/site PATH=/bin /bin/python -m lab.vm.suspend /work' 'echo b >/proc/sysrq-trigger' \
        '/bin/busybox sleep 20' >"$tree/init"
    chmod 755 "$tree/init"
    (cd "$tree" && find . | busybox cpio -o -H newc >"$vm/initrd" 2>/dev/null)
    rm -rf "$tree"
}

# FOLDER/results/suspend.ttft and .json.
suspend_boot() { # suspend_boot KERNEL FOLDER
    local vm=$2
    rm -rf "$vm/results"
    mkdir -p "$vm/results"
    vm_run "$vm" -kernel "$1" -initrd "$vm/initrd" -append "$vm_words apparmor=0 no_console_suspend"
    .venv/bin/python -c "import base64, pathlib, re, sys
said = pathlib.Path(sys.argv[1]).read_text(errors='replace')
for name, text in re.findall(r'file (\S+) ([\w+/=]+) end', said):
    pathlib.Path(sys.argv[2], name).write_bytes(base64.b64decode(text))" "$vm/console.log" "$vm/results"
    [ -e "$vm/results/done" ] && return
    tail -c 3000 "$vm/console.log" >&2
    return 1
}
