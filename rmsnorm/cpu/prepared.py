"""A call that is checked and planned once: everything about it that does not depend on the values. No array library."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from rmsnorm import cpu
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Call, Spec, resolve
from rmsnorm.specification.variants import derive

# The options of a call: variant, eps, partial, axis, feature_axis and out_dtype.
Options: TypeAlias = tuple[Any, Any, Any, Any, Any, Any]


class Prepared(NamedTuple):
    """A call that is checked and planned.

    Attributes:
        call: the checked call.
        order: the axes of x in the order in which kernels take them; None if it is the order of x.
        rows: the call with its axes in that order.
        plan: of ``rows``, the plan of the CPU kernels, a ``cpu.launch.Plan``; None if no kernel can compute it.
        reason: why there is no plan; None if there is one.
        kept: what a framework keeps of it, by the device. No array is in it.
    """

    call: Call
    order: tuple[int, ...] | None
    rows: Call
    plan: Any
    reason: str | None
    kept: dict[Any, Any]

    def in_memory(self) -> Any:
        """The plan, for arrays in the memory of a CPU. If there are no kernels, the one warning says so."""
        if self.plan is None:
            cpu.supports(self.rows)
        return self.plan


def prepare(
    op: str, options: Options, x: Any, scale: Any = None, bias: Any = None, mask: Any = None, residual: Any = None,
    gate: Any = None, dy: Any = None, dh: Any = None,
) -> Prepared:  # fmt: skip
    """The prepared call named ``op`` on arrays of any library, of which only shape and dtype are read.

    A call with the same options, shapes and dtypes is prepared once. With ``dy`` the plan is that of the gradients.

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
        **({} if dy is None else {"dy": dy, "dh": dh}),
    )  # fmt: skip
    order, rows = order_of(call), axes_last(call)
    planned = rows if dy is None else replace(rows, result=dy.dtype)
    is_known = all(isinstance(size, int) for size in call.shape)  # and none is a symbol of a compiler
    reason, plan = cpu.why_not(planned) if is_known else "a size of x is not known before the program runs", None
    if reason is None:
        from rmsnorm.cpu import launch

        plan = launch.plan(planned, *(None if spec is None else spec.dtype for spec in (scale, bias, gate)))
    return Prepared(call, order, rows, plan, reason, {})


def order_of(call: Call) -> tuple[int, ...] | None:
    """The axes of x in the order in which kernels take them; None if it is the order of x.

    First come axes that are shared by all, then those of the parameters, then others that are normalised.
    """
    if call.has_last_axes and call.has_neighbours:
        return None
    others = tuple(axis for axis in call.axes if axis not in call.feature_axes)
    if others and call.variant.partial is not None:  # which counts the elements in the order of x
        return None
    return (*(axis for axis in call.shared_axes if axis not in others), *call.feature_axes, *others)


def axes_last(call: Call) -> Call:
    """The call on x with its axes in that order."""
    order = order_of(call)
    if order is None:
        return call
    axes, feature_axes = (tuple(sorted(map(order.index, part))) for part in (call.axes, call.feature_axes))
    return replace(call, shape=tuple(call.shape[axis] for axis in order), axes=axes, feature_axes=feature_axes)


def back(order: tuple[int, ...]) -> tuple[int, ...]:
    """The order that leads back to that of x."""
    return tuple(map(order.index, range(len(order))))


def _spec(shape: Any, dtype: Any) -> Spec:
    """Of a dtype whose bytes are swapped, the name of the numbers."""
    return Spec(tuple(shape), getattr(dtype, "name", None) or dtypes.spelled(dtype))
