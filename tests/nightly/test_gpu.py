"""The kernels for GPUs on a machine without one: interpreted, with assembly that ptx.py executes, and compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from programs import finished

if find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)
import torch

ROOT = Path(__file__).parents[2]
TRITON = Path(sys.prefix, "triton")  # where the Makefile installs it
pytestmark = [
    pytest.mark.timeout(700),
    pytest.mark.skipif(not (TRITON.exists() or find_spec("triton")), reason="it needs Triton, for Linux alone"),
]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is tested where there is no GPU")


def run(tests, *options, package=ROOT, kernels="interpret", limit=480, float64="1", triton=TRITON):
    """Tests in a process of its own: Triton reads its options when it is imported, and aborts after TensorFlow."""
    changes = {"RMSNORM_GPU_FP64": float64, "RMSNORM_GPU_KERNELS": kernels}
    changes["TRITON_INTERPRET"] = str(int(kernels == "interpret"))
    changes["PYTHONPATH"] = os.pathsep.join([str(package), str(triton), os.environ.get("PYTHONPATH", "")])
    command = ("-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{tests}")
    return finished(*command, *options, cwd=ROOT, timeout=limit, **changes)


def assert_passed(done):
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert "skipped" not in done.stdout


@interpreted
@pytest.mark.parametrize("tests", ["gpu_kernels.py", "gpu_calls.py"])
def test_the_kernels_compute_the_goldens_numbers_in_the_interpreter(tests):
    assert_passed(run(f"kernels/{tests}"))


@interpreted
def test_without_float64_the_kernels_compute_the_same_numbers():
    """Those of float32 are the same kernels."""
    assert_passed(run("kernels/gpu_kernels.py", "-k", "(goldens or middle or ends) and not float32", float64="0"))


def test_assembly_has_the_bits_of_the_steps_in_triton():
    assert_passed(run("nightly/assembly.py"))


def test_what_the_compiler_makes_of_the_kernels():
    assert_passed(run("nightly/triton_machine_code.py", kernels=""))


MIDDLE = "test_a_number_beside_the_middle_of_two_is_rounded_once"
# A file of the kernels, a line of it, what stands in its place, and the tests that must notice it.
MUTANTS = {
    "1 / rho of 24 bits": (
        "triton_pairs", "(number - high.to(tl.float64)).to(tl.float32)", "high * 0",
        "kernels/gpu_kernels.py test_a_result_has_more_bits_than_x",
    ),
    "rounded twice": (
        "triton_pairs", "tl.where(is_inexact, odd, bits)", "tl.where(is_inexact, bits, bits)",
        f"kernels/gpu_kernels.py {MIDDLE}[bfloat16-",
    ),
    "the range is not checked": (
        "triton_pairs", "((size <= MOST) == 0) |", "(size != size) &",
        "kernels/gpu_kernels.py test_parameters_at_the_ends_of_the_range[16",
    ),
    "a quotient is rounded to nearest": (
        "triton_quotient", "fma.rz.f32 h1, h1, $4, c1", "fma.rn.f32 h1, h1, $4, c1",
        "nightly/assembly.py test_a_quotient_that_is_cut_off[bfloat16-False]",
    ),
    "the last bit is not set": (
        "triton_quotient", "or.b32 h{i}, h{i}, 1; ", "",
        "nightly/assembly.py test_a_quotient_in_float64_that_is_cut_off[float16-float32-1]",
    ),
    "two gradients are swapped": (
        "triton_gradient", "cvt.rn.bf16x2.f32 {dx}, s1, s0", "cvt.rn.bf16x2.f32 {dx}, s0, s1",
        "nightly/assembly.py test_the_steps_of_a_gradient[bfloat16-False]",
    ),
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_in_the_arithmetic_is_noticed(mutant, tmp_path):
    file, right, wrong, test = MUTANTS[mutant]
    shutil.copytree(ROOT / "rmsnorm", tmp_path / "rmsnorm", ignore=shutil.ignore_patterns("__pycache__"))
    kernels = tmp_path / f"rmsnorm/gpu/{file}.py"
    source = kernels.read_text(encoding="utf-8")
    assert source.count(right) == 1
    kernels.write_text(source.replace(right, wrong), encoding="utf-8")
    tests, _, expression = test.partition(" ")
    done = run(tests, "-k", expression, package=tmp_path)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    assert "AssertionError" in done.stdout


def test_the_script_for_a_machine_with_a_gpu_is_rehearsed(tmp_path):
    changes = {"PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join([str(TRITON), os.environ.get("PYTHONPATH", "")])}
    command = [ROOT / "benchmarks/gpu.sh", "--rehearsal", tmp_path / "results"]
    done = subprocess.run(command, env=os.environ | changes, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    names = {path.name for path in (tmp_path / "results").iterdir()}
    assert names >= {"machine.txt", "steps.txt", "tests.xml", "parity-torch-bfloat16.json", "times-torch-first.jsonl"}
    assert "torch" in (tmp_path / "results/machine.txt").read_text()
