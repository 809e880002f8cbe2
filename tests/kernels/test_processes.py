"""The compiled kernels in programs of their own: threads that start, forks, levels, large pages."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import finished, printed

from rmsnorm import cpu
from rmsnorm.cpu import openmp

if not cpu.is_available():
    pytest.skip("there are no kernels here", allow_module_level=True)
from rmsnorm.cpu import _native


def run(code: str, *arguments: Any, **environment: str) -> str:
    """What a separate program prints, within two minutes; warnings are errors."""
    changes = {**{name: None for name in os.environ if name.startswith("RMSNORM_")}, **environment}
    return printed("-W", "error", "-c", code, *arguments, timeout=120, **changes)


COUNT_THREADS = """
import os, sys
import numpy as np
from rmsnorm.numpy_impl import fast
x = np.ones((2100, 1025), np.float32)
fast.rms_norm(x[:9])
before = len(os.listdir("/proc/self/task"))
fast.rms_norm(x)
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_as_many_threads_as_asked_for() -> None:
    assert [int(run(COUNT_THREADS, RMSNORM_NUM_THREADS=count)) for count in ("1", "2")] == [0, 1]


@pytest.mark.parametrize("openmp_is_on", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_pytorch_computes_with_its_own_threads(openmp_is_on: bool) -> None:
    """After its first parallel operation, a large call of ours starts none, unless OpenMP is switched off."""
    pytest.importorskip("torch")
    code = COUNT_THREADS.replace("fast.rms_norm(x[:9])", "import torch; torch.set_num_threads(2)\n"
        "from rmsnorm.torch_impl import rms_norm; x = torch.from_numpy(x); x.exp(); rms_norm(x[:9])"
    ).replace("fast.rms_norm(x)", "rms_norm(x)")  # fmt: skip
    environment = {} if openmp_is_on else {"RMSNORM_OPENMP": "0"}
    assert int(run(code, **environment)) == (0 if openmp_is_on and sys.platform == "linux" else 1)


FORKED = """
import os, signal
import torch
torch.set_num_threads(2)
x = torch.arange(512 * 1024.0).view(512, 1024) % 97
torch.nn.functional.silu(x)  # PyTorch's threads have begun, and its own operations now hang in a forked process

def forked(work):
    child = os.fork()
    if not child:
        signal.alarm(30)
        work()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

def compute():
    from rmsnorm.torch_impl import rms_norm, rms_norm_vjp
    y, dx = rms_norm(x), rms_norm_vjp(x, x)[0]
    for row in (0, 300, 511):
        assert torch.equal(y[row], rms_norm(x[row])) and torch.equal(dx[row], rms_norm_vjp(x[row], x[row])[0])

def twice():
    compute()
    forked(compute)

forked(twice)
import rmsnorm.torch_impl
forked(compute)
compute()
forked(compute)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_waits_for_no_thread_of_its_parent() -> None:
    """Whether the package is imported before the fork or after it, and whether the parent has called it."""
    pytest.importorskip("torch")
    assert run(FORKED).split() == ["0"] * 4


AFTER_THE_END = """
import atexit, threading, time
import numpy as np
from rmsnorm.numpy_impl import fast
x = np.ones((2100, 1025), np.float32)
want = fast.rms_norm(x).tobytes()

def later(name):
    if name == "a thread":
        threading.main_thread().join()
        time.sleep(0.2)
    print(name, fast.rms_norm(x).tobytes() == want, flush=True)

atexit.register(later, "at exit")
threading.Thread(target=later, args=("a thread",)).start()
"""


def test_calls_after_the_end_of_the_main_thread() -> None:
    """The threads do not keep the interpreter from exiting, and other threads still get their results."""
    assert run(AFTER_THE_END, RMSNORM_NUM_THREADS="2").splitlines() == ["a thread True", "at exit True"]


CHECK = "from rmsnorm.specification import environment; environment.check()"
FAST = "import rmsnorm.numpy_impl.fast"
OTHER = "v3" if _native.level() == "arm64" else "arm64"


@pytest.mark.parametrize(("level", "code", "status", "said"), [
    ("v5", CHECK, 1, "RMSNORM_CPU_LEVEL is 'v5', expected v3, v4, v4-bf16 or arm64; change or unset it"),
    ("v5", FAST, 1, "ValueError: rmsnorm: the environment variable RMSNORM_CPU_LEVEL is 'v5', expected v3, v4"),
    (OTHER, FAST, 0, f"there are no kernels of level {OTHER} for this processor"),
    (OTHER, FAST, 0, "or unset RMSNORM_CPU_LEVEL"),
])  # fmt: skip
def test_a_level_that_there_is_not_is_said(level: str, code: str, status: int, said: str) -> None:
    done = finished("-c", code, timeout=60, RMSNORM_CPU_LEVEL=level)
    assert (done.returncode, said in done.stderr) == (status, True), done.stderr


ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PAGES = """
import torch
from rmsnorm.torch_impl import rms_norm

def is_advised(tensor):
    place, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in open("/proc/self/smaps"):
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(end, 16) for end in head.split("-"))
            inside = first <= place < last
        elif inside and head == "VmFlags:":
            return "hg" in line.split()

x = torch.ones(4096, 2048, requires_grad=True)
y = rms_norm(x)
(dx,) = torch.autograd.grad(y.sum(), x)
print(is_advised(x), is_advised(y), is_advised(dx), is_advised(rms_norm(x.detach()[:100])))
"""


@pytest.mark.parametrize(("switch", "expected"), [
    ("1", "False True True False"), pytest.param("0", "False False False False", marks=pytest.mark.slow),
])  # fmt: skip
def test_large_results_of_pytorch_have_huge_pages(switch: str, expected: str) -> None:
    """Where the system leaves that to programs; small ones have none."""
    pytest.importorskip("torch")
    if not ENABLED.exists() or "[madvise]" not in ENABLED.read_text():
        pytest.skip("the system does not leave huge pages to programs")
    assert printed("-W", "ignore", "-c", PAGES, timeout=200, RMSNORM_HUGE_PAGES=switch).strip() == expected


@pytest.mark.skipif(sys.platform != "linux", reason="what /proc says")
@pytest.mark.parametrize("absent", ["/proc", "the file of libgomp"])
def test_where_nothing_says_which_openmp_is_loaded_no_call_fails(
    absent: str, monkeypatch: pytest.MonkeyPatch, forget: Any
) -> None:
    """The threads of this package compute."""
    forget(openmp._gomp_parallel)
    files = {"/proc/self/stat": "1 (python) R 1 1 1 0 -1 0 0"}
    files["/proc/self/maps"] = "7f00-7f01 r-xp 00000000 08:01 7 /no/libgomp.so.1 (deleted)\n"

    def opened(name: str) -> Any:
        if absent == "/proc":
            raise OSError("no such file")
        return io.StringIO(files[name])

    monkeypatch.delenv("RMSNORM_OPENMP", raising=False)
    monkeypatch.setattr(openmp, "open", opened, raising=False)
    assert openmp.gomp_parallel() == 0
