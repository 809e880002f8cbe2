"""The kernels for GPUs on a machine without one: interpreted, with assembly that ptx.py executes, and compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from programs import printed

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


def run(tests, *options, kernels="interpret", float64="1"):
    """Tests in a process of its own, which pass: Triton reads its options when it is imported."""
    changes = {"RMSNORM_GPU_FP64": float64, "RMSNORM_GPU_KERNELS": kernels}
    changes["TRITON_INTERPRET"] = str(int(kernels == "interpret"))
    changes["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(TRITON), os.environ.get("PYTHONPATH", "")])
    command = ("-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{tests}")
    said = printed(*command, *options, cwd=ROOT, timeout=480, **changes)
    assert "skipped" not in said


@interpreted
@pytest.mark.parametrize("tests", ["gpu_kernels.py", "gpu_calls.py"])
def test_the_kernels_compute_the_goldens_numbers_in_the_interpreter(tests):
    run(f"kernels/{tests}")


@interpreted
def test_without_float64_the_kernels_compute_the_same_numbers():
    """Those of float32 are the same kernels."""
    run("kernels/gpu_kernels.py", "-k", "(goldens or middle or ends) and not float32", float64="0")


def test_assembly_has_the_bits_of_the_steps_in_triton():
    run("nightly/assembly.py")


def test_what_the_compiler_makes_of_the_kernels():
    run("nightly/triton_machine_code.py", kernels="")


def test_the_script_for_a_machine_with_a_gpu_is_rehearsed(tmp_path):
    changes = {"PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join([str(TRITON), os.environ.get("PYTHONPATH", "")])}
    command = [ROOT / "benchmarks/gpu.sh", "--rehearsal", tmp_path / "results"]
    done = subprocess.run(command, env=os.environ | changes, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    names = {path.name for path in (tmp_path / "results").iterdir()}
    assert names >= {"machine.txt", "steps.txt", "tests.xml", "parity-torch-bfloat16.json", "times-torch-first.jsonl"}
    assert "torch" in (tmp_path / "results/machine.txt").read_text()
