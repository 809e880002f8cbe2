"""From the arguments of a function to the call that they ask for, and to the plan of its kernels."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rmsnorm import errors
from rmsnorm.call import Call, Spec, resolve
from rmsnorm.torch_impl import rows
from rmsnorm.torch_impl.memory import axes_last, check_storage, is_plain, is_plain_on_gpu
from rmsnorm.torch_impl.private import CPU, untraced
from rmsnorm.torch_impl.rounding import NAMES, dtype_name
from rmsnorm.variants import derive


def spec(op: str, name: str, x: Any) -> Spec | None:
    if x is None:
        return None
    if not isinstance(x, Tensor):
        raise errors.wrong_type(op, name, x, "a torch.Tensor", "convert it with torch.as_tensor")
    return Spec(x.shape, dtype_name(x.dtype))


def resolved(op: str, tensors: dict[str, Any], out_dtype: Any, **options: Any) -> Call:
    """The call of a function with these tensors, which have the names of its arguments."""
    if tensors["x"] is None:
        raise errors.wrong_type(op, "x", None, "a torch.Tensor", "convert it with torch.as_tensor")
    specs = {name: spec(op, name, tensor) for name, tensor in tensors.items()}
    check_storage(op, **tensors)
    return _resolved(op, out_dtype, **specs, **options)


def _resolved(op: str, out_dtype: Any, x: Any, scale: Any, bias: Any, **options: Any) -> Call:
    if isinstance(out_dtype, torch.dtype):
        out_dtype = dtype_name(out_dtype)
    return resolve(op, x, scale, bias, out_dtype=out_dtype, **options)


def call_of(options: Any, x: Any, residual: Any, scale: Any, bias: Any, mask: Any, gate: Any) -> Call:
    """That of rms_norm, whatever the tensors are."""
    tensors = {"x": x, "scale": scale, "bias": bias, "mask": mask, "residual": residual, "gate": gate}
    return resolved("rms_norm", tensors, **named("rms_norm", *options))


def named(
    op: str, variant: Any, eps: Any, partial: Any, axis: Any, feature_axis: Any, out_dtype: Any
) -> dict[str, Any]:
    chosen = derive(op, variant, eps, partial)
    return {"variant": chosen, "axis": axis, "feature_axis": feature_axis, "out_dtype": out_dtype}


def planned(options: Any, x: Any, residual: Any, scale: Any, bias: Any, mask: Any, gate: Any) -> tuple[Call, Call, Any]:
    """The call, it with the axes in the order of the kernels, and their plan; without kernels the call twice, None."""
    try:
        call, own, plan = _planned(
            *options, x.is_cpu is True or x.device, x.shape, x.dtype,  # of a Proxy, is_cpu is a Proxy
            None if residual is None else (residual.shape, residual.dtype),
            None if scale is None else (scale.shape, scale.dtype),
            None if bias is None else (bias.shape, bias.dtype),
            None if mask is None else (mask.shape, mask.dtype),
            None if gate is None else (gate.shape, gate.dtype),
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError):  # not such a tensor, or an option that cannot be looked up
        known = tuple(tuple(option) if isinstance(option, list) else option for option in options)
        if known != options:
            return planned(known, x, residual, scale, bias, mask, gate)
        call = call_of(options, x, residual, scale, bias, mask, gate)
        return call, call, None
    if plan is None or not (is_plain if x.is_cpu else is_plain_on_gpu)(x, residual, scale, bias, mask, gate):
        return call, call, None
    return call, own, plan


@lru_cache(maxsize=4096, typed=True)  # an axis of 1 is valid, of True or 1.0 not
def _planned(
    variant: Any, eps: Any, partial: Any, axis: Any, feature_axis: Any, out_dtype: Any, device: Any, shape: Any,
    dtype: Any, *others: Any,
) -> tuple[Call, Call, Any]:  # fmt: skip
    """The same from shape and dtype of x, and pairs of these for the others. The device is True for the CPU."""
    specs = [None if pair is None else Spec(pair[0], NAMES[pair[1]]) for pair in ((shape, dtype), *others)]
    x, residual, scale, bias, mask, gate = specs
    options = named("rms_norm", variant, eps, partial, axis, feature_axis, out_dtype)
    call = _resolved("rms_norm", x=x, scale=scale, bias=bias, mask=mask, residual=residual, gate=gate, **options)
    where, own = CPU if device is True else device, axes_last(call)
    g, b, z = (None if spec is None else spec.dtype for spec in (scale, bias, gate))
    plan = rows.plan(where, own, g, b, z)
    return call, call if own == call else own, plan


@untraced
def kept(
    settings: Any, axes: Any, x: Tensor, scale: Tensor | None, bias: Tensor | None, gate: Tensor | None = None
) -> rows.Kept | None:
    """The record that a layer keeps of a call with its eps, variant and axes, for the next call."""
    eps, variant = settings
    call, own, plan = planned((variant, eps, None, *axes, None), x, None, scale, bias, None, gate)
    if own is not call:
        return None
    g, b = (None if t is None else (t.shape, t.dtype) for t in (scale, bias))
    return rows.keep(settings, call, plan, x.shape, x.dtype, g, b, None if gate is None else gate.dtype)
