"""The arguments that JAX's programs pass to the Triton kernels: the interpreter runs these on them. test_triton.py
starts this.

RMSNORM_GPU_KERNELS=interpret TRITON_INTERPRET=1 python -m pytest tests/gpu/jax_kernels.py
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from rmsnorm import numpy_impl  # noqa: E402
from rmsnorm.flax_impl import gpu, kernels  # noqa: E402
from rmsnorm.flax_impl.gate import Operands  # noqa: E402
from rmsnorm.gpu import plan  # noqa: E402
from rmsnorm.specification.call import Spec  # noqa: E402
from rmsnorm.specification.resolve import resolve  # noqa: E402
from rmsnorm.specification.variants import Variant  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinite numbers in the interpreter

BRANCHES = {"many": (2**13, 32), "one": (2**13, 1), "split": (64, 1)}  # as in torch_kernels.py
CASES = [
    ("many", "bfloat16", "llama", 1, None),
    ("many", "float16", "gemma", 2, "rows"),
    ("one", "float32", "paper", 1, None),
    ("one", "bfloat16", "zhang_torch", 2, "elements"),
    ("split", "float32", "lasagne", 1, "elements"),
    ("split", "bfloat16", "mlx", 2, None),
]


def tensor(array: Any) -> Any:
    array = np.array(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if array.dtype == ml_dtypes.bfloat16 else (
        torch.from_numpy(array.view(np.uint8) if array.dtype == bool else array)
    )  # fmt: skip


def start(kernel: Any, grid: Any, chosen: Any, values: dict[str, Any], results: dict[str, Any]) -> list[np.ndarray]:
    """As gpu._start: the arguments by their names, and the results in their order."""
    arguments = {**chosen.arguments, **values, **results}
    tensors = {name: tensor(np.zeros(arguments[name].shape, arguments[name].dtype) if name in results else value)
               for name, value in arguments.items() if hasattr(value, "dtype")}  # fmt: skip
    kernel[(*grid, 1)](*(tensors.get(name, arguments[name]) for name in kernel.arg_names))
    return [
        tensors[name].view(torch.int16).numpy().view(ml_dtypes.bfloat16) if tensors[name].dtype is torch.bfloat16
        else tensors[name].numpy()
        for name in kernel.arg_names if name in results
    ]  # fmt: skip


@pytest.mark.parametrize(("branch", "dtype", "variant", "groups", "masked"), CASES)
def test_values_and_gradients_are_the_goldens(
    branch: str, dtype: str, variant: str, groups: int, masked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    widest, most_rows = BRANCHES[branch]
    for kind, limits in plan._LIMITS.items():
        monkeypatch.setitem(plan._LIMITS, kind, limits._replace(widest=widest, chunk=32))
    monkeypatch.setattr(plan, "_MOST_ROWS", most_rows)
    monkeypatch.setattr(gpu, "_start", start)
    random = np.random.default_rng(0)
    shape = 5, groups, 80
    x, dy, dh = (random.standard_normal(shape).astype(jax.numpy.dtype(dtype)) for _ in range(3))
    scale, bias = (random.standard_normal(shape[1:]).astype(x.dtype) for _ in range(2))
    mask = {
        None: None, "rows": random.random((5, 1, 1)) < 0.7, "elements": random.random((groups, 80)) < 0.7,
    }[masked]  # fmt: skip
    options = {"variant": variant, "mask": mask, "feature_axis": (1, 2)}
    call = resolve(
        "rms_norm", Spec(shape, dtype), Spec(scale.shape, dtype), Spec(bias.shape, dtype),
        variant=Variant.get(variant), feature_axis=(1, 2), mask=None if mask is None else Spec(mask.shape, "bool"),
    )  # fmt: skip
    masks = None if mask is None else jax.numpy.asarray(mask)

    def forward() -> Any:
        return kernels._forward_on_gpu(Operands(h=x, mask=masks, scale=scale, bias=bias), call)

    def backward(dh: Any, wanted: Any) -> Any:
        operands = Operands(dy=dy, h=x, inverse_rms=inverse_rms, dh=dh, mask=masks, scale=scale)
        return kernels._gradients_on_gpu(operands, call, (*wanted, None))

    y, inverse_rms = forward()
    np.testing.assert_array_equal(y, numpy_impl.rms_norm(x, scale, bias, **options))
    for zero in (None, dh):
        cotangent = dy if zero is None else (dy, dh)
        given = {} if zero is None else {"residual": np.zeros_like(x)}
        wanted = numpy_impl.rms_norm_vjp(cotangent, x, scale, bias, **options, **given)[:3]
        results = backward(zero, (dtype,) * 3)
        for one, other in zip(results, wanted, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            np.testing.assert_array_equal(one, other)
    assert len(backward(None, (None, dtype, None))) == 1
