"""The compiled kernels as primitives of JAX. A primitive becomes plain operations where no kernel can compute it.

What JAX derives from a primitive it derives from the operations, with two exceptions: the transpose of the tangent is a
kernel, too, and a vmap that maps no parameter is a call with more rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial as bind
from typing import Any, Final, TypeAlias

import jax
import numpy as np
from jax import ffi
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero

from rmsnorm.cpu.rows import mask_steps, with_all_axes
from rmsnorm.flax_impl import gate as plain
from rmsnorm.flax_impl import private
from rmsnorm.flax_impl.engines import Context, Engine, context_of, engine_of
from rmsnorm.flax_impl.gate import Operands, Pair
from rmsnorm.flax_impl.operations import Across, elementwise, gain, may_leave_range
from rmsnorm.flax_impl.private import Primitive, ad, batching, mlir
from rmsnorm.flax_impl.rounding import convert, double, excess, exponent_of, times_two_to, with_x64, zero_outside
from rmsnorm.specification.absent import filled, without_none
from rmsnorm.specification.call import Call

Present: TypeAlias = tuple[bool | None, ...]  # True for each of the ``Operands`` that there is, else None
Wanted: TypeAlias = tuple[str | None, ...]  # dtypes of dx, dscale, dbias and dgate; None for what is not computed

_PARAMETERS: Final = {"scale", "bias", "dscale", "dbias"}


@bind(jax.custom_jvp, nondiff_argnums=(0, 1))
@with_x64
def _normalise(call: Call, across: Across | None, h: Any, scale: Any, bias: Any, mask: Any, gate: Any) -> Pair:
    """y and 1 / rho in float64, of a checked call."""
    context = context_of((h, scale, bias, mask, gate), is_spread=across is not None)
    if engine_of(call, context)[0] is Engine.OPERATIONS:
        return plain.forward(call, h, scale, bias, mask, gate, across)
    operands = Operands(h=h, gate=gate, mask=_with_all_axes(call, mask), scale=scale, bias=bias)
    y, inverse_rms = _run(_forward_p.bind, operands, call=call)
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
    # This 1 / rho is a result of ``normalise``, so that a second derivative goes through it, too.
    operands = Operands(
        h=h, inverse_rms=inverse_rms, dh=dh, gate=gate, dgate=dgate, mask=_with_all_axes(call, mask), scale=scale,
        bias=_bias_for(call, bias, dgate), dscale=dscale, dbias=dbias,
    )  # fmt: skip
    if engine_of(call, context_of(operands, is_spread=across is not None))[0] is Engine.OPERATIONS:
        return (y, inverse_rms), plain.tangent(call, normalise, operands, across)
    dy, dinverse_rms = _run(_tangent_p.bind, operands, call=call)
    return (y, inverse_rms), (dy, dinverse_rms)


@bind(jax.jit, static_argnums=(0, 1))
@with_x64
def gradients(
    call: Call, terms: tuple[str, ...], dy: Any, h: Any, scale: Any, bias: Any, mask: Any, gate: Any, dh: Any
) -> Any:
    """dx + dh in each dtype of ``terms``, dscale, dbias and dgate, without a forward pass before."""
    wanted = call.x, _name(scale), _name(bias), _name(gate)
    operands = Operands(
        dy=dy, h=h, dh=dh, gate=gate, mask=_with_all_axes(call, mask), scale=scale, bias=_bias_for(call, bias, gate)
    )
    is_mixed = {*terms, _name(dh) or call.x} != {call.x}
    if engine_of(call, context_of(operands, is_mixed=is_mixed))[0] is Engine.KERNELS:
        dx, *others = filled(_run(_gradients_p.bind, operands, call=call, wanted=wanted), wanted)
        return [dx for _ in terms], *others
    dx, *others = _by_formula(call, operands, wanted)
    others = [None if name is None else convert(d, name) for d, name in zip(others, wanted[1:], strict=True)]
    return [convert(dx, name) for name in terms], *others


def _bias_for(call: Call, bias: Any, dgate: Any) -> Any:
    """The bias, if the gradient or tangent of a gate needs it."""
    return None if dgate is None or call.is_gated_before else bias


def _with_all_axes(call: Call, mask: Any) -> Any:
    """The mask with as many axes as x."""
    return mask if mask is None else mask.reshape(with_all_axes(mask.shape, len(call.shape)))


def _run(function: Callable[..., Any], operands: Operands, **params: Any) -> Any:
    """The function, of the operands that are not None; ``present`` tells it which these are."""
    present = tuple(None if x is None else True for x in operands)
    return function(*without_none(operands), present=present, **params)


def _named(operands: Sequence[Any], present: Present) -> Operands:
    """The operands of such a function."""
    return Operands(*filled(operands, present))


def _forward(of: Operands, call: Call) -> Any:
    return plain.forward(call, of.h, of.scale, of.bias, of.mask, of.gate)


def _forward_types(of: Operands, call: Call) -> Any:
    reduced = tuple(1 if axis in call.axes else size for axis, size in enumerate(call.shape))
    return _types(of.h, (call.shape, call.result), (reduced, "float64"))


def _forward_kernel(of: Operands, call: Call) -> Any:
    from rmsnorm.cpu import xla

    mask, steps = _masked(call, of.mask)
    attribute = xla.forward(call, _name(of.scale), _name(of.bias), _name(of.gate), steps)
    return _call_kernel(attribute, _forward_types(Operands(), call), of.h, of.scale, of.bias, mask, of.gate)


def _tangent(of: Operands, call: Call) -> Any:
    return plain.tangent(call, normalise, of)


def _transpose(cotangents: Sequence[Any], *operands: Any, call: Call, present: Present) -> Any:
    of = _named(operands, present)
    wanted = tuple(None if t is None else t.aval.dtype.name for t in (of.dh, of.dscale, of.dbias, of.dgate))
    of = of._replace(dh=None, dgate=None, dscale=None, dbias=None)
    dy, dinverse_rms = cotangents
    if type(dinverse_rms) is not ad.Zero:  # in a second derivative
        results = _transposed(call, wanted, of, *map(ad.instantiate_zeros, cotangents))
    else:
        results = _run(_gradients_p.bind, of._replace(dy=ad.instantiate_zeros(dy)), call=call, wanted=wanted)
    dx, dscale, dbias, dgate = filled(results, wanted)
    transposed = zip(Operands(dh=dx, dgate=dgate, dscale=dscale, dbias=dbias), present, strict=True)
    return [result for result, is_present in transposed if is_present]


@with_x64
def _transposed(call: Call, wanted: Wanted, of: Operands, *cotangents: Any, as_y: bool = False) -> Any:
    """Those of dx, dscale, dbias and dgate whose dtype is given in ``wanted``, in that dtype."""

    def push_forward(*tangents: Any) -> Any:
        dh, dscale, dbias, dgate = filled(tangents, wanted)
        operands = of._replace(dh=dh, dscale=dscale, dbias=dbias, dgate=dgate)
        return plain.tangent(call, normalise, operands, as_y=as_y)[: len(cotangents)]

    types = _gradient_types(Operands(h=private.typeof(of.h)), call, wanted)
    return jax.linear_transpose(push_forward, *types)(cotangents)


def _gradients(of: Operands, call: Call, wanted: Wanted) -> Any:
    """Where the forward pass left 1 / rho, as JAX differentiates: by the transpose. Without it by ``_by_formula``."""
    if of.inverse_rms is not None:
        return _transposed(call, wanted, of, of.dy)
    results = zip(_by_formula(call, of, wanted), wanted, strict=True)
    return [convert(result, name) for result, name in results if name is not None]


def _by_formula(call: Call, of: Operands, wanted: Wanted) -> list[Any]:
    """dx + dh, dscale, dbias and dgate before they are rounded, None as in ``wanted``. 1 / rho is computed here."""
    dy, dh, scale, mask = of.dy, of.dh, of.scale, of.mask
    wide, (_, inverse_rms) = elementwise(call), plain.forward(call, of.h, scale, of.bias, mask, of.gate)
    of = of._replace(inverse_rms=inverse_rms)
    types = tuple(name and dtype for name, dtype in zip(wanted, (wide, "float64", "float64", wide), strict=True))
    is_wide = may_leave_range(call)
    dy = double(dy) if is_wide else dy

    def transposed(dy: Any) -> list[Any]:
        of_dy = replace(call, result=dy.dtype.name)
        return filled(_transposed(of_dy, types, of, dy, as_y=True), wanted)

    dx, dscale, dbias, dgate = transposed(dy)
    if is_wide:  # dy times the gain may leave the range where dx does not
        largest = exponent_of(jnp.max(abs(zero_outside(mask, dy)), axis=call.axes, keepdims=True))
        power = excess(largest if scale is None else largest + exponent_of(jnp.max(abs(gain(call, scale)))), 900)
        dx, _, _, dgate = transposed(times_two_to(-power, dy))
        dx, dgate = (None if t is None else times_two_to(power, t) for t in (dx, dgate))
    return [dx if dh is None else dx + convert(dh, wide), dscale, dbias, dgate]


def _gradient_types(of: Operands, call: Call, wanted: Wanted) -> Any:
    features = tuple(call.shape[axis] for axis in call.feature_axes)
    shapes = (call.shape, features, features, call.shape)
    results = [(shape, name) for shape, name in zip(shapes, wanted, strict=True) if name is not None]
    return _types(of.h, *results)


def _gradients_kernel(of: Operands, call: Call, wanted: Wanted) -> Any:
    from rmsnorm.cpu import xla

    mask, steps = _masked(call, of.mask)
    attribute = xla.backward(
        replace(call, result=of.dy.dtype.name), _name(of.scale), _name(of.bias) or wanted[2], _name(of.gate), steps,
        tuple(name is not None for name in wanted), has_inverse_rms=of.inverse_rms is not None,
        has_bias=of.bias is not None, has_dh=of.dh is not None,
    )  # fmt: skip
    types = _gradient_types(Operands(), call, wanted)
    return _call_kernel(attribute, types, of.dy, of.h, of.inverse_rms, of.scale, of.bias, mask, of.dh, of.gate)


def _types(h: Any, *results: tuple[tuple[int, ...], str]) -> Any:
    return [private.type_like(h, shape, jnp.dtype(name)) for shape, name in results]


def _name(x: Any) -> str | None:
    return None if x is None else x.dtype.name


def _masked(call: Call, mask: Any) -> tuple[Any, tuple[int, int] | None]:
    """The mask without gaps, and its steps to the next row and element."""
    if mask is None:
        return None, None
    shape, row_step, step = mask_steps(mask.shape, call.shape, call.first_of_row)
    return jnp.broadcast_to(mask, shape), (row_step, step)


def _call_kernel(attribute: np.ndarray, types: Any, *operands: Any) -> Any:
    return ffi.ffi_call("rmsnorm", types)(*without_none(operands), attribute=attribute)


def _primitive(
    name: str, function: Callable[..., Any], types: Callable[..., Any], kernel: Callable[..., Any] | None = None,
    summed: Collection[str] = (),
) -> Primitive:  # fmt: skip
    """A primitive that computes the function, on a CPU in a kernel, if there is one.

    All of these get ``Operands``. ``summed`` are those whose transpose would be a sum over the parts of a vmap by which
    they are not mapped.
    """

    def of_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
        """As JAX calls a function: with the arrays that there are."""
        return with_x64(lambda *arrays, present, **params: function(_named(arrays, present), **params))

    plain, primitive = of_arrays(function), Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(plain)
    primitive.def_abstract_eval(of_arrays(types))
    mlir.register_lowering(primitive, mlir.lower_fun(plain, multiple_results=True))
    if kernel is not None:
        mlir.register_lowering(primitive, bind(_lower, plain, of_arrays(kernel)), platform="cpu")
    ad.primitive_jvps[primitive] = bind(_differentiate, plain)
    batching.primitive_batchers[primitive] = bind(_batch, primitive, plain, summed)
    private.check_for_nan(primitive)
    return primitive


@with_x64  # the lowering itself traces float64, too
def _lower(plain: Callable[..., Any], kernel: Callable[..., Any], context: Any, *arrays: Any, **params: Any) -> Any:
    """The program of a primitive for CPUs: a kernel, or else operations, which XLA divides among devices."""
    where = Context(platform="cpu" if private.is_for_one_device(context.module_context) else "")
    if engine_of(params["call"], where)[0] is Engine.OPERATIONS:
        return mlir.lower_fun(plain, multiple_results=True)(context, *arrays, **params)
    plain_types = [jax.core.ShapedArray(x.shape, x.dtype) for x in context.avals_in]
    return mlir.lower_fun(kernel, multiple_results=True)(context.replace(avals_in=plain_types), *arrays, **params)


def _differentiate(plain: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    return jax.jvp(bind(plain, **params), tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


def _batch(
    primitive: Primitive, plain: Callable[..., Any], summed: Collection[str], arrays: Sequence[Any],
    axes: Sequence[int | None], **params: Any,
) -> tuple[Any, list[int]]:  # fmt: skip
    """A vmap of 5 calls on 7 rows is one call on 35 rows; but operations, if the parts have different parameters or a
    gradient of the parameters each, or if a transpose would be a sum over parts."""
    call, present = params["call"], params["present"]
    names = [name for name, is_present in zip(Operands._fields, present, strict=True) if is_present]
    entries = [*zip(names, arrays, axes, strict=True)]
    mapped = {name for name, _, axis in entries if axis is not None}
    if any(params.get("wanted", ())[1:3]) or mapped & _PARAMETERS or not mapped.issuperset({*summed} & {*names}):
        results = jax.vmap(bind(plain, **params), tuple(axes))(*arrays)
    else:
        size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
        rows = [
            x if name in _PARAMETERS
            else jnp.broadcast_to(x, (1 if name == "mask" else size, *x.shape)) if axis is None
            else jnp.moveaxis(x, axis, 0)
            for name, x, axis in entries
        ]  # fmt: skip
        results = primitive.bind(*rows, **{**params, "call": _with_axis(call, size)})
    return results, [0] * len(results)


def _with_axis(call: Call, size: int) -> Call:
    """The same call on so many arrays at once, along a new first axis."""
    axes, features = (tuple(axis + 1 for axis in numbers) for numbers in (call.axes, call.feature_axes))
    return replace(call, shape=(size, *call.shape), axes=axes, feature_axes=features)


_forward_p = _primitive("rms_norm", _forward, _forward_types, _forward_kernel)
_tangent_p = _primitive("rms_norm_tangent", _tangent, _forward_types, summed={"dh", "dgate"})
_gradients_p = _primitive("rms_norm_gradients", _gradients, _gradient_types, _gradients_kernel)
ad.primitive_transposes[_tangent_p] = _transpose
