"""RMSNorm in keras.ops: on NumPy and OpenVINO, the backends of Keras that have no folder here and no derivatives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

from keras import backend, ops

from rmsnorm import recipe
from rmsnorm.engines import prepare
from rmsnorm.specification.call import Axis, Spec
from rmsnorm.specification.variants import Variant


def _where(chosen: Any, a: Any, b: Any) -> Any:
    """ops.where makes float32 of float64, and so do others that are replaced below."""
    like = a if ops.is_tensor(a) else b
    return ops.select([chosen], [a + ops.zeros_like(like)], b + ops.zeros_like(like))


def _mean(a: Any, axes: tuple[int, ...]) -> Any:
    size = 1
    for axis in axes:
        size *= a.shape[axis]
    return ops.sum(a, axes, keepdims=True) / size


def _rounded(a: Any, name: str) -> Any:
    return ops.cast(ops.cast(a, name), _name_of(a))


def _name_of(a: Any) -> str:
    return str(backend.standardize_dtype(a.dtype))


OPS: Final = SimpleNamespace(
    name_of=_name_of, cast=ops.cast, rounded=_rounded, constant=lambda a: a,
    shape=lambda a: a.shape, reshape=ops.reshape, index=lambda a, entries: a[entries],
    ones_like=ops.ones_like, arange=lambda n, like: ops.arange(n),
    where=_where, maximum=lambda a, b: _where(a < b, b, a),
    sqrt=lambda a: a**0.5, rsqrt=lambda a: a**-0.5, reciprocal=lambda a: 1 / a, sigmoid=ops.sigmoid, silu=ops.silu,
    sum=lambda a, axes: ops.sum(a, axes, keepdims=True), max=lambda a, axes: ops.max(a, axes, keepdims=True),
    mean=_mean, mean_square=recipe.mean_square, root=recipe.root, is_spread=False,
)  # fmt: skip


def rms_norm(
    x: Any, scale: Any = None, bias: Any = None, *, variant: Variant, axis: Axis = -1, feature_axis: Axis | None = None,
    gate: Any = None, out_dtype: Any = None,
) -> Any:  # fmt: skip
    """As tf_impl.functional.rms_norm with the arguments that the layer has."""
    options = (variant, None, None, axis, feature_axis, out_dtype)
    arrays = (x, scale, bias, None, None, gate)
    specs = (None if array is None else Spec(tuple(array.shape), _name_of(array)) for array in arrays)
    call = prepare("rms_norm", options, *specs).call
    if 0 in call.shape:
        return ops.cast(x, call.result_dtype)
    return recipe.forward(OPS, call, x, None, scale, bias, None, gate)[0]
