"""The Triton kernels on a machine without a GPU: interpreted, and compiled for cards that are not there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux alone")
from gpu_kernels import CARDS, compiled, predicted

ROOT = Path(__file__).parents[2]


def interpreted(tests, package=ROOT, *options):
    """The tests of torch_kernels.py in a process of its own, as Triton chooses its interpreter when it is imported."""
    environment = {
        **os.environ,
        "RMSNORM_GPU_KERNELS": "interpret",
        "PYTHONPATH": os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", tests, *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch_kernels.py runs on the GPU")
def test_the_kernels_compute_the_goldens_numbers_in_the_interpreter():
    done = interpreted("tests/gpu/torch_kernels.py")
    assert done.returncode == 0, done.stdout[-5000:]
    assert "skipped" not in done.stdout


MANY = "test_values_and_gradients_are_the_goldens"
MIDDLE = "test_a_number_beside_the_middle_of_two_is_rounded_once"
# A line of triton_pairs.py, what stands in its place, and a test that must notice it.
MUTANTS = {
    "1 / rho of 24 bits": (
        "(number - high.to(tl.float64)).to(tl.float32)", "high * 0", f"{MANY}[many-float32-paper"
    ),
    "rounded twice": ("tl.where(is_inexact, odd, bits)", "tl.where(is_inexact, bits, bits)", f"{MIDDLE}[bfloat16-"),
    "the range is not checked": ("((size <= MOST) == 0) |", "(size != size) &", f"{MANY}[many-float32-paper"),
}  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is tested where there is no GPU")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_in_the_arithmetic_is_noticed(mutant, tmp_path):
    right, wrong, test = MUTANTS[mutant]
    shutil.copytree(ROOT / "rmsnorm", tmp_path / "rmsnorm", ignore=shutil.ignore_patterns("__pycache__"))
    pairs = tmp_path / "rmsnorm/gpu/triton_pairs.py"
    source = pairs.read_text(encoding="utf-8")
    assert source.count(right) == 1
    pairs.write_text(source.replace(right, wrong), encoding="utf-8")
    done = interpreted("tests/gpu/torch_kernels.py", tmp_path, "-k", test)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    assert "AssertionError" in done.stdout


# kernel, dtype, n, capability; the most registers that may not fit, in bytes
CASES = [
    ("forward", "bfloat16", 128, 90, 0),
    ("forward", "float32", 16384, 80, 0),
    ("backward", "bfloat16", 4096, 90, 0),
    ("backward", "float32", 768, 100, 0),
    ("backward", "bfloat16", 8192, 90, 256),
    ("forward", "bfloat16", 65536, 90, 0),
]
MOST_FLOAT64 = {"forward": 4, "backward": 9}  # operations an element: the sums, and the conversions for them
MOST_32_BITS = {"forward": 33, "backward": 50}


@pytest.mark.parametrize(("kernel", "dtype", "n", "capability", "spilled"), CASES)
def test_what_the_compiler_makes_of_a_kernel(kernel, dtype, n, capability, spilled):
    """Machine code is all that a machine without a GPU can know of a kernel's speed."""
    made = compiled(kernel, dtype, n, capability)
    assert made.spilled <= spilled
    assert made.access == 16
    assert made.reads == {"forward": 1, "backward": 2}[kernel] + (made.tile.rows == 1)
    assert made.float64 <= MOST_FLOAT64[kernel]
    assert made.float32 <= MOST_32_BITS[kernel]


def test_the_model_of_time_knows_what_limits_a_kernel():
    made = compiled("backward", "bfloat16", 4096)
    time, limit = predicted(made, 2**15, CARDS["RTX 4090"])
    assert limit == "float64"  # which that card has for each 64 of float32
    assert time == pytest.approx(2**27 * made.float64 / CARDS["RTX 4090"].float64)
    assert predicted(made, 2**15, CARDS["H100 SXM"])[1] == "memory"
