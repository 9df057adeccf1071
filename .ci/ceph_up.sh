#!/bin/bash
# Starts Ceph's S3 server on 127.0.0.1 for the tests: one monitor, one OSD, one radosgw, all state in one directory.
#
#     .ci/ceph_up.sh [DIRECTORY [PORT]]       then:  export DCP_NVCOMP_TEST_S3=http://127.0.0.1:PORT
#
# Needs root and the packages radosgw, ceph-mon, ceph-osd and ceph-common. Keys: ci / cisecret. Bucket names of three
# characters or more. The monitor listens on PORT+1 and PORT+2; PORT 0 stands for three that are free. The last line of
# the output is the endpoint. Anything that DIRECTORY held is removed.
set -euo pipefail

dir=${1:-/var/tmp/dcp-nvcomp-ceph}
port=${2:-7480}
is_used() { (: < "/dev/tcp/127.0.0.1/$1") 2> /dev/null; }
if [ "$port" = 0 ]; then
    for port in $(shuf -i 20000-30000 -n 100); do # below the ports that the system gives out itself
        is_used "$port" || is_used $((port + 1)) || is_used $((port + 2)) || break
    done
fi
mon_address="[v2:127.0.0.1:$((port + 1)),v1:127.0.0.1:$((port + 2))]"
export CEPH_CONF=$dir/ceph.conf

here=$(cd "$(dirname "$0")" && pwd)
[ -e "$dir/run" ] && "$here/ceph_down.sh" "$dir"
rm -rf "$dir"
mkdir -p "$dir"/{mon,osd,run,log}

failed() {
    echo "ceph_up.sh: failed; the ends of the logs:" >&2
    tail -n 20 "$dir"/log/*.log >&2 || true
    "$here/ceph_down.sh" "$dir"
}
trap failed ERR

fsid=$(cat /proc/sys/kernel/random/uuid)
cat > "$CEPH_CONF" <<END
[global]
fsid = $fsid
mon host = $mon_address
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
run dir = $dir/run
crash dir = $dir/log
pid file = $dir/run/\$name.pid
admin socket = $dir/run/\$name.asok
log file = $dir/log/\$name.log
# one OSD holds the only copy of everything
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
osd pool default pg num = 8
osd pool default pg autoscale mode = off
# Reads are allowed for 0.8 x this many seconds after the OSD last renewed its lease. Starved for longer on a busy
# machine, it keeps such reads waiting for an answer of another copy, forever where there is none.
osd heartbeat grace = 3600
# An OSD ends itself if an operation takes longer than this, as a write to a busy disk can.
osd op thread suicide timeout = 3600
mon allow pool size one = true
mon max pg per osd = 1000

[mon]
mon data = $dir/mon
mon data avail crit = 1
mon data avail warn = 2

[osd]
osd data = $dir/osd
osd objectstore = bluestore
bluestore block create = true
# a sparse file
bluestore block size = $((16 << 30))
osd memory target = $((1 << 30))
osd memory cache min = $((128 << 20))

[client.rgw]
# the default asks the monitor for a secure session, which needs a key
ms mon client mode = crc
ms mon service mode = crc
rgw frontends = beast endpoint=127.0.0.1:$port
rgw thread pool size = 32
# removed objects are really gone soon
rgw gc obj min wait = 5
rgw gc processor period = 5
rgw gc processor max time = 5
END

monmaptool --create --clobber --fsid "$fsid" --addv a "$mon_address" --enable-all-features "$dir/monmap" > /dev/null
ceph-mon --mkfs --id a --monmap "$dir/monmap"
ceph-mon --id a

osd_uuid=$(cat /proc/sys/kernel/random/uuid)
timeout 60 ceph osd new "$osd_uuid" > /dev/null
ceph-osd --mkfs --id 0 --osd-uuid "$osd_uuid" > "$dir/log/mkfs.log" 2>&1
ceph-osd --id 0 >> "$dir/log/mkfs.log" 2>&1

timeout 60 radosgw --name client.rgw
for _ in $(seq 120); do
    is_used "$port" && break
    sleep 0.5
done
: < "/dev/tcp/127.0.0.1/$port"
timeout 60 radosgw-admin user create --uid=ci --display-name=ci --access-key=ci --secret-key=cisecret \
    > "$dir/log/user.log" 2>&1
echo "http://127.0.0.1:$port"
