#!/bin/bash
# Starts Azurite, Azure's own emulator of its Blob service, on 127.0.0.1 for the tests; all state in one directory.
#
#     .ci/azurite_up.sh [DIRECTORY [PORT]]       then:  export DCP_NVCOMP_TEST_AZURE=CONNECTION_STRING
#
# Needs node and npm, which install it into DIRECTORY/npm if it is not there. The last line of the output is the
# connection string. Stop it with: kill $(cat DIRECTORY/pid)
set -euo pipefail

dir=$(realpath -m "${1:-/var/tmp/dcp-nvcomp-azurite}")
port=${2:-10000}
is_used() { (: < "/dev/tcp/127.0.0.1/$1") 2> /dev/null; }
if [ "$port" = 0 ]; then
    for port in $(shuf -i 20000-30000 -n 100); do # below the ports that the system gives out itself
        is_used "$port" || break
    done
fi
mkdir -p "$dir/npm" "$dir/data"
main=$dir/npm/node_modules/azurite/dist/src/blob/main.js
[ -e "$main" ] || npm install --silent --no-fund --no-audit --prefix "$dir/npm" azurite > "$dir/npm.log" 2>&1

key=$(head -c 64 /dev/urandom | base64 -w0)
# --skipApiVersionCheck: it refuses clients that are newer than itself
AZURITE_ACCOUNTS=ckpt:$key nohup node "$main" --blobHost 127.0.0.1 --blobPort "$port" --location "$dir/data" \
    --skipApiVersionCheck --silent --disableTelemetry > "$dir/log" 2>&1 < /dev/null &
echo $! > "$dir/pid"
for _ in $(seq 150); do
    is_used "$port" && break
    kill -0 "$(cat "$dir/pid")" || { tail -n 20 "$dir/log" >&2; exit 1; }
    sleep 0.1
done
is_used "$port" || { echo "azurite_up.sh: it does not answer" >&2; exit 1; }
address=http://127.0.0.1:$port/ckpt
echo "DefaultEndpointsProtocol=http;AccountName=ckpt;AccountKey=$key;BlobEndpoint=$address;"
