PS4='+ $EPOCHREALTIME '
exec </dev/null >/dev/ttyS0 2>&1
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
cd /work/wt/three
echo "start $(cat /proc/uptime)"
time head -c 67108864 /dev/zero > /tmp/x
time cat /tmp/x > /dev/null
time PYTHONPATH=collector .venv/bin/python -c "from ttftprof.cli.record import command"
echo "end $(cat /proc/uptime)"
echo b >/proc/sysrq-trigger
sleep 5
