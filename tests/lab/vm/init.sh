#!/bin/sh
# The first program of the VM: this machine's root by 9P, read-only and cached, and the guest's script on it.
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in /modules/*.ko; do insmod "$module"; done
read -r line </proc/cmdline
for word in $line; do
    case $word in
        ttftprof_root=*) repo=${word#*=} ;;
        ttftprof_guest=*) guest=${word#*=} ;;
        ttftprof_folder=*) vm=${word#*=} ;;
    esac
done
how=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o ro,$how,cache=loose root /root || exec sh
mkdir /checkout
mount --bind "/root$repo" /checkout
for folder in proc sys dev; do mount --move /$folder /root/$folder; done
for folder in run tmp var/log var/cache var/lib/nfs var/lib/samba; do mount -t tmpfs t /root/$folder; done
# A checkout below one of these, as in /tmp, is put back.
[ -d "/root$repo" ] || { mkdir -p "/root$repo" && mount --move /checkout "/root$repo"; }
mount -t 9p -o rw,$how results "/root$vm/results" || exec sh
exec switch_root /root /bin/bash "$repo/$guest" "$repo" "$vm/results" "$vm"
