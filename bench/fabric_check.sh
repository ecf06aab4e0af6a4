#!/usr/bin/env bash
# Checks and measures transport fabric between two hosts, beside libfabric alone and NIXL.
#   bash bench/fabric_check.sh server            on the one; it serves until it is interrupted
#   bash bench/fabric_check.sh client HOST       on the other, with the address of the first
# Both need kvpush with its extras bench and nixl in $PYTHON (default: python3), libfabric (docs/fabric.md), and
#   export KVPUSH_SECRET=...      the same on both, 16 characters or more; whoever has it can run code on the server
#   PROVIDER=efa                  libfabric's name (default: tcp), the same on both: efa, verbs;ofi_rxm, tcp, ...
#   PORT=5700 OUT=build/fabric_check SIZES="--total-bytes 256MiB" ROUNDS=10 UCX_TLS_OF_NIXL=default
# The port of the server must be open, and those that the provider and UCX choose.
# OUT gets JSON: environment.json and doctor.json of each host, on the client transfer.jsonl and latency.jsonl (rows as
# in bench/README.md), and fi_rma_bw.txt if fabtests are installed on both.
set -uo pipefail
cd "$(dirname "$0")/.."
role=${1:-}
host=${2:-}
python=${PYTHON:-python3}
provider=${PROVIDER:-tcp}
port=${PORT:-5700}
rounds=${ROUNDS:-10}
out=$(realpath -m "${OUT:-build/fabric_check}")
slot_bytes=${KVPUSH_SLOT_BYTES:-1048576}
window=${KVPUSH_NUM_SLOTS:-8}
read -ra sizes <<< "${SIZES:---total-bytes 256MiB}"
export KVPUSH_FABRIC_PROVIDER=$provider
failed=()

usage() {
  sed -n '2,11s/^# \{0,1\}//p' "$0"
  exit 2
}

# step NAME SECONDS FILE COMMAND...: stdout goes to OUT/FILE, stderr to OUT/NAME.log.
step() {
  local name=$1 limit=$2 file=$3 begun=$SECONDS
  shift 3
  if timeout -k 10 "$limit" "$@" > "$out/$file" 2> "$out/$name.log"; then
    echo "ok      $name, $((SECONDS - begun)) s"
  else
    echo "FAILED  $name ($?), $((SECONDS - begun)) s: $(tail -n 1 "$out/$name.log")"
    failed+=("$name")
  fi
}

# As fi-writedata does it: as large, as many under way, with immediate data and delivery-complete (-U).
rma_bw() {
  fi_rma_bw -p "$provider" -o writedata -S "$slot_bytes" -W "$window" -I 1000 -U "$@"
}

check() {
  step "$role-environment" 60 "$role-environment.json" "$python" bench/fabric_environment.py
  "$python" -c 'import json, sys; print(*("warning " + w for w in json.load(open(sys.argv[1]))["warnings"]), sep="\n")' \
    "$out/$role-environment.json"
  step "$role-doctor" 300 "$role-doctor.json" "$python" -m kvpush doctor --json
}

serve() {
  trap 'kill $(jobs -p) 2> /dev/null' EXIT
  trap 'exit 0' INT TERM
  if command -v fi_rma_bw > /dev/null; then
    while rma_bw > /dev/null 2>&1 || sleep 1; do :; done &
  fi
  "$python" -m kvpush bench peer --port "$port" &
  wait $!
}

bench() {
  local name=$1
  shift
  step "$name" 600 "$name.jsonl" "$python" -m kvpush bench transfer --peer "$host:$port" \
    --fabric-provider "$provider" --ucx-tls "${UCX_TLS_OF_NIXL:-default}" --rounds "$rounds" --json "$@"
}

measure() {
  bench transfer --block-bytes 4KiB,64KiB --run-blocks 1,0 "${sizes[@]}" \
    --arms "${ARMS:-nixl-per-block,nixl-one-descriptor,fi-writedata,kvpush-nixl,kvpush-fabric}"
  bench latency --idle-ms 0,5 --arms "${LATENCY_ARMS:-nixl-per-block,fi-writedata,kvpush-nixl,kvpush-fabric}"
  if command -v fi_rma_bw > /dev/null; then
    step fi_rma_bw 120 fi_rma_bw.txt rma_bw "$host"
  else
    echo "skipped fi_rma_bw: fabtests are not installed; the arm fi-writedata stands for it"
  fi
}

summary() {
  "$python" - "$out/transfer.jsonl" "$out/latency.jsonl" << 'END'
import json
import sys

for path in sys.argv[1:]:
    for row in map(json.loads, open(path)):
        if row["kind"] == "transfer":
            name = f"{row['arm']} {row['transport']}"
            case = f"{row['block_bytes'] >> 10} KiB blocks, {'contiguous' if row['run_blocks'] == 0 else 'scattered'}"
            if row["idle_ms"] is not None:
                print(f"{name:28} {case}, {row['idle_ms']} ms idle: p50 {row['p50_us']:.0f} us")
            else:
                print(f"{name:28} {case}: {row['gb_per_s']:.2f} GB/s")
END
}

[ "$role" = server ] || { [ "$role" = client ] && [ -n "$host" ]; } || usage
if [ ${#KVPUSH_SECRET} -lt 16 ]; then
  echo "KVPUSH_SECRET must be set, the same on both hosts, to 16 characters or more: openssl rand -hex 32"
  exit 2
fi
mkdir -p "$out"
check
if [ "$role" = server ]; then
  serve
else
  measure
  summary
fi
echo "results: $out"
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
