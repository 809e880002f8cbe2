"""The compiled kernels as primitives of JAX. A primitive becomes plain operations where no kernel can compute it.

Kernels are for one CPU. For GPUs, TPUs and several devices, for jax.export and without kernels, XLA compiles
arithmetic.py. What JAX derives from a primitive it derives from the plain operations, with two exceptions: the
transpose of the tangent is a kernel, too, and a vmap that maps no parameter is a call with more rows.
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
from jax import ffi
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero

from rmsnorm import cpu
from rmsnorm.call import Call, filled, given
from rmsnorm.flax_impl import private
from rmsnorm.flax_impl import gate as plain
from rmsnorm.flax_impl.arithmetic import Across
from rmsnorm.flax_impl.gate import Pair
from rmsnorm.flax_impl.private import Primitive, ad, batching, mlir
from rmsnorm.flax_impl.rounding import convert, with_x64

Present: TypeAlias = tuple[
    bool | None, ...
]  # None for an operand that is None: those of x's shape, the mask, parameters
Wanted: TypeAlias = tuple[str | None, ...]  # dtypes of dx, dscale, dbias and dgate; None for what is not computed
Gradients: TypeAlias = tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]


@bind(jax.custom_jvp, nondiff_argnums=(0, 1))
@with_x64
def _normalise(call: Call, across: Across | None, h: Any, scale: Any, bias: Any, mask: Any, gate: Any) -> Pair:
    """y and 1 / rho in float64, of a checked call."""
    if across is not None or not _is_in_rows(call, h, scale, bias, mask, gate):
        return plain.forward(call, h, scale, bias, mask, gate, across)
    y, inverse_rms = _run(_forward_p.bind, h, gate, _with_all_axes(call, mask), scale, bias, call=call)
    return y, inverse_rms


normalise = jax.jit(_normalise, static_argnums=(0, 1))


@bind(_normalise.defjvp, symbolic_zeros=True)
@with_x64
def _differentiate_norm(
    call: Call, across: Across | None, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Pair, Pair]:
    h, scale, bias, mask, gate = primals
    dh, dscale, dbias, _, dgate = (None if type(tangent) is SymbolicZero else tangent for tangent in tangents)
    y, inverse_rms = normalise(call, across, h, scale, bias, mask, gate)
    # A second derivative finds 1 / rho to be an output of normalise, and goes through it.
    bias = _bias_for(call, bias, dgate)
    operands = h, inverse_rms, dh, gate, dgate, _with_all_axes(call, mask), scale, bias, dscale, dbias
    if across is not None or not _is_in_rows(call, *operands):
        return (y, inverse_rms), _tangent_in_operations(call, across, *operands)
    dy, dinverse_rms = _run(_tangent_p.bind, *operands, call=call)
    return (y, inverse_rms), (dy, dinverse_rms)


def gradients(call: Call, dy: Any, h: Any, scale: Any, bias: Any, mask: Any, gate: Any, dh: Any) -> Gradients:
    """dx + dh, dscale, dbias and dgate in the dtypes of h, scale, bias and gate, without a forward pass before."""
    wanted = call.x, _name(scale), _name(bias), _name(gate)
    operands = dy, h, dh, gate, _with_all_axes(call, mask), scale, _bias_for(call, bias, gate)
    function = _gradients_p.bind if _is_in_rows(call, *operands) else _gradients_in_operations
    dx, dscale, dbias, dgate = filled(_run(function, *operands, call=call, wanted=wanted), wanted)
    return dx, dscale, dbias, dgate


def _bias_for(call: Call, bias: Any, dgate: Any) -> Any:
    """The bias, if the gradient or tangent of a gate needs it."""
    return None if dgate is None or call.is_gated_before else bias


def _tangent_in_operations(
    call: Call, across: Across | None, h: Any, inverse_rms: Any, dh: Any, gate: Any, dgate: Any, mask: Any, scale: Any,
    bias: Any, dscale: Any, dbias: Any,
) -> Pair:  # fmt: skip
    arrays = h, scale, bias, mask, gate, inverse_rms, dh, dscale, dbias, dgate
    return plain.tangent(call, normalise, *arrays, across)


def _is_in_rows(call: Call, *arrays: Any) -> bool:
    """Whether all sizes are known, kernels can take the call, and no type says that devices have parts of an array."""
    known = all(isinstance(size, int) for size in call.shape)
    return known and cpu.refusal(call) is None and not any(map(private.is_divided, given(arrays)))


def _with_all_axes(call: Call, mask: Any) -> Any:
    """The mask with as many axes as x."""
    return mask if mask is None else mask.reshape((1,) * (len(call.shape) - mask.ndim) + mask.shape)


def _run(function: Callable[..., Any], *operands: Any, **params: Any) -> Any:
    """The function, of the operands that are not None; ``present`` tells it which these are."""
    present = tuple(None if x is None else True for x in operands)
    return function(*given(operands), present=present, **params)


@with_x64
def _forward(*operands: Any, call: Call, present: Present) -> Any:
    h, gate, mask, scale, bias = filled(operands, present)
    return plain.forward(call, h, scale, bias, mask, gate)


def _forward_types(h: Any = None, *_: Any, call: Call, present: Present = ()) -> Any:
    reduced = tuple(1 if axis in call.axes else size for axis, size in enumerate(call.shape))
    return _types(h, (call.shape, call.result), (reduced, "float64"))


def _forward_kernel(*operands: Any, call: Call, present: Present) -> Any:
    from rmsnorm.cpu import xla

    h, gate, mask, scale, bias = filled(operands, present)
    mask, steps = _mask_in_steps(call, mask)
    attribute = xla.forward(call, _name(scale), _name(bias), _name(gate), steps)
    return _call_kernel(attribute, _forward_types(call=call), h, scale, bias, mask, gate)


@with_x64
def _tangent(*operands: Any, call: Call, present: Present) -> Any:
    return _tangent_in_operations(call, None, *filled(operands, present))


def _transpose(cotangents: Sequence[Any], *operands: Any, call: Call, present: Present) -> Any:
    h, inverse_rms, dh, gate, dgate, mask, scale, bias, dscale, dbias = filled(operands, present)
    wanted = tuple(None if t is None else t.aval.dtype.name for t in (dh, dscale, dbias, dgate))
    dy, dinverse_rms = cotangents
    if type(dinverse_rms) is not ad.Zero:  # in a second derivative
        rest = h, inverse_rms, gate, mask, scale, bias
        results = _transposed(call, wanted, *rest, *map(ad.instantiate_zeros, cotangents))
    else:
        operands = ad.instantiate_zeros(dy), h, inverse_rms, gate, mask, scale, bias
        results = _run(_pull_back_p.bind, *operands, call=call, wanted=wanted)
    dx, dscale, dbias, dgate = filled(results, wanted)
    transposed = zip((None, None, dx, None, dgate, None, None, None, dscale, dbias), present, strict=True)
    return [result for result, is_present in transposed if is_present]


def _pull_back(*operands: Any, call: Call, present: Present, wanted: Wanted) -> Any:
    dy, *rest = filled(operands, present)
    return _transposed(call, wanted, *rest, dy)


@with_x64
def _transposed(
    call: Call, wanted: Wanted, h: Any, inverse_rms: Any, gate: Any, mask: Any, scale: Any, bias: Any, *cotangents: Any
) -> Any:
    """Those of dx, dscale, dbias and dgate whose dtype is given in ``wanted``, in that dtype."""

    def push_forward(*tangents: Any) -> Any:
        dh, dscale, dbias, dgate = filled(tangents, wanted)
        operands = h, inverse_rms, dh, gate, dgate, mask, scale, bias, dscale, dbias
        return _tangent_in_operations(call, None, *operands)[: len(cotangents)]

    return jax.linear_transpose(push_forward, *_gradients(call, wanted, private.typeof(h)))(cotangents)


def _pull_back_types(_: Any, h: Any, *__: Any, call: Call, present: Present, wanted: Wanted) -> Any:
    return _gradients(call, wanted, h)


def _pull_back_kernel(*operands: Any, call: Call, present: Present, wanted: Wanted) -> Any:
    from rmsnorm.cpu import xla

    dy, h, inverse_rms, gate, mask, scale, bias = filled(operands, present)
    mask, steps = _mask_in_steps(call, mask)
    names = _name(scale), _name(bias) or wanted[2], _name(gate)
    has_bias, are_wanted = bias is not None, _are_wanted(wanted)
    attribute = xla.backward(call, *names, steps, are_wanted, has_inverse_rms=True, has_bias=has_bias)
    return _call_kernel(attribute, _gradients(call, wanted), dy, h, inverse_rms, scale, bias, mask, gate)


@with_x64
def _gradients_in_operations(*operands: Any, call: Call, present: Present, wanted: Wanted) -> Any:
    dy, h, dh, gate, mask, scale, bias = filled(operands, present)
    results = zip(plain.backward(call, normalise, dy, h, scale, bias, mask, gate, dh), wanted, strict=True)
    return [convert(result, name) for result, name in results if name is not None]


def _gradients_kernel(*operands: Any, call: Call, present: Present, wanted: Wanted) -> Any:
    from rmsnorm.cpu import xla

    dy, h, dh, gate, mask, scale, bias = filled(operands, present)
    mask, steps = _mask_in_steps(call, mask)
    own, names = replace(call, result=dy.dtype.name), (_name(scale), wanted[2], _name(gate))
    has_bias, has_dh, are_wanted = bias is not None, dh is not None, _are_wanted(wanted)
    attribute = xla.backward(own, *names, steps, are_wanted, has_bias=has_bias, has_dh=has_dh)
    return _call_kernel(attribute, _gradients(call, wanted), dy, h, scale, bias, mask, dh, gate)


def _gradients(call: Call, wanted: Wanted, h: Any = None) -> Any:
    features = tuple(call.shape[axis] for axis in call.feature_axes)
    shapes = (call.shape, features, features, call.shape)
    return _types(h, *((shape, name) for shape, name in zip(shapes, wanted, strict=True) if name is not None))


def _types(h: Any, *results: tuple[tuple[int, ...], str]) -> Any:
    return [private.type_like(h, shape, jnp.dtype(name)) for shape, name in results]


def _are_wanted(wanted: Wanted) -> tuple[bool, ...]:
    return tuple(name is not None for name in wanted)


def _name(x: Any) -> str | None:
    return None if x is None else x.dtype.name


def _mask_in_steps(call: Call, mask: Any) -> tuple[Any, tuple[int, int] | None]:
    """The mask of rows, or of elements if it differs within a row; its steps to the next row and element."""
    if mask is None:
        return None, None
    first = call.first_of_row
    if prod(mask.shape[first:]) == 1:
        return jnp.broadcast_to(mask, (*call.shape[:first], *mask.shape[first:])), (1, 0)
    return jnp.broadcast_to(mask, call.shape), (prod(call.shape[first:]), 1)


@with_x64
def _call_kernel(attribute: np.ndarray, types: Any, *operands: Any) -> Any:
    return ffi.ffi_call("rmsnorm", types)(*given(operands), attribute=attribute)


@lru_cache(maxsize=1)
def _is_registered() -> bool:
    """Whether XLA accepts the handler. A warning says so if it does not, as with another version of the interface."""
    from rmsnorm.cpu import xla

    try:
        ffi.register_ffi_target("rmsnorm", xla.handler(), platform="cpu")
    except jax.errors.JaxRuntimeError as error:
        warnings.warn(
            f"rmsnorm: this jaxlib does not accept the CPU kernels; XLA compiles slower code instead ({error}); "
            "install another version of jaxlib, or set RMSNORM_CPU_KERNELS=0 to hide this warning",
            stacklevel=2,
        )
        return False
    return True


def _primitive(
    name: str, plain: Callable[..., Any], types: Callable[..., Any], kernel: Callable[..., Any] | None, like_x: int
) -> Primitive:
    """A primitive that computes ``plain``, on CPUs in a kernel if there is one.

    Its operands are as many as ``like_x`` of x's shape, then a mask, then parameters; only those that are not None.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(plain)
    primitive.def_abstract_eval(types)
    mlir.register_lowering(primitive, mlir.lower_fun(plain, multiple_results=True))
    if kernel is not None:
        mlir.register_lowering(primitive, bind(_lower, plain, kernel), platform="cpu")
    ad.primitive_jvps[primitive] = bind(_differentiate, plain)
    batching.primitive_batchers[primitive] = bind(_batch, primitive, plain, like_x)
    return primitive


