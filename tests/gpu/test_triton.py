"""The Triton kernels on a machine without a GPU: interpreted, and compiled for cards that are not there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
TRITON = Path(sys.prefix, "triton")  # where the Makefile installs it


def has_triton() -> bool:
    """Whether there is a Triton whose interpreter runs the kernels: that of 3.7, which PyTorch 2.13 brings, fails."""
    versions = [*TRITON.glob("triton-*.dist-info"), *(["triton"] if find_spec("triton") else [])]
    text = version("triton") if versions == ["triton"] else versions[0].name.split("-")[1] if versions else "0"
    return tuple(map(int, text.split(".")[:2])) >= (3, 9)


pytestmark = pytest.mark.skipif(not has_triton(), reason="it needs Triton 3.9, which is for Linux alone")


def run(tests, *options, package=ROOT, kernels="interpret", limit=480, float64="1"):
    """Tests in a process of its own: Triton reads its options when it is imported, and aborts after TensorFlow."""
    environment = {
        **os.environ,
        "RMSNORM_GPU_FP64": float64,
        "RMSNORM_GPU_KERNELS": kernels,
        "TRITON_INTERPRET": str(int(kernels == "interpret")),
        "PYTHONPATH": os.pathsep.join([str(package), str(TRITON), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", tests, *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.skipif(torch.cuda.is_available(), reason="both run on the GPU")
@pytest.mark.parametrize("tests", ["torch_kernels.py", "torch_calls.py"])
def test_the_kernels_compute_the_goldens_numbers_in_the_interpreter(tests):
    done = run(f"tests/gpu/{tests}")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert "skipped" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_assembly_has_the_bits_of_the_steps_in_triton():
    done = run("tests/gpu/assembly.py")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert "skipped" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is tested where there is no GPU")
def test_without_float64_the_kernels_compute_the_same_numbers():
    wanted = "(goldens or middle or ends) and not float32"  # whose kernels are the same
    done = run("tests/gpu/torch_kernels.py", "-k", wanted, float64="0")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]


MIDDLE = "test_a_number_beside_the_middle_of_two_is_rounded_once"
# A file of the kernels, a line of it, what stands in its place, and the tests that must notice it.
MUTANTS = {
    "1 / rho of 24 bits": (
        "triton_pairs", "(number - high.to(tl.float64)).to(tl.float32)", "high * 0",
        "torch_kernels.py test_a_result_has_more_bits_than_x",
    ),
    "rounded twice": (
        "triton_pairs", "tl.where(is_inexact, odd, bits)", "tl.where(is_inexact, bits, bits)",
        f"torch_kernels.py {MIDDLE}[bfloat16-",
    ),
    "the range is not checked": (
        "triton_pairs", "((size <= MOST) == 0) |", "(size != size) &",
        "torch_kernels.py test_parameters_at_the_ends_of_the_range[16",
    ),
    "a quotient is rounded to nearest": (
        "triton_quotient", "fma.rz.f32 h1, h1, $4, c1", "fma.rn.f32 h1, h1, $4, c1",
        "assembly.py test_a_quotient_that_is_cut_off[bfloat16-False]",
    ),
    "the last bit is not set": (
        "triton_quotient", "or.b32 h{i}, h{i}, 1; ", "",
        "assembly.py test_a_quotient_in_float64_that_is_cut_off[float16-float32-1]",
    ),
    "two gradients are swapped": (
        "triton_gradient", "cvt.rn.bf16x2.f32 {dx}, s1, s0", "cvt.rn.bf16x2.f32 {dx}, s0, s1",
        "assembly.py test_the_steps_of_a_gradient[bfloat16-False]",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is tested where there is no GPU")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_in_the_arithmetic_is_noticed(mutant, tmp_path):
    file, right, wrong, test = MUTANTS[mutant]
    shutil.copytree(ROOT / "rmsnorm", tmp_path / "rmsnorm", ignore=shutil.ignore_patterns("__pycache__"))
    kernels = tmp_path / f"rmsnorm/gpu/{file}.py"
    source = kernels.read_text(encoding="utf-8")
    assert source.count(right) == 1
    kernels.write_text(source.replace(right, wrong), encoding="utf-8")
    tests, _, expression = test.partition(" ")
    done = run(f"tests/gpu/{tests}", "-k", expression, "--all", package=tmp_path)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    assert "AssertionError" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_what_the_compiler_makes_of_the_kernels():
    done = run("tests/gpu/triton_machine_code.py", kernels="")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]


def test_after_tensorflow_triton_is_not_imported():
    """It would end the process."""
    code = "import sys, types; sys.modules['tensorflow'] = types.ModuleType('tensorflow')\n"
    code += "from rmsnorm import gpu; print(gpu.has_triton())"
    environment = {**os.environ, "PYTHONPATH": str(TRITON)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200)
    assert done.stdout == "False\n"
    assert "import triton first, or set RMSNORM_GPU_KERNELS=0" in done.stderr


def test_with_triton_before_tensorflow_the_answer_stays():
    """The answer imports Triton, so that TensorFlow, imported between it and the first kernel, changes nothing."""
    code = "import sys, types; from rmsnorm import gpu; print(gpu.has_triton(), 'triton' in sys.modules)\n"
    code += "sys.modules['tensorflow'] = types.ModuleType('tensorflow'); print(gpu.has_triton())"
    environment = {**os.environ, "PYTHONPATH": str(TRITON)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200)
    assert done.stdout == "True True\nTrue\n", done.stderr


def test_an_older_triton_is_not_used():
    """It would hand eps to a kernel as a float32."""
    code = "import sys, types; triton = sys.modules['triton'] = types.ModuleType('triton')\n"
    code += "from rmsnorm import gpu\n"
    code += "for triton.__version__ in ('3.3.1', '3.4.0', '3.10.0+git1'): print(gpu.has_triton())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout == "False\nTrue\nTrue\n", done.stderr
    assert "triton 3.3.1 is older than 3.4; on the GPU slower code runs" in done.stderr


def test_an_import_writes_no_environment_variable():
    code = "import os; before = dict(os.environ); import rmsnorm.gpu, rmsnorm.torch_impl; print(os.environ == before)\n"
    code += "rmsnorm.gpu.is_interpreted()"
    environment = {**os.environ, "PYTHONPATH": str(TRITON), "RMSNORM_GPU_KERNELS": "interpret"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200)
    assert done.stdout == "True\n"
    assert "is 'interpret', expected TRITON_INTERPRET=1 beside it; set both before Triton is imported" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_the_script_for_a_machine_with_a_gpu_is_rehearsed(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(TRITON)}
    command = [ROOT / "benchmarks/gpu.sh", "--rehearsal", tmp_path / "results"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    names = {path.name for path in (tmp_path / "results").iterdir()}
    assert names >= {"machine.txt", "steps.txt", "tests.xml", "parity-torch-bfloat16.json", "times-torch-first.jsonl"}
    assert "torch" in (tmp_path / "results/machine.txt").read_text()
