"""The compiled kernels as primitives of JAX. A primitive becomes plain operations where no kernel can compute it.

What JAX derives from a primitive it derives from the operations, with two exceptions: the transpose of the tangent is a
kernel, too, and a vmap that maps no parameter is a call with more rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial as bind
from math import prod
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import ffi
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero

from rmsnorm.flax_impl import gate as plain
from rmsnorm.flax_impl import gpu, private
from rmsnorm.flax_impl.engines import Context, Engine, context_of, engine_of
from rmsnorm.flax_impl.gate import Pair
from rmsnorm.flax_impl.operations import Across, elementwise, gain, may_leave_range, statistic
from rmsnorm.flax_impl.private import Primitive, ad, batching, mlir
from rmsnorm.flax_impl.rounding import convert, double, excess, exponent_of, times_two_to, with_x64, zero_outside
from rmsnorm.specification.absent import filled, without_none
from rmsnorm.specification.call import Call

Present: TypeAlias = tuple[bool | None, ...]  # for each operand, of x's shape, mask or parameter; None if it is None
Wanted: TypeAlias = tuple[str | None, ...]  # dtypes of dx, dscale, dbias and dgate; None for what is not computed


@bind(jax.custom_jvp, nondiff_argnums=(0, 1))
@with_x64
def _normalise(call: Call, across: Across | None, h: Any, scale: Any, bias: Any, mask: Any, gate: Any) -> Pair:
    """y and 1 / rho in float64, of a checked call."""
    context = context_of((h, scale, bias, mask, gate), is_spread=across is not None)
    if engine_of(call, context)[0] is Engine.OPERATIONS:
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
    if engine_of(call, context_of(operands, is_spread=across is not None))[0] is Engine.OPERATIONS:
        return (y, inverse_rms), _tangent_in_operations(call, across, *operands)
    dy, dinverse_rms = _run(_tangent_p.bind, *operands, call=call)
    return (y, inverse_rms), (dy, dinverse_rms)


@bind(jax.jit, static_argnums=(0, 1))
@with_x64
def gradients(
    call: Call, terms: tuple[str, ...], dy: Any, h: Any, scale: Any, bias: Any, mask: Any, gate: Any, dh: Any
) -> Any:
    """dx + dh in each dtype of ``terms``, dscale, dbias and dgate, without a forward pass before."""
    wanted = call.x, _name(scale), _name(bias), _name(gate)
    operands = dy, h, None, dh, gate, _with_all_axes(call, mask), scale, _bias_for(call, bias, gate)
    is_mixed = {*terms, _name(dh) or call.x} != {call.x}
    if engine_of(call, context_of(operands, is_mixed=is_mixed))[0] is Engine.KERNELS:
        dx, *others = filled(_run(_gradients_p.bind, *operands, call=call, wanted=wanted), wanted)
        return [dx for _ in terms], *others
    dx, *others = _by_formula(call, dy, h, dh, gate, mask, scale, bias, wanted)
    others = [None if name is None else convert(d, name) for d, name in zip(others, wanted[1:], strict=True)]
    return [convert(dx, name) for name in terms], *others


def _bias_for(call: Call, bias: Any, dgate: Any) -> Any:
    """The bias, if the gradient or tangent of a gate needs it."""
    return None if dgate is None or call.is_gated_before else bias


def _tangent_in_operations(
    call: Call, across: Across | None, h: Any, inverse_rms: Any, dh: Any, gate: Any, dgate: Any, mask: Any, scale: Any,
    bias: Any, dscale: Any, dbias: Any, *, as_y: bool = False,
) -> Pair:  # fmt: skip
    arrays = h, scale, bias, mask, gate, inverse_rms, dh, dscale, dbias, dgate
    return plain.tangent(call, normalise, *arrays, across, as_y=as_y)


def _with_all_axes(call: Call, mask: Any) -> Any:
    """The mask with as many axes as x."""
    return mask if mask is None else mask.reshape((1,) * (len(call.shape) - mask.ndim) + mask.shape)


def _run(function: Callable[..., Any], *operands: Any, **params: Any) -> Any:
    """The function, of the operands that are not None; ``present`` tells it which these are."""
    present = tuple(None if x is None else True for x in operands)
    return function(*without_none(operands), present=present, **params)


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
    mask, steps = _mask_in_steps(call, mask, call.first_of_row)
    attribute = xla.forward(call, _name(scale), _name(bias), _name(gate), steps)
    return _call_kernel(attribute, _forward_types(call=call), h, scale, bias, mask, gate)


def _forward_on_gpu(*operands: Any, call: Call, present: Present) -> Any:
    h, _, mask, scale, bias = filled(operands, present)
    return gpu.forward(call, h, scale, bias, *_mask_in_steps(call, mask, min(call.axes)))


@with_x64
def _tangent(*operands: Any, call: Call, present: Present) -> Any:
    return _tangent_in_operations(call, None, *filled(operands, present))


def _transpose(cotangents: Sequence[Any], *operands: Any, call: Call, present: Present) -> Any:
    h, inverse_rms, dh, gate, dgate, mask, scale, bias, dscale, dbias = filled(operands, present)
    wanted = tuple(None if t is None else t.aval.dtype.name for t in (dh, dscale, dbias, dgate))
    dy, dinverse_rms = cotangents
    if type(dinverse_rms) is not ad.Zero:  # in a second derivative
        both = map(ad.instantiate_zeros, cotangents)
        results = _transposed(call, wanted, h, inverse_rms, gate, mask, scale, bias, *both)
    else:
        arrays = ad.instantiate_zeros(dy), h, inverse_rms, None, gate, mask, scale, bias
        results = _run(_gradients_p.bind, *arrays, call=call, wanted=wanted)
    dx, dscale, dbias, dgate = filled(results, wanted)
    transposed = zip((None, None, dx, None, dgate, None, None, None, dscale, dbias), present, strict=True)
    return [result for result, is_present in transposed if is_present]


@with_x64
def _transposed(
    call: Call, wanted: Wanted, h: Any, inverse_rms: Any, gate: Any, mask: Any, scale: Any, bias: Any, *cotangents: Any,
    as_y: bool = False,
) -> Any:  # fmt: skip
    """Those of dx, dscale, dbias and dgate whose dtype is given in ``wanted``, in that dtype."""

    def push_forward(*tangents: Any) -> Any:
        dh, dscale, dbias, dgate = filled(tangents, wanted)
        operands = h, inverse_rms, dh, gate, dgate, mask, scale, bias, dscale, dbias
        return _tangent_in_operations(call, None, *operands, as_y=as_y)[: len(cotangents)]

    return jax.linear_transpose(push_forward, *_gradient_types(None, private.typeof(h), call=call, wanted=wanted))(
        cotangents
    )


@with_x64
def _gradients(*operands: Any, call: Call, present: Present, wanted: Wanted) -> Any:
    """The same by the formula, if there is no 1 / rho; or else by the transpose, as of an automatic differentiation."""
    dy, h, inverse_rms, dh, gate, mask, scale, bias = filled(operands, present)
    if inverse_rms is not None:
        return _transposed(call, wanted, h, inverse_rms, gate, mask, scale, bias, dy)
    results = zip(_by_formula(call, dy, h, dh, gate, mask, scale, bias, wanted), wanted, strict=True)
    return [convert(result, name) for result, name in results if name is not None]


def _by_formula(
    call: Call, dy: Any, h: Any, dh: Any, gate: Any, mask: Any, scale: Any, bias: Any, wanted: Wanted
) -> list[Any]:
    """dx + dh, dscale, dbias and dgate before they are rounded, without a 1 / rho before; None as in ``wanted``."""
    wide, (_, inverse_rms) = elementwise(call), plain.forward(call, h, scale, bias, mask, gate)
    types = tuple(name and dtype for name, dtype in zip(wanted, (wide, "float64", "float64", wide), strict=True))
    is_wide = may_leave_range(call)
    dy = double(dy) if is_wide else dy

    def transposed(dy: Any) -> list[Any]:
        of_dy = replace(call, result=dy.dtype.name)
        return filled(_transposed(of_dy, types, h, inverse_rms, gate, mask, scale, bias, dy, as_y=True), wanted)

    dx, dscale, dbias, dgate = transposed(dy)
    if is_wide:  # dy times the gain may leave the range where dx does not
        largest = exponent_of(jnp.max(abs(zero_outside(mask, dy)), axis=call.axes, keepdims=True))
        power = excess(largest if scale is None else largest + exponent_of(jnp.max(abs(gain(call, scale)))), 900)
        dx, _, _, dgate = transposed(times_two_to(-power, dy))
        dx, dgate = (None if t is None else times_two_to(power, t) for t in (dx, dgate))
    return [dx if dh is None else dx + convert(dh, wide), dscale, dbias, dgate]


def _gradient_types(_: Any = None, h: Any = None, *__: Any, call: Call, present: Present = (), wanted: Wanted) -> Any:
    features = tuple(call.shape[axis] for axis in call.feature_axes)
    shapes = (call.shape, features, features, call.shape)
    return _types(h, *((shape, name) for shape, name in zip(shapes, wanted, strict=True) if name is not None))


def _gradients_kernel(*operands: Any, call: Call, present: Present, wanted: Wanted) -> Any:
    from rmsnorm.cpu import xla

    dy, h, inverse_rms, dh, gate, mask, scale, bias = filled(operands, present)
    mask, steps = _mask_in_steps(call, mask, call.first_of_row)
    attribute = xla.backward(
        replace(call, result=dy.dtype.name), _name(scale), _name(bias) or wanted[2], _name(gate), steps,
        tuple(name is not None for name in wanted), has_inverse_rms=inverse_rms is not None, has_bias=bias is not None,
        has_dh=dh is not None,
    )  # fmt: skip
    types = _gradient_types(call=call, wanted=wanted)
    return _call_kernel(attribute, types, dy, h, inverse_rms, scale, bias, mask, dh, gate)


@with_x64
def _gradients_on_gpu(*operands: Any, call: Call, present: Present, wanted: Wanted) -> Any:
    dy, h, inverse_rms, dh, _, mask, scale, _ = filled(operands, present)
    if inverse_rms is None:
        inverse_rms = statistic(call, h, mask).inverse_rms
    return gpu.backward(call, wanted, dy, h, inverse_rms, dh, scale, *_mask_in_steps(call, mask, min(call.axes)))


def _types(h: Any, *results: tuple[tuple[int, ...], str]) -> Any:
    return [private.type_like(h, shape, jnp.dtype(name)) for shape, name in results]


def _name(x: Any) -> str | None:
    return None if x is None else x.dtype.name


def _mask_in_steps(call: Call, mask: Any, first: int) -> tuple[Any, tuple[int, int] | None]:
    """The mask of rows, or of elements if it differs within a row; its steps to the next row and element.

    ``first``: the axis with which a row begins.
    """
    if mask is None:
        return None, None
    if prod(mask.shape[first:]) == 1:
        return jnp.broadcast_to(mask, (*call.shape[:first], *mask.shape[first:])), (1, 0)
    return jnp.broadcast_to(mask, call.shape), (prod(call.shape[first:]), 1)


@with_x64
def _call_kernel(attribute: np.ndarray, types: Any, *operands: Any) -> Any:
    return ffi.ffi_call("rmsnorm", types)(*without_none(operands), attribute=attribute)


def _primitive(
    name: str, plain: Callable[..., Any], types: Callable[..., Any], kernels: dict[str, Callable[..., Any]],
    like_x: int, tangents: tuple[int, ...] = (),
) -> Primitive:  # fmt: skip
    """A primitive that computes ``plain``, on a platform of ``kernels`` in a kernel.

    Its operands are as many as ``like_x`` of x's shape, those at ``tangents`` to be transposed, then a mask, then
    parameters; only those that are not None.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(plain)
    primitive.def_abstract_eval(types)
    mlir.register_lowering(primitive, mlir.lower_fun(plain, multiple_results=True))
    for platform, kernel in kernels.items():
        mlir.register_lowering(primitive, bind(_lower, plain, kernel, platform), platform=platform)
    ad.primitive_jvps[primitive] = bind(_differentiate, plain)
    batching.primitive_batchers[primitive] = bind(_batch, primitive, plain, like_x, tangents)
    private.check_for_nan(primitive)
    return primitive


