"""The compiled kernels in programs of their own: threads that start, forks, and no kernels."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import printed

from rmsnorm import cpu
from rmsnorm.numpy_impl import fast

if not cpu.is_available():
    pytest.skip("there are no kernels here", allow_module_level=True)


def run(code: str, *arguments: Any, cwd: Any = None, **environment: str) -> str:
    """What a separate program prints, within two minutes; warnings are errors."""
    changes = {**{name: None for name in os.environ if name.startswith("RMSNORM_")}, **environment}
    return printed("-W", "error", "-c", code, *arguments, timeout=120, cwd=cwd, **changes)


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
    assert int(run(COUNT_THREADS, RMSNORM_NUM_THREADS="1")) == 0
    assert int(run(COUNT_THREADS, RMSNORM_NUM_THREADS="2")) == 1


@pytest.mark.slow
@pytest.mark.torch
def test_pytorch_computes_with_its_own_threads() -> None:
    """After its first parallel operation, a large call of ours starts none, unless OpenMP is switched off."""
    pytest.importorskip("torch")
    code = COUNT_THREADS.replace("fast.rms_norm(x[:9])", "import torch; torch.set_num_threads(2)\n"
        "from rmsnorm.torch_impl import rms_norm; x = torch.from_numpy(x); x.exp(); rms_norm(x[:9])"
    ).replace("fast.rms_norm(x)", "rms_norm(x)")  # fmt: skip
    assert int(run(code)) == (0 if sys.platform == "linux" else 1)
    assert int(run(code, RMSNORM_OPENMP="0")) == 1


CHILDREN = """
import hashlib, multiprocessing, sys
import numpy as np
from rmsnorm.numpy_impl import fast

def digest(with_torch):
    rng = np.random.default_rng(0)
    dy, x = rng.standard_normal((2, 2100, 1025), np.float32)
    scale = rng.standard_normal(1025, np.float32)
    results = [fast.rms_norm(x, scale), *fast.rms_norm_vjp(dy, x, scale)[:2]]
    if with_torch:
        import torch
        from rmsnorm.torch_impl import RMSNorm
        layer = RMSNorm(1025, variant="standard", eps=1e-5)
        with torch.no_grad():
            layer.weight.numpy()[:] = scale
        leaf = torch.from_numpy(x).requires_grad_()
        y = layer(leaf)
        y.backward(torch.from_numpy(dy))
        results += [y.detach().numpy(), leaf.grad.numpy(), layer.weight.grad.numpy()]
    return [hashlib.sha256(result.tobytes()).hexdigest() for result in results]

def child(queue, with_torch):
    queue.put(digest(with_torch))

if __name__ == "__main__":
    method, with_torch = sys.argv[1], sys.argv[2] == "True"
    want = digest(with_torch)
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    for _ in range(2):
        process = context.Process(target=child, args=(queue, with_torch))
        process.start()
        process.join(60)
        assert process.exitcode == 0, process.exitcode
        assert queue.get() == want
    assert digest(with_torch) == want
    print("equal")
"""


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_processes(method: str, framework: str, tmp_path: Path) -> None:
    """The parent has used its threads, forward and backward. The children do so, too, one after the other."""
    if framework == "torch":
        pytest.importorskip("torch")
    elif method == "spawn":
        pytest.skip("as with PyTorch")
    if method == "fork" and not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    program = tmp_path / "children.py"
    program.write_text(CHILDREN)
    assert printed(program, method, framework == "torch", timeout=180, RMSNORM_NUM_THREADS="2") == "equal\n"


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
    x = np.ones((2, 1024), np.float32)
    fast.rms_norm_vjp(fast.rms_norm(x), x)  # the kernels are compiled here, where it may take long
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


RESULTS = """
import hashlib, json, sys, warnings
if sys.argv[1] == "absent":
    sys.modules["rmsnorm.cpu._native"] = None
import numpy as np
import ml_dtypes
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import rmsnorm.numpy_impl
    from rmsnorm.numpy_impl import fast
    with_torch = sys.argv[2] == "True"
    if with_torch:
        from rmsnorm.targets.bridges import bridge
        from rmsnorm.torch_impl import rms_norm
        tensor = bridge("torch").send
    results, rng = [], np.random.default_rng(0)
    for dtype in ("float16", "bfloat16", "float32"):
        dy, x, residual = rng.normal(size=(3, 40, 64)).astype(dtype)
        scale = rng.normal(size=64).astype(dtype)
        for variant in ("standard", "llama", "flax"):
            for options in ({}, {"residual": residual}):
                y = fast.rms_norm(x, scale, variant=variant, return_inverse_rms=True, **options)
                results += [*y, *fast.rms_norm_vjp(dy, x, scale, variant=variant, **options)]
                if with_torch:
                    tensors = {name: tensor(a) for name, a in options.items()}
                    leaves = [tensor(a).clone().requires_grad_() for a in (x, scale)]
                    y = rms_norm(*leaves, variant=variant, **tensors)
                    y = y[0] if options.get("residual") is not None else y
                    y.backward(tensor(dy))
                    results += [t.detach().float().numpy() for t in (y, leaves[0].grad, leaves[1].grad)]
messages = [str(warning.message) for warning in caught if "rmsnorm" in str(warning.message)]
digests = [hashlib.sha256(np.where(a == 0, 0, a).tobytes()).hexdigest() for a in results if a is not None]
print(json.dumps([messages, digests, sys.modules.get("rmsnorm.cpu._native") is not None]))
"""


@pytest.mark.slow
def test_without_kernels_the_results_are_the_same() -> None:
    """One warning for NumPy and one for PyTorch say how to install it; none if the kernels are switched off."""
    with_torch = find_spec("torch") is not None
    with_kernels = json.loads(run(RESULTS, "installed", with_torch))
    absent = json.loads(run(RESULTS, "absent", with_torch))
    switched_off = json.loads(run(RESULTS, "installed", with_torch, RMSNORM_CPU_KERNELS="0"))
    assert with_kernels[0] == switched_off[0] == []
    consequences = ["numpy_impl.fast is now the golden", "using slower code with the same results"][: 1 + with_torch]
    for message, consequence in zip(absent[0], consequences, strict=True):
        assert consequence in message
        assert "the module of the kernels cannot be imported (" in message
        assert "install the package with a C++ compiler" in message
        assert "or set RMSNORM_CPU_KERNELS=0" in message
    assert with_kernels[1] == absent[1] == switched_off[1]
    assert [loads_kernels for _, _, loads_kernels in (with_kernels, absent, switched_off)] == [True, False, False]
