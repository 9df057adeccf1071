#!/bin/bash
# Starts OpenStack Swift with its S3 front end on 127.0.0.1 for the tests: a second dialect, which refuses If-None-Match.
#
#     .ci/swift_up.sh [DIRECTORY [PORT]]      then:  export DCP_NVCOMP_TEST_SWIFT=http://127.0.0.1:PORT
#
# Needs root and the packages swift-proxy, swift-account, swift-container, swift-object and memcached. Keys: ci:ci /
# cisecret. Listens on PORT to PORT+4. Anything that DIRECTORY held is removed. Writes /etc/swift/swift.conf if there is
# none, as the servers look for it there.
set -euo pipefail

dir=${1:-/var/tmp/dcp-nvcomp-swift}
port=${2:-7580}
here=$(cd "$(dirname "$0")" && pwd)
[ -e "$dir/run" ] && "$here/swift_down.sh" "$dir"
rm -rf "$dir"
mkdir -p "$dir"/{etc,disks/d1,run,log}

failed() {
    echo "swift_up.sh: failed; the ends of the logs:" >&2
    tail -n 20 "$dir"/log/*.log >&2 || true
    "$here/swift_down.sh" "$dir"
}
trap failed ERR

printf '[swift-hash]\nswift_hash_path_prefix = ci\nswift_hash_path_suffix = ci\n' > "$dir/etc/swift.conf"
if [ ! -e /etc/swift/swift.conf ]; then
    mkdir -p /etc/swift
    cp "$dir/etc/swift.conf" /etc/swift/swift.conf
fi

cd "$dir/etc"
offset=1
for server in object container account; do
    {
        swift-ring-builder $server.builder create 4 1 0
        swift-ring-builder $server.builder add --region 1 --zone 1 --ip 127.0.0.1 --port $((port + offset)) \
            --device d1 --weight 1
        swift-ring-builder $server.builder rebalance
    } > "$dir/log/ring-$server.log" 2>&1
    cat > $server-server.conf <<END
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = $((port + offset))
workers = 0
user = root
swift_dir = $dir/etc
devices = $dir/disks
mount_check = false
fallocate_reserve = 0
log_address = /dev/null
[pipeline:main]
pipeline = $server-server
[app:$server-server]
use = egg:swift#$server
END
    offset=$((offset + 1))
done

cat > proxy-server.conf <<END
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = $port
workers = 0
user = root
swift_dir = $dir/etc
log_address = /dev/null
[pipeline:main]
pipeline = catch_errors gatekeeper cache listing_formats s3api tempauth bulk slo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
allow_account_management = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:gatekeeper]
use = egg:swift#gatekeeper
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:$((port + 4))
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
dns_compliant_bucket_names = false
[filter:tempauth]
use = egg:swift#tempauth
user_ci_ci = cisecret .admin
[filter:bulk]
use = egg:swift#bulk
[filter:slo]
use = egg:swift#slo
END

memcached -u root -l 127.0.0.1 -p $((port + 4)) -d -P "$dir/run/memcached.pid"
for server in account container object proxy; do
    setsid swift-$server-server "$dir/etc/$server-server.conf" > "$dir/log/$server.log" 2>&1 < /dev/null &
    echo $! > "$dir/run/$server.pid"
done
for _ in $(seq 120); do
    (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null && break
    sleep 0.5
done
: < "/dev/tcp/127.0.0.1/$port"
echo "http://127.0.0.1:$port"
