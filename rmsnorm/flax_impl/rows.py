"""Rows in the compiled kernels: primitives of JAX, which are plain operations wherever there are no kernels for them.

Kernels serve programs for one CPU. For other devices and for several, under a mesh, in what jax.export writes, and
without numba XLA compiles arithmetic.py. Whatever JAX derives from a primitive it derives from the plain operations,
with two exceptions: the transpose of the tangent is a kernel, too, and a vmap that maps no parameter is more rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from functools import partial as bind
from math import prod
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from rmsnorm import cpu
from rmsnorm.call import Call
from rmsnorm.flax_impl import arithmetic
from rmsnorm.flax_impl.arithmetic import Across
from rmsnorm.flax_impl.rounding import convert

Given: TypeAlias = tuple[bool, ...]  # which of the operands there are: some of x's shape, the mask, parameters
Pair: TypeAlias = tuple[jax.Array, jax.Array]


def forward(call: Call, a: Any, scale: Any, bias: Any, mask: Any, across: Across | None = None) -> Pair:
    """y and 1 / rho in float64."""
    if across is not None or not _is_in_rows(call, a, scale, bias, mask):
        return arithmetic.forward(call, a, scale, bias, mask, across)
    operands, given = _given(a, _in_full(call, mask), scale, bias)
    y, inverse_rms = _forward_p.bind(*operands, call=call, given=given)
    return y, inverse_rms


def tangent(
    call: Call, a: Any, scale: Any, mask: Any, inverse_rms: Any, da: Any, dscale: Any, dbias: Any,
    across: Across | None = None,
) -> Pair:  # fmt: skip
    """dy and the tangent of 1 / rho."""
    if across is not None or not _is_in_rows(call, a, scale, mask, inverse_rms, da, dscale, dbias):
        return _tangent_in_operations(call, across, a, inverse_rms, da, mask, scale, dscale, dbias)
    operands, given = _given(a, inverse_rms, da, _in_full(call, mask), scale, dscale, dbias)
    dy, dinverse_rms = _tangent_p.bind(*operands, call=call, given=given)
    return dy, dinverse_rms


def gradients(
    call: Call, dy: Any, h: Any, scale: Any, bias: Any, mask: Any, dh: Any
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """dx + dh, dscale and dbias in the dtypes of h, scale and bias, without a forward pass before."""
    wanted = (call.x, _name(scale), _name(bias))
    operands, given = _given(dy, h, dh, _in_full(call, mask), scale)
    run = _gradients_p.bind if _is_in_rows(call, dy, h, scale, mask, dh) else _gradients_in_operations
    dx, dscale, dbias = _spread(run(*operands, call=call, given=given, wanted=wanted), _present(wanted))
    return dx, dscale, dbias


def _tangent_in_operations(
    call: Call, across: Across | None, a: Any, inverse_rms: Any, da: Any, mask: Any, scale: Any, dscale: Any, dbias: Any
) -> Pair:
    wide = arithmetic.derived(call)
    return arithmetic.tangent(call, a, scale, mask, inverse_rms, da, dscale, dbias, across, wide=wide)


def _is_in_rows(call: Call, *arrays: Any) -> bool:
    """Whether sizes are known and no mesh spreads the rows over devices."""
    known = all(isinstance(size, int) for size in call.shape)
    return known and cpu.in_rows(call) and all(x is None or jax.typeof(x).sharding.mesh.empty for x in arrays)


def _in_full(call: Call, mask: Any) -> Any:
    """With as many axes as x."""
    return mask if mask is None else mask.reshape((1,) * (len(call.shape) - mask.ndim) + mask.shape)


def _given(*operands: Any) -> tuple[list[Any], Given]:
    return [x for x in operands if x is not None], tuple(x is not None for x in operands)


def _present(dtypes: Sequence[str | None]) -> Given:
    return tuple(name is not None for name in dtypes)


def _spread(operands: Sequence[Any], given: Given) -> list[Any]:
    """With None again for those that there are not."""
    rest = iter(operands)
    return [next(rest) if there else None for there in given]


def _forward(*operands: Any, call: Call, given: Given) -> Any:
    a, mask, scale, bias = _spread(operands, given)
    with jax.enable_x64(True):
        return arithmetic.forward(call, a, scale, bias, mask)


def _forward_types(*_: Any, call: Call, given: Given) -> Any:
    reduced = tuple(1 if axis in call.axes else size for axis, size in enumerate(call.shape))
    return _types((call.shape, call.result), (reduced, "float64"))


def _forward_kernel(*operands: Any, call: Call, given: Given) -> Any:
    from rmsnorm.cpu import xla

    a, mask, scale, bias = _spread(operands, given)
    mask, steps = _stepped(call, mask)
    how = xla.forward(call, _name(scale), _name(bias), steps)
    return _called(how, _forward_types(call=call, given=given), a, scale, bias, mask)


def _tangent(*operands: Any, call: Call, given: Given) -> Any:
    with jax.enable_x64(True):
        return _tangent_in_operations(call, None, *_spread(operands, given))


def _transpose(cotangents: Sequence[Any], *operands: Any, call: Call, given: Given) -> Any:
    a, inverse_rms, da, mask, scale, dscale, dbias = _spread(operands, given)
    wanted = tuple(None if each is None else each.aval.dtype.name for each in (da, dscale, dbias))
    dy, dinverse_rms = cotangents
    if type(dinverse_rms) is not ad.Zero:  # of a second derivative
        found = _transposed(call, wanted, a, inverse_rms, mask, scale, *map(ad.instantiate_zeros, cotangents))
    else:
        rest, there = _given(ad.instantiate_zeros(dy), a, inverse_rms, mask, scale)
        found = _pull_back_p.bind(*rest, call=call, given=there, wanted=wanted)
    dx, *parameters = _spread(found, _present(wanted))
    return [x for x, there in zip((None, None, dx, None, None, *parameters), given, strict=True) if there]


def _pull_back(*operands: Any, call: Call, given: Given, wanted: tuple[str | None, ...]) -> Any:
    dy, a, inverse_rms, mask, scale = _spread(operands, given)
    return _transposed(call, wanted, a, inverse_rms, mask, scale, dy)


def _transposed(
    call: Call, wanted: tuple[str | None, ...], a: Any, inverse_rms: Any, mask: Any, scale: Any, *cotangents: Any
) -> Any:
    """What is wanted of dx, dscale and dbias, in those dtypes."""

    def push_forward(*tangents: Any) -> Any:
        da, dscale, dbias = _spread(tangents, _present(wanted))
        pair = _tangent_in_operations(call, None, a, inverse_rms, da, mask, scale, dscale, dbias)
        return pair[: len(cotangents)]

    with jax.enable_x64(True):
        return jax.linear_transpose(push_forward, *_gradients(call, wanted))(cotangents)


def _pull_back_types(*_: Any, call: Call, given: Given, wanted: tuple[str | None, ...]) -> Any:
    return _gradients(call, wanted)


def _pull_back_kernel(*operands: Any, call: Call, given: Given, wanted: tuple[str | None, ...]) -> Any:
    from rmsnorm.cpu import xla

    dy, a, inverse_rms, mask, scale = _spread(operands, given)
    mask, steps = _stepped(call, mask)
    how = xla.backward(call, _name(scale), wanted[2], steps, _present(wanted))
    return _called(how, _gradients(call, wanted), dy, a, inverse_rms, scale, mask)


def _gradients_in_operations(*operands: Any, call: Call, given: Given, wanted: tuple[str | None, ...]) -> Any:
    dy, h, dh, mask, scale = _spread(operands, given)
    with jax.enable_x64(True):
        inverse_rms = arithmetic.statistic(call, h, mask).inverse_rms
        dx, dscale, dbias = arithmetic.backward(call, dy, h, scale, mask, inverse_rms)
        dx = dx if dh is None else dx + convert(dh, dx.dtype.name)
        results = zip((dx, dscale, dbias), wanted, strict=True)
        return [convert(result, name) for result, name in results if name is not None]


def _gradients_kernel(*operands: Any, call: Call, given: Given, wanted: tuple[str | None, ...]) -> Any:
    from rmsnorm.cpu import xla

    dy, h, dh, mask, scale = _spread(operands, given)
    inverse_rms = None  # which the kernels compute again, but not for float64
    if call.x == "float64":
        rows, there = _given(h, mask, None, None)
        _, inverse_rms = _forward_kernel(*rows, call=call, given=there)
    mask, steps = _stepped(call, mask)
    own = replace(call, result=dy.dtype.name)
    how = xla.backward(own, _name(scale), wanted[2], steps, _present(wanted), inverse_rms is not None, dh is not None)
    return _called(how, _gradients(call, wanted), dy, h, inverse_rms, scale, mask, dh)


def _gradients(call: Call, wanted: tuple[str | None, ...]) -> Any:
    features = tuple(call.shape[axis] for axis in call.feature_axes)
    shapes = (call.shape, features, features)
    return _types(*((shape, name) for shape, name in zip(shapes, wanted, strict=True) if name is not None))


def _types(*each: tuple[tuple[int, ...], str]) -> Any:
    return [jax.core.ShapedArray(shape, jnp.dtype(name)) for shape, name in each]


def _name(x: Any) -> str | None:
    return None if x is None else x.dtype.name


def _stepped(call: Call, mask: Any) -> tuple[Any, tuple[int, int] | None]:
    """One for every row and, where they differ, for every element; and its steps to the next row and element."""
    if mask is None:
        return None, None
    first = len(call.shape) - len(call.axes)
    if prod(mask.shape[first:]) == 1:
        return jnp.broadcast_to(mask, (*call.shape[:first], *mask.shape[first:])), (1, 0)
    return jnp.broadcast_to(mask, call.shape), (call.n, 1)


def _called(how: np.ndarray, types: Any, *operands: Any) -> Any:
    with jax.enable_x64(True):
        return jax.ffi.ffi_call("rmsnorm", types)(*_given(*operands)[0], how=how)


@lru_cache(maxsize=1)
def _is_registered() -> bool:
    """Whether XLA takes the handler; a warning says so if it is of another time."""
    from rmsnorm.cpu import xla

    try:
        jax.ffi.register_ffi_target("rmsnorm", jax.ffi.pycapsule(xla.handler().ctypes), platform="cpu")
    except jax.errors.JaxRuntimeError as error:
        warnings.warn(f"rmsnorm: this jaxlib does not take the CPU kernels ({error}): XLA does without", stacklevel=2)
        return False
    return True


def _primitive(name: str, plain: Callable[..., Any], types: Callable[..., Any], kernel: Any, like_x: int) -> Primitive:
    """What ``plain`` computes, in a kernel if there is one, of so many operands of x's shape, a mask and parameters."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(plain)
    primitive.def_abstract_eval(types)
    in_operations = mlir.lower_fun(plain, multiple_results=True)
    mlir.register_lowering(primitive, in_operations)
    if kernel is not None:
        in_kernel = mlir.lower_fun(kernel, multiple_results=True)

        def lower(context: Any, *operands: Any, **params: Any) -> Any:
            has_kernel = _is_alone(context.module_context) and cpu.is_available() and _is_registered()
            return (in_kernel if has_kernel else in_operations)(context, *operands, **params)

        mlir.register_lowering(primitive, lower, platform="cpu")

    def differentiate(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        return jax.jvp(bind(plain, **params), tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))

    def batch(operands: Sequence[Any], axes: Sequence[int | None], **params: Any) -> Any:
        call, there = params["call"], [i for i, given in enumerate(params["given"]) if given]
        of_parts = any(axis is not None for i, axis in zip(there, axes, strict=True) if i > like_x)
        shared = any(axis is None for i, axis in zip(there, axes, strict=True) if i < like_x)
        if of_parts or shared or any(params.get("wanted", ())[1:]):  # sums, of which every part has its own
            found = jax.vmap(bind(plain, **params), tuple(axes))(*operands)
        else:
            rows = [
                x if i > like_x else x[None] if axis is None else jnp.moveaxis(x, axis, 0)
                for i, x, axis in zip(there, operands, axes, strict=True)
            ]
            found = primitive.bind(*rows, **{**params, "call": _with_axis(call, rows[0].shape[0])})
        return found, [0] * len(found)

    ad.primitive_jvps[primitive] = differentiate
    batching.primitive_batchers[primitive] = batch
    return primitive


def _with_axis(call: Call, size: int) -> Call:
    """On so many arrays at once, along a new first axis."""
    axes, features = (tuple(axis + 1 for axis in each) for each in (call.axes, call.feature_axes))
    return replace(call, shape=(size, *call.shape), axes=axes, feature_axes=features)


def _is_alone(module: Any) -> bool:
    """Whether what is lowered is for this process and one device."""
    devices = module.axis_context
    one = isinstance(devices, mlir.ShardingContext) and devices.num_devices == 1
    return one and not module.lowering_parameters.for_export


_forward_p = _primitive("rms_norm", _forward, _forward_types, _forward_kernel, 1)
_tangent_p = _primitive("rms_norm_tangent", _tangent, _forward_types, None, 3)
_pull_back_p = _primitive("rms_norm_gradients", _pull_back, _pull_back_types, _pull_back_kernel, 3)
_gradients_p = _primitive("rms_norm_vjp", _gradients_in_operations, _pull_back_types, _gradients_kernel, 3)
ad.primitive_transposes[_tangent_p] = _transpose
