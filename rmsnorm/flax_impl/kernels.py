"""The norm and its gradients as primitives of JAX: a program for one CPU calls a kernel, any other computes recipe.py.

    rms_norm               y of h = x + residual
    rms_norm_tangent       the tangent of y, in forward mode; its transpose is rms_norm_gradients
    rms_norm_gradients     the gradients, which need no more of the forward pass than its arguments

What else JAX derives from a primitive, and what it maps over, it does with the recipe.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from functools import partial as bind
from typing import Any, NamedTuple

import jax
from jax import ffi
from jax import numpy as jnp

from rmsnorm import engines, recipe
from rmsnorm.engines import Prepared
from rmsnorm.flax_impl import private
from rmsnorm.flax_impl.private import Primitive, ad, batching, mlir
from rmsnorm.flax_impl.space import Space, with_derivatives_of
from rmsnorm.specification.absent import without_none
from rmsnorm.specification.call import Call

HERE = Space()


class Operands(NamedTuple):
    """What is differentiated, and the mask; None for an array that there is not. h is x + residual."""

    h: Any
    scale: Any = None
    bias: Any = None
    gate: Any = None
    mask: Any = None


def why_not(prepared: Prepared, arrays: Iterable[Any]) -> str | None:
    """Why no kernel is in the program that JAX compiles for these arrays; None if there is one."""
    arrays = [array for array in arrays if isinstance(array, jax.Array)]
    if (reason := why_not_traced(prepared.kernel_call, prepared.formats, arrays)) is not None:
        return reason
    devices = {device for array in arrays for device in array.devices()}
    return _why_not_for(prepared.kernel_call, prepared.formats, devices.pop().platform if len(devices) == 1 else None)


def why_not_traced(call: Call, formats: Iterable[str | None], arrays: Iterable[Any]) -> str | None:
    """The same while a program is traced, when it is not known yet which device it is for."""
    if is_divided(arrays):
        return "each device has a part of an array"
    return engines.refusal(call, None, formats)


def is_divided(arrays: Iterable[Any]) -> bool:
    return any(map(private.is_divided, without_none(arrays)))


def _why_not_for(call: Call, formats: Iterable[str | None], platform: str | None) -> str | None:
    """The same for a program that is compiled for one device; ``platform`` is None for several."""
    if platform is None:
        return "an array is not on one device"
    if platform != "cpu":
        return "there are no kernels for its device"
    if (reason := engines.why_not(call, "cpu", formats)) is not None:
        return reason
    return None if is_registered() else "this jaxlib does not accept the kernels"


@lru_cache(maxsize=1)
def is_registered() -> bool:
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


def norm(call: Call, of: Operands) -> Any:
    """y. Differentiation keeps the arguments and nothing else."""
    (y,) = _bind(_forward_p, (of,), call=call)
    return y


def gradients(call: Call, of: Operands, dy: Any, dh: Any) -> list[Any]:
    """The gradient of h plus ``dh``, and those of scale, bias and gate; None where there is no such array."""
    wanted = tuple(name for name, array in of._replace(mask=None)._asdict().items() if array is not None)
    results = _bind(_gradients_p, (of, dy, dh), call=call, wanted=wanted)
    found = dict(zip(wanted, results, strict=True))
    return [found.get(name) for name in Operands._fields[:4]]


def forward(call: Call, of: Operands, ops: Space = HERE) -> Any:
    """``norm`` by the recipe. To derivatives a rounding is the identity."""

    def y_of(call: Call) -> Any:
        return recipe.forward(ops, call, of.h, None, of.scale, of.bias, of.mask, of.gate)[0]

    y = y_of(call)
    return y if call.norm_dtype is None else with_derivatives_of(y_of(replace(call, norm_dtype=None)), y)


def backward(call: Call, of: Operands, dy: Any, dh: Any) -> list[Any]:
    """``gradients`` by the recipe, the first in the dtype of the arithmetic."""
    return list(recipe.backward(HERE, call, dy, dh, of.h, None, of.scale, of.bias, of.mask, of.gate))


def _forward(of: Operands, call: Call) -> list[Any]:
    return [forward(call, of)]


def _forward_types(of: Operands, call: Call) -> list[Any]:
    return [private.type_like(of.h, call.shape, jnp.dtype(call.result_dtype))]


def _forward_kernel(of: Operands, call: Call) -> list[Any]:
    from rmsnorm.cpu import xla

    attribute = xla.forward(call, _name(of.scale), _name(of.bias))
    return _call_kernel(attribute, _forward_types(of, call), of.h, recipe.narrowed(HERE, call, of.scale), of.bias)


def _tangent(of: Operands, along: Operands, call: Call) -> list[Any]:
    """The transpose of the gradients, of which no part leaves the range if the tangent does not."""
    moving = {name: tangent for name, tangent in along._asdict().items() if tangent is not None}
    pull = bind(_gradients, of, dh=None, call=call, wanted=tuple(moving))
    return list(jax.linear_transpose(pull, *_forward_types(of, call))(list(moving.values())))


def _tangent_types(of: Operands, _: Operands, call: Call) -> list[Any]:
    return _forward_types(of, call)


def _gradients(of: Operands, dy: Any, dh: Any, call: Call, wanted: tuple[str, ...]) -> list[Any]:
    found = dict(zip(Operands._fields, backward(call, of, dy, dh), strict=False))
    return [found[name].astype(getattr(of, name).dtype) for name in wanted]


def _gradients_types(of: Operands, _: Any, __: Any, call: Call, wanted: tuple[str, ...]) -> list[Any]:
    arrays = [getattr(of, name) for name in wanted]
    return [private.type_like(of.h, array.shape, array.dtype) for array in arrays]


def _gradients_kernel(of: Operands, dy: Any, dh: Any, call: Call, wanted: tuple[str, ...]) -> list[Any]:
    from rmsnorm.cpu import xla

    call = replace(call, result_dtype=dy.dtype.name)
    are_wanted = [name in wanted for name in ("h", "scale", "bias")]
    attribute = xla.backward(call, _name(of.scale), _name(of.bias), are_wanted, has_dh=dh is not None)
    return _call_kernel(
        attribute, _gradients_types(of, dy, dh, call, wanted), dy, of.h, recipe.narrowed(HERE, call, of.scale), dh
    )


def _call_kernel(attribute: Any, types: list[Any], *operands: Any) -> list[Any]:
    plain = [jax.ShapeDtypeStruct(of.shape, of.dtype) for of in types]
    return list(ffi.ffi_call("rmsnorm", plain)(*without_none(operands), attribute=attribute))


def _name(x: Any) -> str | None:
    return None if x is None else x.dtype.name


def _bind(primitive: Primitive, operands: Any, **params: Any) -> list[Any]:
    """Calls a primitive, which takes the arrays that there are in a list, and as ``tree`` how they are named."""
    leaves, tree = jax.tree.flatten(operands)
    results: list[Any] = primitive.bind(*leaves, tree=tree, **params)
    return results


def _primitive(
    name: str, function: Callable[..., Any], types: Callable[..., Any], kernel: Callable[..., Any] | None = None
) -> Primitive:
    """A primitive that computes the function, on a CPU by a kernel if there is one. All of these get what ``_bind``
    got, and return a list."""

    def of_leaves(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *leaves, tree, **params: function(*jax.tree.unflatten(tree, leaves), **params)

    plain, primitive = of_leaves(function), Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(plain)
    primitive.def_abstract_eval(of_leaves(types))
    mlir.register_lowering(primitive, mlir.lower_fun(plain, multiple_results=True))
    if kernel is not None:
        mlir.register_lowering(primitive, bind(_lower, plain, of_leaves(kernel)), platform="cpu")
    ad.primitive_jvps[primitive] = bind(_differentiate, plain)
    batching.primitive_batchers[primitive] = bind(_map, plain)
    private.check_for_nan(primitive)
    return primitive


def _lower(plain: Callable[..., Any], kernel: Callable[..., Any], context: Any, *leaves: Any, **params: Any) -> Any:
    """The program of a primitive for CPUs: a kernel, or the recipe, which XLA divides among devices."""
    of = jax.tree.unflatten(params["tree"], context.avals_in)[0]
    platform = "cpu" if private.is_for_one_device(context.module_context) else None
    if _why_not_for(params["call"], (_name(of.scale), _name(of.bias)), platform) is not None:
        return mlir.lower_fun(plain, multiple_results=True)(context, *leaves, **params)
    plain_types = [jax.core.ShapedArray(x.shape, x.dtype) for x in context.avals_in]
    return mlir.lower_fun(kernel, multiple_results=True)(context.replace(avals_in=plain_types), *leaves, **params)


def _differentiate(plain: Callable[..., Any], primals: Any, tangents: Any, **params: Any) -> Any:
    return jax.jvp(bind(plain, **params), tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


def _map(plain: Callable[..., Any], leaves: Any, axes: Any, **params: Any) -> Any:
    results = jax.vmap(bind(plain, **params), tuple(axes))(*leaves)
    return results, [0] * len(results)


def _differentiate_norm(primals: Any, tangents: Any, *, tree: Any, call: Call) -> Any:
    (of,) = jax.tree.unflatten(tree, primals)
    (along,) = jax.tree.unflatten(tree, [None if type(t) is ad.Zero else t for t in tangents])
    return _forward_p.bind(*primals, tree=tree, call=call), _bind(_tangent_p, (of, along), call=call)


def _transpose_tangent(cotangents: Any, *leaves: Any, tree: Any, call: Call) -> list[Any]:
    of, along = jax.tree.unflatten(tree, leaves)
    wanted = tuple(name for name, tangent in along._asdict().items() if ad.is_undefined_primal(tangent))
    results = iter(_bind(_gradients_p, (of, ad.instantiate_zeros(cotangents[0]), None), call=call, wanted=wanted))
    return [next(results) if ad.is_undefined_primal(leaf) else None for leaf in leaves]


_forward_p = _primitive("rms_norm", _forward, _forward_types, _forward_kernel)
_tangent_p = _primitive("rms_norm_tangent", _tangent, _tangent_types)
_gradients_p = _primitive("rms_norm_gradients", _gradients, _gradients_types, _gradients_kernel)
ad.primitive_jvps[_forward_p] = _differentiate_norm
ad.primitive_transposes[_tangent_p] = _transpose_tangent
