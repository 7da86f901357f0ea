# shellcheck shell=bash
# Sourced by the other scripts: progress lines, a log whose tail is shown on failure, apt.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
log=$root/.setup.log

say() { printf '[%s] %s\n' "$(basename "$0")" "$*" >&2; }
die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# logged WHAT COMMAND...: one progress line; the output goes to the log, or is shown if it fails.
logged() {
    local what=$1
    shift
    say "$what"
    if ! "$@" >"$log" 2>&1 </dev/null; then
        tail -n 30 "$log" >&2
        die "$what failed; the whole output is in $log"
    fi
}

installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

# apt_need PACKAGE...: installs what is missing. A name may be an alternative, "a|b": the first
# that this distribution has.
apt_need() {
    local wanted name missing=()
    for wanted in "$@"; do
        local have=
        for name in ${wanted//|/ }; do
            if installed "$name"; then have=1; fi
        done
        [ -n "$have" ] || missing+=("$wanted")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    command -v apt-get >/dev/null ||
        die "this machine has no apt; install the equivalents of: ${missing[*]}"
    [ "$(id -u)" = 0 ] || die "packages are missing (${missing[*]}): run this once with sudo"
    logged "refreshing the package lists" apt-get -q update
    local chosen=()
    for wanted in "${missing[@]}"; do
        local found=
        for name in ${wanted//|/ }; do
            # no pipe: under pipefail, a reader that stops early would make the writer's SIGPIPE a "no"
            if [ -z "$found" ] && [ -n "$(apt-cache madison "$name" 2>/dev/null)" ]; then
                found=$name
            fi
        done
        [ -n "$found" ] || die "no package found for $wanted"
        chosen+=("$found")
    done
    logged "installing ${chosen[*]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get -q -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "${chosen[@]}"
}

# Under sudo, what was made inside the checkout belongs to the person who owns the checkout.
hand_over() {
    [ -n "${SUDO_UID:-}" ] || return 0
    local path
    for path in "$@"; do
        if [ -e "$path" ]; then chown -R "$SUDO_UID:${SUDO_GID:-$SUDO_UID}" "$path"; fi
    done
}
