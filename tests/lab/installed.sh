# shellcheck shell=sh
# Runs in a clean root as scripts/package makes it, with dist/ below /mnt: installs the package named by the
# argument in the way of its kind, then uses what was installed, on this kernel.
set -eux
package=/mnt/dist/$1

for compiler in cc gcc clang; do
    if command -v $compiler; then exit 1; fi
done
case $package in
*.deb)
    dpkg -i "$package"
    ttftprof completion bash | cmp - /usr/share/bash-completion/completions/ttftprof
    ;;
*)
    python3 -m venv /opt/ttftprof
    PATH=/opt/ttftprof/bin:$PATH
    pip install --quiet --no-compile --no-index --find-links /mnt/wheels "$package"
    ;;
esac

ttftprof --version
ttftprof doctor
cd /tmp
ttftprof record -q -o a.ttft -- sleep 0.2
[ "$(stat -c %a a.ttft)" = 600 ]
ttftprof report a.ttft --format json >report.json
python3 -c 'import json; report = json.load(open("report.json")); assert report["recording"]["complete"]'
man -P cat ttftprof | grep -q 'Record a server while it switches models'

case $package in
*.deb)
    dpkg -r ttftprof
    for left in /usr/bin/ttftprof /usr/lib/python3/dist-packages/ttftprof*; do
        if [ -e "$left" ]; then exit 1; fi
    done
    ;;
esac
