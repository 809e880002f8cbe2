"""Whether there is a Triton that this package uses; nightly/test_gpu.py asks the kernels without a GPU."""

from __future__ import annotations

import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from programs import finished

pytest.importorskip("torch")
TRITON = Path(sys.prefix, "triton")  # where the Makefile installs it


def has_triton() -> bool:
    """Whether there is a Triton whose interpreter runs the kernels: that of 3.7, which PyTorch 2.13 brings, fails."""
    versions = [*TRITON.glob("triton-*.dist-info"), *(["triton"] if find_spec("triton") else [])]
    text = version("triton") if versions == ["triton"] else versions[0].name.split("-")[1] if versions else "0"
    return tuple(map(int, text.split(".")[:2])) >= (3, 9)


needs_triton = pytest.mark.skipif(not has_triton(), reason="it needs Triton 3.9, which is for Linux alone")
PRETEND = "import sys, types; sys.modules['tensorflow'] = types.ModuleType('tensorflow')\n"
OLD = "import sys, types; triton = sys.modules['triton'] = types.ModuleType('triton')\nfrom rmsnorm import gpu\n"
ANSWERS = {  # a program, what it prints, and what it warns of
    "after TensorFlow Triton is not imported, which would end the process": (
        f"{PRETEND}from rmsnorm import gpu; print(gpu.has_triton())",
        "False\n", "import triton first, or set RMSNORM_GPU_KERNELS=0",
    ),
    "before TensorFlow it is, so that the answer stays": (
        f"from rmsnorm import gpu; print(gpu.has_triton())\n{PRETEND}print(gpu.has_triton())", "True\nTrue\n", "",
    ),
    "an older Triton, which would hand eps to a kernel as a float32, is not used": (
        f"{OLD}for triton.__version__ in ('3.3.1', '3.4.0', '3.10.0+git1'): print(gpu.has_triton())",
        "False\nTrue\nTrue\n", "triton 3.3.1 is older than 3.4; on the GPU slower code runs",
    ),
    "an import writes no environment variable": (
        "import os; before = dict(os.environ); import rmsnorm.gpu; print(os.environ == before)\n"
        "os.environ['RMSNORM_GPU_KERNELS'] = 'interpret'; rmsnorm.gpu.is_interpreted()",
        "True\n", "is 'interpret', expected TRITON_INTERPRET=1 beside it; set both before Triton is imported",
    ),
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize("name", ANSWERS)
def test_whether_there_is_a_triton(name: str) -> None:
    code, prints, says = ANSWERS[name]
    done = finished("-c", code, path=TRITON, timeout=200, TRITON_INTERPRET=None, RMSNORM_GPU_KERNELS=None)
    assert done.stdout == prints, done.stderr
    assert says in done.stderr
