#!/bin/bash
# Stops what swift_up.sh started in DIRECTORY.
set -u
dir=${1:-/var/tmp/dcp-nvcomp-swift}
for name in proxy object container account memcached; do
    pid=$(cat "$dir/run/$name.pid" 2> /dev/null) || continue
    # a pid may be another process's by now
    tr '\0' ' ' < "/proc/$pid/cmdline" 2> /dev/null | grep -qE "swift-$name-server $dir|$dir/run/$name.pid" || continue
    kill "$pid"
    for _ in $(seq 100); do
        kill -0 "$pid" 2> /dev/null || continue 2
        sleep 0.1
    done
    kill -KILL "$pid"
done
exit 0
