#!/usr/bin/env bash
# On a machine with a GPU: does it run, how long does it take, and the tests of its kernels, in under ten minutes.
#
#   benchmarks/gpu.sh FOLDER               writes the machine, parity and times into FOLDER, the most important first
#   benchmarks/gpu.sh --rehearsal FOLDER   the same steps on a pretended card: interpreted, small, and timed for nothing
#
# It needs Python 3.11 with torch and triton, or jax, and what this package needs itself; no network, and nothing is
# installed. Every result is written as soon as it is there, and a step that takes too long keeps what it has. A step
# that fails is reported at the end, ends the script with status 1, and stops no other step. The first five minutes have
# parity of PyTorch in bfloat16 and float32, the tests of the kernels, and their times.
set -uo pipefail
cd "$(dirname "$0")/.."
rehearsal=0
if [ "${1:-}" = --rehearsal ]; then rehearsal=1; shift; fi
out=${1:?"the folder for the results, as: benchmarks/gpu.sh results"}
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
python=${PYTHON:-python3}
export PYTHONPATH=$PWD:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}
device=cuda seconds=1 longer=1 first=(512x4096 4096x4096 16384x8192) others=(64x262144 32x768 4096x128)
some=() first_variant=torch other_variants=(--variant llama --variant gemma)
if [ $rehearsal = 1 ]; then
    export RMSNORM_GPU_KERNELS=interpret RMSNORM_CPU_KERNELS=0 TRITON_INTERPRET=1 TORCHDYNAMO_DISABLE=1
    export PYTHONWARNINGS=ignore
    device=cpu seconds=0 longer=5 first=(2x16) others=(3x40)
    some=(-k "middle or groups") first_variant=mlx other_variants=(--variant torch)
fi
failed=()
# step NAME SECONDS COMMAND: at the end of its time Ctrl-C, after which `rmsnorm` writes what is finished.
step() {
    local name=$1 limit=$(($2 * longer)) began=$SECONDS; shift 2
    echo "== $name: $*"
    timeout --signal=INT --kill-after=15 "$limit" "$python" "$@"
    local status=$?
    if [ $status != 0 ]; then failed+=("$name (status $status)"); fi
    echo "$name: status $status, $((SECONDS - began)) s" | tee -a "$out/steps.txt"
}
# Whether the benchmark of a backend can start here, such as that of flax without the package flax.
opens() {
    "$python" -c "from timing.backends import open_backend; open_backend('$1', '$device')" 2> "$out/absent.txt" \
        && rm "$out/absent.txt" && return
    echo "== $1 is left out: $(tail -n 1 "$out/absent.txt")" | tee -a "$out/steps.txt"
    rm "$out/absent.txt"
    return 1
}
parity() {
    local backend=$1 name=$2 limit=$3; shift 3
    step "parity of $backend, $name" "$limit" -m rmsnorm selftest --backend "$backend" --device $device "$@" \
        --json "$out/parity-$backend-$name.json"
}
times() {
    local backend=$1 name=$2 limit=$3; shift 3
    step "times of $backend, $name" "$limit" benchmarks/compare.py --backend "$backend" --device $device \
        --seconds $seconds "$@" --json "$out/times-$backend-$name.json" --summary "$out/times-$backend-$name.jsonl"
}

: > "$out/steps.txt"
{
    date -u
    git log -1 --format='commit %H' 2>/dev/null
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo "no GPU"
    "$python" -c 'import sys; from importlib.metadata import distributions
print("Python", sys.version)
for name, version in sorted({(d.name, d.version) for d in distributions()}):
    if name.lower().startswith(("torch", "triton", "jax", "flax", "numpy", "ml_dtypes", "liger", "quack")): print(name, version)'
} 2>&1 | tee "$out/machine.txt"
torch=0
if opens torch; then torch=1; fi
if [ $torch = 1 ]; then
    parity torch bfloat16 60 --variant $first_variant --dtype bfloat16
    parity torch float32 50 --variant $first_variant --dtype float32
    if "$python" -c "import pytest" 2>/dev/null; then
        step "tests of the kernels" 110 -m pytest -q -p no:cacheprovider tests/kernels/gpu_kernels.py \
            tests/kernels/gpu_calls.py "${some[@]}" --junitxml "$out/tests.xml"
    else
        echo "== the tests are left out: pytest is not installed" | tee -a "$out/steps.txt"
    fi
    if [ $rehearsal = 0 ]; then
        step "times of the kernels in CUDA graphs" 120 benchmarks/gpu_graphs.py --json "$out/graphs.json"
    fi
    step "time of the host that a call takes" 40 benchmarks/gpu_calls.py
fi
if opens flax; then
    parity flax bfloat16 45 --variant $first_variant --dtype bfloat16
fi
if [ $torch = 1 ]; then
    times torch first 90 "${first[@]/#/--shape=}" --dtype bfloat16
    times torch others 130 "${others[@]/#/--shape=}"
    parity torch others 110 "${other_variants[@]}" --dtype bfloat16 --dtype float32
fi
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}" | tee -a "$out/steps.txt"
    exit 1
fi
echo "all done: $out"
