# shellcheck shell=bash disable=SC2154
# Sourced by scripts/kernel-matrix, of whose `suite_apt` it makes use: Debian's source of 6.1 built without BTF (ten
# minutes on two calm cores, then kept). Needs tests/lab/vm/boot.sh.

# FOLDER: vmlinuz, lib/modules/RELEASE, and headers for bcc, to which `build` of the modules leads.
build_without_btf() { # build_without_btf FOLDER
    local folder=$1 source=$1/source suite=bookworm-security release line
    [ ! -e "$folder/vmlinuz" ] || return 0
    apt_need bc bison flex gcc kmod libelf-dev make xz-utils
    mkdir -p "$folder"
    logged "asking Debian for the source of 6.1" suite_apt $suite amd64 apt-get update
    # apt holds what it fetches against the sums that Debian signed.
    (cd "$folder" && logged "fetching it (140 MB)" suite_apt $suite amd64 apt-get download linux-source-6.1)
    dpkg -x "$folder"/linux-source-6.1_*.deb "$folder/deb"
    mkdir -p "$source"
    logged "unpacking it" tar -xJf "$folder/deb/usr/src/linux-source-6.1.tar.xz" -C "$source" --strip-components 1
    rm -r "$folder/deb" "$folder"/*.deb
    logged "making its configuration" make -C "$source" tinyconfig
    cp "$source/.config" "$source/tiny"
    (cd "$source" && scripts/kconfig/merge_config.sh -m tiny "$root/tests/lab/matrix/without_btf.config") >"$log" 2>&1
    logged "completing it" make -C "$source" olddefconfig
    while read -r line; do
        grep -qxF "$line" "$source/.config" || die "the kernel's configuration has no $line"
    done < <(grep ^CONFIG_ "$root/tests/lab/matrix/without_btf.config")
    logged "building it (ten minutes)" nice make -C "$source" "-j$(nproc)" bzImage modules
    keep_built "$folder" "$source"
}

# Of the built source what is of use: the rest is 2 GB.
keep_built() { # keep_built FOLDER SOURCE
    local folder=$1 source=$2 release
    release=$(make -s -C "$source" kernelrelease)
    logged "installing its modules" make -C "$source" INSTALL_MOD_PATH="$folder" modules_install
    rm -rf "$folder/headers"
    mkdir -p "$folder/headers/arch/x86"
    cp -a "$source/include" "$folder/headers/"
    cp -a "$source/arch/x86/include" "$folder/headers/arch/x86/"
    cp "$source/.config" "$folder/config"
    rm -f "$folder/lib/modules/$release"/{build,source}
    ln -s "$folder/headers" "$folder/lib/modules/$release/build"
    mv "$source/arch/x86/boot/bzImage" "$folder/vmlinuz"
    rm -r "$source"
}

# Which probes it takes, and what is recorded there.
boot_without_btf() { # boot_without_btf FOLDER
    build_without_btf "$1"
    say "$(basename "$1"/lib/modules/*)"
    PYTHONPATH=tests .venv/bin/python -m lab.matrix.kernels x86_64 "$1/vmlinuz" "$1" "$matrix/vm" "$1/headers"
    record_without_btf "$1" "$1-vm"
}

# The whole program on it, with this machine's root; tests/fixtures/without_btf keeps what was recorded, and a test
# holds it against what was true.
record_without_btf() { # record_without_btf FOLDER VM
    local folder=$1 vm=$2
    rm -rf "$vm"
    mkdir -p "$vm"
    ln -s "$folder/lib/modules" "$vm/modules"
    PYTHONPATH=tests .venv/bin/python -c "import pathlib, sys
from workloads.build import build_library
build_library(pathlib.Path(sys.argv[1]))" "$vm/build"
    .venv/bin/python -m compileall -q collector tests/lab tests/workloads # the guest cannot keep what it compiles
    vm_initramfs "$vm"
    say "recording on it (five minutes)"
    vm_boot "$folder/vmlinuz" "$vm" tests/lab/matrix/without_btf_guest.sh ||
        die "the VM did not finish; $vm/console.log and $vm/results/guest.log tell more"
    PYTHONPATH=tests .venv/bin/python -m lab.matrix.without_btf "$vm/results"
    .venv/bin/python -m pytest -q tests/unit/test_without_btf.py
}
