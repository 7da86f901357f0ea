# shellcheck shell=bash disable=SC2154
# Sourced by what boots a VM whose root is this machine's own, read-only by 9P. Needs common.sh, busybox-static,
# kmod, qemu-system-x86, zstd.

# The first program of the VM, and the modules of this kernel by which it reaches this machine's root.
vm_initramfs() { # vm_initramfs FOLDER [RELEASE]: FOLDER/initrd; without RELEASE all is built into the kernel
    local vm=$1 release=${2:-} tree=$1/initramfs number=100 name file
    mkdir -p "$tree"/{bin,modules,root,proc,sys,dev}
    cp "$(command -v busybox)" "$tree/bin/busybox"
    for name in sh mount insmod switch_root; do ln -sf busybox "$tree/bin/$name"; done
    install -m 755 "$root/tests/lab/vm/init.sh" "$tree/init"
    if [ -n "$release" ]; then
        for name in virtio_pci 9p 9pnet_virtio; do modprobe -S "$release" --show-depends "$name"; done |
            awk '$1 == "insmod" && !seen[$2]++ { print $2 }' |
            while read -r file; do
                name=$tree/modules/$number-$(basename "${file%.ko*}").ko
                case $file in
                    *.xz) xz -dc "$file" ;;
                    *.zst) zstd -qdc "$file" ;;
                    *) cat "$file" ;;
                esac >"$name"
                number=$((number + 1))
            done
    fi
    (cd "$tree" && find . | busybox cpio -o -H newc >"$vm/initrd" 2>/dev/null)
}

# Debian's headers of a kernel are two folders, and bcc wants one.
join_headers() { # join_headers TARGET COMMON OWN
    cp -as "$2/." "$1"
    cp -asf "$3/." "$1" 2>>"$log"
}

# What emulation is slow at is left out: switching page tables with every system call, a fifth level of them,
# string instructions (112: rep_good), which it carries out one step after the other.
vm_machine=(timeout 900 qemu-system-x86_64 -machine q35 -accel "tcg,thread=multi" -cpu "max,la57=off,erms=off,fsrm=off"
    -smp 2 -m 2G -nodefaults -display none -serial stdio -no-reboot)
vm_words="console=ttyS0 quiet panic=-1 mitigations=off clearcpuid=112 audit=0 cryptomgr.notests"

vm_run() { # vm_run FOLDER ARGUMENT...: until the VM is off; what it says goes to FOLDER/console.log
    local vm=$1
    shift
    "${vm_machine[@]}" "$@" >"$vm/console.log" 2>&1 </dev/null &
    trap 'kill $!; exit 130' INT TERM
    wait $! || say "the VM ended with an error, or after 15 minutes was not done"
    trap - INT TERM
}

# GUEST, a script of the checkout, runs in a VM with the checkout, FOLDER/results and FOLDER as its arguments. Fails
# if it did not leave FOLDER/results/done.
vm_boot() { # vm_boot KERNEL FOLDER GUEST [WORDS]: WORDS, for the kernel, in place of apparmor=0
    local kernel=$1 vm=$2 share=local,security_model=none,multidevs=remap
    local told="ttftprof_root=$root ttftprof_guest=$3 ttftprof_folder=$vm"
    rm -rf "$vm/results"
    mkdir "$vm/results"
    vm_run "$vm" -kernel "$kernel" -initrd "$vm/initrd" -append "$vm_words ${4:-apparmor=0} $told" \
        -fsdev "$share,id=root,path=/,readonly=on" -device virtio-9p-pci,fsdev=root,mount_tag=root \
        -fsdev "$share,id=results,path=$vm/results" -device virtio-9p-pci,fsdev=results,mount_tag=results
    [ -e "$vm/results/done" ] && return
    tail -n 20 "$vm/console.log" "$vm/results/guest.log" >&2 || true
    return 1
}
