#!/usr/bin/env bash
# Builds, tests and measures the GPU half where there is a GPU, within 8 minutes. Leaves the machine as it was.
#   bash bench/gpu_check.sh [OUT]      results go to OUT (default: build/gpu_check)
# Needs: nvcc (KVPUSH_NVCC, PATH, /usr/local/cuda or its PyPI packages), g++, python3 with torch for CUDA, cmake,
# ninja, pybind11 and scikit-build-core. What else Python needs comes from build/gpu_wheels if that is there
# (`make gpu-wheels` fills it, for machines without a network), or from the package index.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-build/gpu_check}")
mkdir -p "$out"
venv=$(mktemp -d)/venv
trap 'rm -rf "$(dirname "$venv")"' EXIT
failed=()
deadline=460

# step NAME SECONDS COMMAND...: the command's output goes to OUT/NAME.log. What there is no time for is not run.
step() {
  local name=$1 limit=$2 begun=$SECONDS left=$((deadline - SECONDS))
  shift 2
  if [ "$left" -lt 10 ]; then
    echo "NOT RUN $name: the time is up"
    failed+=("$name")
    return
  fi
  [ "$limit" -le "$left" ] || limit=$left
  if timeout -k 10 "$limit" "$@" > "$out/$name.log" 2>&1; then
    echo "ok      $name, $((SECONDS - begun)) s"
  else
    echo "FAILED  $name ($?), $((SECONDS - begun)) s: $(tail -n 1 "$out/$name.log")"
    failed+=("$name")
  fi
}

environment() {
  set -e
  git rev-parse HEAD || true
  nvidia-smi
  "${KVPUSH_NVCC:-nvcc}" --version
  python3 -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())'
}

install_kvpush() {
  python3 -m venv --system-site-packages "$venv" || return 1
  local index=() missing=() name
  [ -d build/gpu_wheels ] && index=(--no-index --find-links build/gpu_wheels)
  for name in pytest pytest-timeout numpy typer rich; do
    "$venv/bin/python" -c "import ${name//-/_}" 2> /dev/null || missing+=("$name")
  done
  [ ${#missing[@]} -eq 0 ] || "$venv/bin/pip" install -q "${index[@]}" "${missing[@]}" || return 1
  "$venv/bin/pip" install -q --no-build-isolation --no-deps -C cmake.define.KVPUSH_CUDA=ON . || return 1
  "$venv/bin/python" -c 'import kvpush; print(kvpush.__version__, kvpush.transports())'
}

bench() {
  local name=$1
  shift
  step "$name" 60 bash -c '"$0" bench "${@:2}" --json > "$1"' "$venv/bin/kvpush" "$out/$name.jsonl" "$@"
}

sanitize() {
  step "$1" 60 compute-sanitizer --tool "$1" --error-exitcode 9 "$venv/bin/python" -m pytest -q -m gpu \
    tests/gpu -k 'every_byte and (BNHC or 576)'
}

export venv
export -f environment install_kvpush
step environment 30 bash -c environment
step install 150 bash -c install_kvpush
step doctor 60 "$venv/bin/kvpush" doctor --json
step tests 90 "$venv/bin/python" -m pytest -q -rs -m gpu tests/gpu -k 'not read_right'
boxes=(--run-blocks 1 --total-bytes 512MiB --cache-bytes 512MiB)
KVPUSH_CUDA_SMS=1024 bench pack pack --device cuda --block-bytes 1KiB,4KiB,16KiB,64KiB --box-bytes 64MiB "${boxes[@]}"
KVPUSH_CUDA_SMS=1024 bench pack-boxes pack --device cuda --block-bytes 4KiB --box-bytes 1MiB,16MiB,64MiB --in-flight 1,8 "${boxes[@]}"
KVPUSH_CUDA_SMS=1024 KVPUSH_CUDA_BULK=1 bench pack-bulk pack --device cuda --block-bytes 4KiB,64KiB --box-bytes 1MiB,64MiB "${boxes[@]}"
KVPUSH_CUDA_SMS=2 bench pack-2-sms pack --device cuda --block-bytes 4KiB --box-bytes 1MiB,64MiB "${boxes[@]}"
bench pack-default pack --device cuda --block-bytes 4KiB "${boxes[@]}"
sizes=(--total-bytes 256MiB --cache-bytes 512MiB)
bench transfer transfer --device cuda --block-bytes 4KiB,64KiB --run-blocks 1,0 "${sizes[@]}"
KVPUSH_CUDA_BULK=1 step tests-bulk 60 "$venv/bin/python" -m pytest -q -rs -m gpu tests/gpu -k 'every_byte or processes or bulk'
if command -v compute-sanitizer > /dev/null; then
  sanitize memcheck
  sanitize racecheck
else
  echo "skipped memcheck, racecheck: no compute-sanitizer on PATH"
fi
step reads 120 "$venv/bin/python" -m pytest -q -rs -m gpu tests/gpu -k read_right

echo "results: $out"
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