def _lower(plain: Callable[..., Any], kernel: Callable[..., Any], context: Any, *operands: Any, **params: Any) -> Any:
    """The program of a primitive for CPUs: a kernel, or else plain operations, which XLA divides among devices."""
    one = private.is_for_one_device(context.module_context)
    if one and cpu.is_available() and _is_registered():
        return _lower_kernel(kernel, context, *operands, **params)
    return mlir.lower_fun(plain, multiple_results=True)(context, *operands, **params)


@with_x64  # the lowering itself traces float64, too
def _lower_kernel(kernel: Callable[..., Any], context: Any, *operands: Any, **params: Any) -> Any:
    plain_types = [jax.core.ShapedArray(x.shape, x.dtype) for x in context.avals_in]
    return mlir.lower_fun(kernel, multiple_results=True)(context.replace(avals_in=plain_types), *operands, **params)


def _differentiate(plain: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    return jax.jvp(bind(plain, **params), tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


def _batch(
    primitive: Primitive, plain: Callable[..., Any], like_x: int, operands: Sequence[Any],
    axes: Sequence[int | None], **params: Any,
) -> tuple[Any, list[int]]:  # fmt: skip
    """A call with more rows; plain operations if each part has parameters or sums over rows of its own."""
    call, indices = params["call"], [i for i, is_present in enumerate(params["present"]) if is_present]
    of_parts = any(axis is not None for i, axis in zip(indices, axes, strict=True) if i > like_x)
    shared = any(axis is None for i, axis in zip(indices, axes, strict=True) if i < like_x)
    if of_parts or shared or any(params.get("wanted", ())[1:3]):
        results = jax.vmap(bind(plain, **params), tuple(axes))(*operands)
    else:
        rows = [
            x if i > like_x else x[None] if axis is None else jnp.moveaxis(x, axis, 0)
            for i, x, axis in zip(indices, operands, axes, strict=True)
        ]
        results = primitive.bind(*rows, **{**params, "call": _with_axis(call, rows[0].shape[0])})
    return results, [0] * len(results)


def _with_axis(call: Call, size: int) -> Call:
    """The same call on so many arrays at once, along a new first axis."""
    axes, features = (tuple(axis + 1 for axis in numbers) for numbers in (call.axes, call.feature_axes))
    return replace(call, shape=(size, *call.shape), axes=axes, feature_axes=features)


_forward_p = _primitive("rms_norm", _forward, _forward_types, _forward_kernel, 2)
_tangent_p = _primitive("rms_norm_tangent", _tangent, _forward_types, None, 5)
_pull_back_p = _primitive("rms_norm_gradients", _pull_back, _pull_back_types, _pull_back_kernel, 4)
_gradients_p = _primitive("rms_norm_vjp", _gradients_in_operations, _pull_back_types, _gradients_kernel, 4)
ad.primitive_transposes[_tangent_p] = _transpose
