"""Programs of their own that take long: children, no kernels, the golden's bits, and trouble."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize(("method", "framework"), [("fork", "numpy"), ("fork", "torch"), ("spawn", "torch")])
def test_child_processes(method: str, framework: str, tmp_path: Path) -> None:
    """The parent has used its threads, forward and backward. The children do so, too, one after the other."""
    if framework == "torch":
        pytest.importorskip("torch")
    if method == "fork" and not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    program = tmp_path / "children.py"
    program.write_text(CHILDREN)
    assert printed(program, method, framework == "torch", timeout=180, RMSNORM_NUM_THREADS="2") == "equal\n"


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
    of_numpy, of_torch, rng = [], [], np.random.default_rng(0)
    for dtype in ("float16", "bfloat16", "float32"):
        dy, x, residual = rng.normal(size=(3, 40, 64)).astype(dtype)
        scale = rng.normal(size=64).astype(dtype)
        for variant in ("standard", "llama", "flax"):
            for options in ({}, {"residual": residual}):
                y = fast.rms_norm(x, scale, variant=variant, return_inverse_rms=True, **options)
                of_numpy += [*y, *fast.rms_norm_vjp(dy, x, scale, variant=variant, **options)]
                if with_torch:
                    tensors = {name: tensor(a) for name, a in options.items()}
                    leaves = [tensor(a).clone().requires_grad_() for a in (x, scale)]
                    y = rms_norm(*leaves, variant=variant, **tensors)
                    y = y[0] if options.get("residual") is not None else y
                    y.backward(tensor(dy))
                    of_torch += [t.detach().float().numpy() for t in (y, leaves[0].grad, leaves[1].grad)]
messages = [str(warning.message) for warning in caught if "rmsnorm" in str(warning.message)]
digests = [
    [hashlib.sha256(np.where(a == 0, 0, a).tobytes()).hexdigest() for a in results if a is not None]
    for results in (of_numpy, of_torch)
]
print(json.dumps([messages, digests, sys.modules.get("rmsnorm.cpu._native") is not None]))
"""


def results(kernels: str, **environment: str) -> tuple[list[str], list[list[str]], bool]:
    """The warnings, the bits of all results of NumPy and of PyTorch, and whether the kernels were loaded."""
    changes = {**{name: None for name in os.environ if name.startswith("RMSNORM_")}, **environment}
    with_torch = find_spec("torch") is not None
    return tuple(json.loads(printed("-W", "error", "-c", RESULTS, kernels, with_torch, timeout=120, **changes)))


def test_without_kernels_numpy_has_the_same_results_and_pytorch_those_of_the_recipe() -> None:
    """One warning for NumPy and one for PyTorch say how to install it; none if the kernels are switched off."""
    runs = results("installed"), results("absent"), results("installed", RMSNORM_CPU_KERNELS="0")
    warnings, digests, loads_kernels = zip(*runs, strict=True)
    assert warnings[0] == warnings[2] == []
    consequences = ["numpy_impl.fast is now the golden", "using slower code, whose last bits may differ"]
    for message, consequence in zip(warnings[1], consequences[: 1 + (find_spec("torch") is not None)], strict=True):
        for part in (consequence, "the module of the kernels cannot be imported (",
                     "install the package with a C++ compiler", "or set RMSNORM_CPU_KERNELS=0"):  # fmt: skip
            assert part in message
    of_numpy, of_torch = zip(*digests, strict=True)
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
