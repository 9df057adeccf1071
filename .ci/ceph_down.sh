#!/bin/bash
# Stops what ceph_up.sh started in DIRECTORY. radosgw goes first: the others do not end while it is connected.
set -u
dir=${1:-/var/tmp/dcp-nvcomp-ceph}
for name in client.rgw osd.0 mon.a; do
    pid=$(cat "$dir/run/$name.pid" 2> /dev/null) || continue
    # a pid may be another process's by now
    grep -qsE '^(radosgw|ceph-osd|ceph-mon)$' "/proc/$pid/comm" || continue
    kill "$pid"
    for _ in $(seq 100); do
        kill -0 "$pid" 2> /dev/null || continue 2
        sleep 0.1
    done
    kill -KILL "$pid"
done
exit 0
