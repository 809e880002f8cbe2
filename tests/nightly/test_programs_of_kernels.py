"""Programs of their own that take long: children, no kernels, the golden's bits, and trouble."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.test_golden_bits import DIGEST
from programs import printed

from rmsnorm import cpu
from rmsnorm.specification.frameworks import FRAMEWORKS

if not cpu.is_available():
    pytest.skip("there are no kernels here", allow_module_level=True)
HERE = Path(__file__).parent


CHILDREN = """
import multiprocessing, sys
import numpy as np
import torch
from rmsnorm.numpy_impl import fast
from rmsnorm.torch_impl import RMSNorm

def results():
    rng = np.random.default_rng(0)
    dy, x = rng.standard_normal((2, 2100, 1025), np.float32)
    layer, leaf = RMSNorm(1025, variant="standard"), torch.from_numpy(x).requires_grad_()
    y = layer(leaf)
    y.backward(torch.from_numpy(dy))
    scale = np.ones(1025, np.float32)
    arrays = fast.rms_norm(x, scale), *fast.rms_norm_vjp(dy, x, scale)[:2], y.detach().numpy(), leaf.grad.numpy()
    return [hash(a.tobytes()) for a in arrays]

def child(queue):
    queue.put(results())

if __name__ == "__main__":
    want, context = results(), multiprocessing.get_context(sys.argv[1])
    queue = context.SimpleQueue()
    for _ in range(2):
        process = context.Process(target=child, args=(queue,))
        process.start()
        process.join(60)
        assert process.exitcode == 0, process.exitcode
        assert queue.get() == want
    print(results() == want)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_processes(method: str, tmp_path: Path) -> None:
    """The parent has used its threads, forward and backward. The children do so, too, one after the other."""
    pytest.importorskip("torch")
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip("this system has no fork")
    program = tmp_path / "children.py"
    program.write_text(CHILDREN)
    said = printed(program, method, timeout=180, RMSNORM_NUM_THREADS="2", PYTHONHASHSEED="0")
    assert said == "True\n"


RESULTS = """
import itertools, json, sys, warnings
if sys.argv[1] == "absent":
    sys.modules["rmsnorm.cpu._native"] = None
import numpy as np
import ml_dtypes
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    from rmsnorm.numpy_impl import fast
    from rmsnorm.targets.bridges import bridge
    from rmsnorm.torch_impl import rms_norm
    tensor, of_numpy, of_torch, rng = bridge("torch").send, [], [], np.random.default_rng(0)
    for dtype, variant in itertools.product(("float16", "bfloat16", "float32"), ("standard", "llama", "flax")):
        (dy, x, residual), scale = rng.normal(size=(3, 40, 64)).astype(dtype), rng.normal(size=64).astype(dtype)
        options = {"variant": variant, "residual": residual}
        of_numpy += fast.rms_norm(x, scale, return_inverse_rms=True, **options)
        of_numpy += [a for a in fast.rms_norm_vjp(dy, x, scale, **options) if a is not None]
        leaves = [tensor(a).clone().requires_grad_() for a in (x, scale)]
        y, h = rms_norm(*leaves, variant=variant, residual=tensor(residual))
        y.backward(tensor(dy))
        of_torch += [t.detach().float().numpy() for t in (y, h, leaves[0].grad, leaves[1].grad)]
messages = [str(warning.message) for warning in caught if "rmsnorm" in str(warning.message)]
bits = [[hash(np.where(a == 0, 0, a).tobytes()) for a in arrays] for arrays in (of_numpy, of_torch)]
print(json.dumps([messages, *bits, sys.modules.get("rmsnorm.cpu._native") is not None]))
"""


def results(kernels: str, **environment: str) -> Any:
    """The warnings, the bits of all results of NumPy and of PyTorch, and whether the kernels were loaded."""
    changes = {**{name: None for name in os.environ if name.startswith("RMSNORM_")}, "PYTHONHASHSEED": "0"}
    return json.loads(printed("-W", "error", "-c", RESULTS, kernels, timeout=120, **changes, **environment))


def test_without_kernels_numpy_has_the_same_results_and_pytorch_those_of_the_recipe() -> None:
    """One warning for NumPy and one for PyTorch say how to install it; none if the kernels are switched off."""
    pytest.importorskip("torch")
    runs = results("installed"), results("absent"), results("installed", RMSNORM_CPU_KERNELS="0")
    warnings, of_numpy, of_torch, loads_kernels = zip(*runs, strict=True)
    assert warnings[0] == warnings[2] == []
    consequences = ["numpy_impl.fast is now the golden", "using slower code, whose last bits may differ"]
    for message, consequence in zip(warnings[1], consequences, strict=True):
        for part in (consequence, "the module of the kernels cannot be imported (",
                     "install the package with a C++ compiler", "or set RMSNORM_CPU_KERNELS=0"):  # fmt: skip
            assert part in message
    assert of_numpy[0] == of_numpy[1] == of_numpy[2]
    assert of_torch[1] == of_torch[2]
    assert loads_kernels == (True, False, False)


def test_the_goldens_bits_do_not_depend_on_vector_instructions() -> None:
    module: Any = np._core._multiarray_umath
    present = [name for name in module.__cpu_dispatch__ if module.__cpu_features__[name]]
    command = "from golden import test_golden_bits; print(test_golden_bits.digest())"
    assert printed("-c", command, timeout=200, NPY_DISABLE_CPU_FEATURES=" ".join(present)).strip() == DIGEST


TROUBLE = ("threads", "interrupt", "memory")


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux'")
@pytest.mark.parametrize("name", list(FRAMEWORKS))
def test_a_layer_in_trouble_is_right_or_says_what_is_wrong(name: str) -> None:
    """Among threads, interrupted, and out of memory: its result is right, or a clear error, and never a hang.

    Each framework runs in its own process, which may run out of memory.
    """
    backend = FRAMEWORKS[name]
    if find_spec(backend.package) is None:
        pytest.skip(f"{backend.package} is not installed; pip install '.[{backend.extra}]'")
    said = printed("-W", "ignore", HERE / "trouble.py", name, *TROUBLE, timeout=240)
    assert said.splitlines()[-3:] == [f"{name} {trouble}: right" for trouble in TROUBLE]
