"""Which code computes a call: a kernel, or recipe.py. A call is checked, and the question answered, once.

Every framework asks here. What it keeps of the answer, such as the layout of results, is kept with the call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

from rmsnorm import cpu, gpu
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Call, Spec
from rmsnorm.specification.interface import Options
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import derive

KERNELS: Final[dict[str, Any]] = {"cpu": cpu, "cuda": gpu}  # by the platform of the arrays
_FORMATS: Final = (None, "float16", "bfloat16", "float32")


def why_not(call: Call, platform: str = "cpu", formats: Iterable[str | None] = (), card: Any = None) -> str | None:
    """Why no kernel computes a call ``in_rows`` with parameters of these dtypes; None if one does.

    Nothing else decides that. A call that is slow for want of kernels gives a warning, once. ``card`` says what the
    framework knows of a GPU: see ``gpu.missing``.
    """
    reason: str | None = refusal(call, platform, formats) or KERNELS[platform].missing(card)
    return reason


def refusal(call: Call, platform: str | None, formats: Iterable[str | None] = ()) -> str | None:
    """Why no kernel of a platform could compute a call: the part of ``why_not`` that needs no device.

    The platform is None if it is not known yet.
    """
    if not all(isinstance(size, int) for size in call.shape):
        return "a size of x is not known before the program runs"
    if 0 in call.shape:
        return "x has no elements"
    if not call.has_last_axes:
        return "the normalised axes are not the last ones"
    if call.masked:
        return "the call has a mask"
    if any(
        name not in _FORMATS
        for name in (call.x_dtype, call.sum_dtype, call.norm_dtype, call.product_dtype, call.result_dtype, *formats)
    ):
        return "an array is float64"
    if {call.x_dtype, call.result_dtype} == set(dtypes.HALF):
        return "x and y have different formats of 16 bits"
    if platform not in (None, *KERNELS):
        return "there are no kernels for its device"
    return gpu.refusal(call) if platform == "cuda" else None


class Prepared(NamedTuple):
    """A call that is checked; how kernels compute it is found out when that is first asked for.

    Attributes:
        call: the checked call.
        kernel_call: the same as kernels compute it (``Call.in_rows``); with ``dy`` y has the dtype of dy.
        formats: dtypes of scale and bias as kernels take them, or None.
        kept: how kernels compute it, by the device. No array is in it.
    """

    call: Call
    kernel_call: Call
    formats: tuple[str | None, str | None]
    kept: dict[Any, Any]

    def in_memory(self) -> tuple[Any, str | None]:
        """The ``launch.Launch`` for arrays in the memory of a CPU, and None; or None, and why no kernel computes it."""
        known: tuple[Any, str | None] | None = self.kept.get("launch")
        if known is None:
            known = None, why_not(self.kernel_call, "cpu", self.formats)
            if known[1] is None:
                from rmsnorm.cpu.launch import launch_of

                known = launch_of(self.kernel_call, *self.formats), None
            self.kept["launch"] = known
        return known


def prepare(
    op: str, options: Options, x: Any, scale: Any = None, bias: Any = None, mask: Any = None, residual: Any = None,
    gate: Any = None, dy: Any = None, dh: Any = None,
) -> Prepared:  # fmt: skip
    """The prepared call named ``op`` on arrays of any library, of which only shape and dtype are read.

    A call with the same options, shapes and dtypes is prepared once. With ``dy`` it is the call of the gradients.

    Raises:
        TypeError, ValueError: as ``resolve``.

    Example:
        >>> import numpy as np
        >>> prepare("rms_norm", ("llama", None, None, -1, None, None), np.ones((4, 6), "float32")).call.n
        6
    """
    variant, eps, partial, axis, feature_axis, out_dtype = options
    key = (
        op, variant, eps, partial, _as_key(axis), _as_key(feature_axis), out_dtype, (x.shape, x.dtype),
        None if scale is None else (scale.shape, scale.dtype),  # written out, as a loop takes as long as a small kernel
        None if bias is None else (bias.shape, bias.dtype),
        None if mask is None else (mask.shape, mask.dtype),
        None if residual is None else (residual.shape, residual.dtype),
        None if gate is None else (gate.shape, gate.dtype),
        None if dy is None else (dy.shape, dy.dtype),
        None if dh is None else (dh.shape, dh.dtype),
    )  # fmt: skip
    try:
        return _prepared(*key)
    except TypeError:  # an option cannot be a key of the cache; or an error of the call, which is raised again
        return _prepared.__wrapped__(*key)


def _as_key(axis: Any) -> Any:
    """A list of integers as a tuple, which the cache can look up. Other lists are refused by ``resolve``."""
    return tuple(axis) if type(axis) is list and all(type(entry) is int for entry in axis) else axis


@lru_cache(maxsize=4096, typed=True)  # an axis of 1 is valid, of True or 1.0 not
def _prepared(
    op: str, variant: Any, eps: Any, partial: Any, axis: Any, feature_axis: Any, out_dtype: Any, x: Any, *others: Any
) -> Prepared:
    scale, bias, mask, residual, gate, dy, dh = (None if pair is None else _spec(*pair) for pair in others)
    call = resolve(
        op, _spec(*x), scale, bias, mask=mask, residual=residual, gate=gate, out_dtype=out_dtype,
        variant=derive(op, variant, eps, partial), axis=axis, feature_axis=feature_axis,
        **({"dy": dy, "dh": dh} if op == "rms_norm_vjp" else {}),
    )  # fmt: skip
    rows = call.in_rows
    is_written_out = rows.feature_axes != call.feature_axes
    scale_format, bias_format = (
        None if p is None else dtypes.arithmetic(p.dtype) if is_written_out else p.dtype for p in (scale, bias)
    )
    kernel_call = rows if dy is None else replace(rows, result_dtype=dy.dtype)
    return Prepared(call, kernel_call, (scale_format, bias_format), {})


def _spec(shape: Any, dtype: Any) -> Spec:
    """Of a dtype whose bytes are swapped, the name of the numbers."""
    return Spec(tuple(shape), getattr(dtype, "name", None) or dtypes.spelled(dtype))
