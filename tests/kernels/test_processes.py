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

COUNT_THREADS = """
import os
import numpy as np
from rmsnorm.numpy_impl.fast import rms_norm
x = np.ones((2100, 1025), np.float32)
FIRST
rms_norm(x[:9])
before = len(os.listdir("/proc/self/task"))
rms_norm(x)
print(len(os.listdir("/proc/self/task")) - before)
"""
OF_PYTORCH = """import torch; from rmsnorm.torch_impl import rms_norm
torch.set_num_threads(2); x = torch.from_numpy(x); x.exp()  # its first parallel operation"""
AFTER_PYTORCH = COUNT_THREADS.replace("FIRST", OF_PYTORCH)
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
    assert torch.equal(y[300], rms_norm(x[300])) and torch.equal(dx[300], rms_norm_vjp(x[300], x[300])[0])

def twice():
    compute()
    forked(compute)

forked(twice)
import rmsnorm.torch_impl
forked(compute)
compute()
forked(compute)
"""
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
PAGES = """
import torch
from rmsnorm.torch_impl import rms_norm

def is_advised(tensor):
    place = tensor.data_ptr() + tensor.nbytes // 2
    for line in open("/proc/self/smaps"):
        head, *flags = line.split()
        if "-" in head:
            first, last = (int(end, 16) for end in head.split("-"))
        elif head == "VmFlags:" and first <= place < last:
            return "hg" in flags

x = torch.ones(4096, 2048, requires_grad=True)
y = rms_norm(x)
(dx,) = torch.autograd.grad(y.sum(), x)
print(is_advised(x), is_advised(y), is_advised(dx), is_advised(rms_norm(x.detach()[:100])))
"""
PROGRAMS = {  # variables, code, and what it prints
    "one thread computes": ({"RMSNORM_NUM_THREADS": "1"}, COUNT_THREADS.replace("FIRST", ""), "0"),
    "as many threads start as asked for": ({"RMSNORM_NUM_THREADS": "2"}, COUNT_THREADS.replace("FIRST", ""), "1"),
    "the threads of PyTorch compute": ({}, AFTER_PYTORCH, "0"),
    "or those of this package": ({"RMSNORM_OPENMP": "0"}, AFTER_PYTORCH, "1"),
    "a forked process waits for no thread of its parent": ({}, FORKED, "0 0 0 0"),
    "calls after the end of the main thread": ({"RMSNORM_NUM_THREADS": "2"}, AFTER_THE_END,
                                               "a thread True at exit True"),
    "large results have huge pages": ({}, PAGES, "False True True False"),
    "unless that is switched off": ({"RMSNORM_HUGE_PAGES": "0"}, PAGES, "False False False False"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name: str) -> None:
    environment, code, expected = PROGRAMS[name]
    if ("/proc" in code and sys.platform != "linux") or ("fork" in code and not hasattr(os, "fork")):
        pytest.skip("this system has no /proc, or no fork")
    if "torch" in code:
        pytest.importorskip("torch")
    if code == PAGES and "[madvise]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("the system does not leave huge pages to programs")
    changes = {**{name: None for name in os.environ if name.startswith("RMSNORM_")}, **environment}
    assert printed("-W", "error", "-c", code, timeout=120, **changes).split() == expected.split()


CHECK = "from rmsnorm.specification import environment; environment.check()"
FAST = "import rmsnorm.numpy_impl.fast"
OTHER = "v3" if _native.level() == "arm64" else "arm64"


@pytest.mark.parametrize(("level", "code", "status", "said"), [
    ("v5", CHECK, 1, "RMSNORM_CPU_LEVEL is 'v5', expected v3, v4, v4-bf16 or arm64; change or unset it"),
    ("v5", FAST, 1, "ValueError: rmsnorm: the environment variable RMSNORM_CPU_LEVEL is 'v5', expected v3, v4"),
    (OTHER, FAST, 0, f"there are no kernels of level {OTHER} for this processor"),
])  # fmt: skip
def test_a_level_that_there_is_not_is_said(level: str, code: str, status: int, said: str) -> None:
    done = finished("-c", code, timeout=60, RMSNORM_CPU_LEVEL=level)
    assert (done.returncode, said in done.stderr) == (status, True), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="what /proc says")
@pytest.mark.parametrize("maps", [None, "7f00-7f01 r-xp 00000000 08:01 7 /no/libgomp.so.1 (deleted)\n"])
def test_where_nothing_says_which_openmp_is_loaded_no_call_fails(
    maps: str | None, monkeypatch: pytest.MonkeyPatch, forget: Any
) -> None:
    """The threads of this package compute, without /proc or the file of libgomp."""
    files = {} if maps is None else {"/proc/self/stat": "1 (python) R 1 1 1 0 -1 0 0", "/proc/self/maps": maps}

    def opened(name: str) -> Any:
        if name not in files:
            raise OSError("no such file")
        return io.StringIO(files[name])

    forget(openmp._gomp_parallel)
    monkeypatch.delenv("RMSNORM_OPENMP", raising=False)
    monkeypatch.setattr(openmp, "open", opened, raising=False)
    assert openmp.gomp_parallel() == 0