@with_x64  # the lowering itself traces float64, too
def _lower(
    plain: Callable[..., Any], kernel: Callable[..., Any], platform: str, context: Any, *operands: Any, **params: Any
) -> Any:
    """The program of a primitive for a platform: a kernel, or else operations, which XLA divides among devices."""
    where = Context(
        platform=platform if private.is_for_one_device(context.module_context) else "",
        formats=_formats(context.avals_in, **params),
    )
    if engine_of(params["call"], where)[0] is Engine.OPERATIONS:
        return mlir.lower_fun(plain, multiple_results=True)(context, *operands, **params)
    plain_types = [jax.core.ShapedArray(x.shape, x.dtype) for x in context.avals_in]
    return mlir.lower_fun(kernel, multiple_results=True)(context.replace(avals_in=plain_types), *operands, **params)


def _formats(types: Sequence[Any], *, call: Call, present: Present, wanted: Wanted = ()) -> tuple[str | None, ...]:
    """The dtypes of the operands but mask and 1 / rho, and those of the gradients."""
    operands = filled(types, present)
    if wanted:
        del operands[2]
    return *(_name(x) for x in operands if x is not None and x.dtype != bool), *wanted


def _differentiate(plain: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    return jax.jvp(bind(plain, **params), tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


def _batch(
    primitive: Primitive, plain: Callable[..., Any], like_x: int, tangents: tuple[int, ...], operands: Sequence[Any],
    axes: Sequence[int | None], **params: Any,
) -> tuple[Any, list[int]]:  # fmt: skip
    """A call with more rows; or operations, if each part has parameters or sums of its own, or a sum is over parts."""
    call, indices = params["call"], [i for i, is_present in enumerate(params["present"]) if is_present]
    entries = [*zip(indices, operands, axes, strict=True)]
    has_own = any(params.get("wanted", ())[1:3]) or any(i > like_x and axis is not None for i, _, axis in entries)
    if has_own or any(i in tangents and axis is None for i, _, axis in entries):
        results = jax.vmap(bind(plain, **params), tuple(axes))(*operands)
    else:
        size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
        rows = [
            x if i > like_x
            else jnp.broadcast_to(x, (size if i < like_x else 1, *x.shape)) if axis is None
            else jnp.moveaxis(x, axis, 0)
            for i, x, axis in entries
        ]  # fmt: skip
        results = primitive.bind(*rows, **{**params, "call": _with_axis(call, size)})
    return results, [0] * len(results)


def _with_axis(call: Call, size: int) -> Call:
    """The same call on so many arrays at once, along a new first axis."""
    axes, features = (tuple(axis + 1 for axis in numbers) for numbers in (call.axes, call.feature_axes))
    return replace(call, shape=(size, *call.shape), axes=axes, feature_axes=features)


_forward_p = _primitive("rms_norm", _forward, _forward_types, {"cpu": _forward_kernel, "cuda": _forward_on_gpu}, 2)
_tangent_p = _primitive("rms_norm_tangent", _tangent, _forward_types, {}, 5, (2, 4))
_gradients_p = _primitive(
    "rms_norm_gradients", _gradients, _gradient_types, {"cpu": _gradients_kernel, "cuda": _gradients_on_gpu}, 5
)
ad.primitive_transposes[_tangent_p] = _transpose
