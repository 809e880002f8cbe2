#!/usr/bin/env bash
# On a machine with a GPU: the tests of its kernels, parity, and times beside other layers, in under nine minutes.
#
#   benchmarks/gpu.sh FOLDER             writes parity-*.json, bench-*.json and machine.txt into FOLDER
#   benchmarks/gpu.sh --dry-run FOLDER   the same steps without a GPU: interpreted, small, not timed
#
# It needs Python 3.11 with torch and triton, or jax, and no network: packages that are missing are installed from
# wheels in benchmarks/wheels, if that is there. A step that fails is reported at the end and stops nothing.
# BACKENDS="torch" leaves out flax.
set -uo pipefail
cd "$(dirname "$0")/.."
dry=0
if [ "${1:-}" = --dry-run ]; then dry=1; shift; fi
out=${1:?"the folder for the results, as: benchmarks/gpu.sh results"}
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
if [ -d benchmarks/wheels ]; then
    "$python" -m pip install -q --no-index --no-deps --target "$out/site" benchmarks/wheels/*.whl
    export PYTHONPATH=$PYTHONPATH:$out/site
fi
device=cuda limit=() shapes=(32x768 4096x128 512x4096 4096x4096 16384x8192 64x262144)
if [ $dry = 1 ]; then
    export RMSNORM_GPU_KERNELS=interpret TRITON_INTERPRET=1 PYTHONWARNINGS=ignore
    device=cpu limit=(--variant llama --dtype bfloat16) shapes=(2x16)
fi
failed=()
step() {
    name=$1; shift
    echo "== $name: $*"
    "$@" || failed+=("$name")
}
has() { "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }

{
    date -u
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo "no GPU"
    "$python" -c 'from importlib.metadata import distributions
for name, version in sorted({(d.name, d.version) for d in distributions()}):
    if name.lower().startswith(("torch", "triton", "jax", "flax", "numpy", "liger", "quack")): print(name, version)'
} | tee "$out/machine.txt"
for backend in ${BACKENDS:-torch flax}; do
    has $backend || { echo "== $backend is not installed"; continue; }
    if [ $backend = torch ] && has pytest; then
        tests=(-m pytest -q -p no:cacheprovider tests/gpu/torch_kernels.py)
        if [ $dry = 1 ]; then tests+=(-k "middle or step"); fi
        step "tests of torch" timeout 150 "$python" "${tests[@]}"
    fi
    step "parity of $backend" timeout 120 "$python" -c 'from rmsnorm.cli import main; main()' \
        check --backend $backend --device $device "${limit[@]}" --json "$out/parity-$backend.json"
    if [ $dry = 0 ]; then
        step "times of $backend" timeout 150 "$python" -c 'from rmsnorm.cli import main; main()' \
            bench --backend $backend --device cuda --seconds 1 "${shapes[@]/#/--shape=}" \
            --json "$out/bench-$backend.json" --summary "$out/bench-$backend.jsonl" --plot "$out/bench-$backend.svg"
    fi
done
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
echo "all done: $out"
