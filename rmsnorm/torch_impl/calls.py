"""A call of the functions on tensors: its arguments are checked, and a kernel or recipe.py computes it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rmsnorm import recipe
from rmsnorm.engines import Prepared, prepare
from rmsnorm.specification import errors
from rmsnorm.specification.interface import Options
from rmsnorm.torch_impl import exported, kernels, space
from rmsnorm.torch_impl.autograd import by_kernel, by_recipe, keep
from rmsnorm.torch_impl.memory import check_storage, laid_out
from rmsnorm.torch_impl.private import has_tangents, is_differentiated, is_exported, is_watched, untraced


@untraced
def compute(
    options: Options, return_inverse_rms: bool, x: Any, scale: Any, bias: Any, mask: Any, residual: Any, gate: Any,
    layer: Any = None, attributes: Any = None,
) -> Any:  # fmt: skip
    """What ``rms_norm`` returns: y, then x + residual and 1 / rho where they are there or asked for.

    A ``layer`` keeps the call for the next one with these attributes.
    """
    kept = None
    if not is_watched() and not has_tangents() and kernels.are_readable(x, residual, scale, bias, mask, gate):
        prepared = prepare("rms_norm", options, x, scale, bias, mask, residual, gate)
        kept = kernels.kept_of(prepared, x)
    if kept is None:
        prepared = _checked("rms_norm", options, x, scale, bias, mask, residual, gate)
    call, inverse_rms = prepared.call, None
    if kept is not None:
        if layer is not None and gate is None:
            keep(layer, attributes, kept, x, residual, scale, bias)

        def norm(*tensors: Any) -> tuple[Tensor, Tensor | None]:
            nonlocal inverse_rms
            y, h, inverse_rms = by_kernel(kept, return_inverse_rms, *tensors)
            return y, h if h is None or call.x_dtype == call.sum_dtype else space.cast(h, call.sum_dtype)

        y, h = recipe.around(space, call, norm, x, residual, scale, bias, gate)
    elif is_exported() and exported.has_operator(call) and not return_inverse_rms:
        y, h = recipe.around(space, call, exported.norm_of(call), x, residual, scale, bias, gate)
    else:
        y, h, inverse_rms = by_recipe(call, x, residual, scale, bias, mask, gate)
    if residual is None and not return_inverse_rms:
        return laid_out(y, x)
    results = [laid_out(y, x)]
    if residual is not None:
        results.append(laid_out(h, x))
    if return_inverse_rms:
        results.append(space.cast(inverse_rms, call.inverse_rms_dtype).contiguous())
    return tuple(results)


@untraced
def compute_vjp(
    options: Options, dy: Any, dh: Any, x: Any, scale: Any, bias: Any, mask: Any, residual: Any, gate: Any
) -> Any:
    """The gradients that ``rms_norm_vjp`` returns."""
    prepared = _checked("rms_norm_vjp", options, x, scale, bias, mask, residual, gate, dy=dy, dh=dh)
    call, kept = prepared.call, None
    if (
        gate is None
        and prepared.kernel_call.feature_axes == call.feature_axes
        and call.x_dtype == call.sum_dtype
        and all(t is None or t.dtype == x.dtype for t in (residual, dh))
        and not is_watched()
        and not is_differentiated(dy, dh, x, residual, scale)
        and kernels.are_readable(x, dy, dh, residual, scale, bias)
    ):
        kept = kernels.kept_of(prepared, x)
    if kept is not None:
        h = x if residual is None else x + residual  # of one dtype: rounded once
        dx, dscale, dbias = kept.backward((True, True, True), dy, dh, h, scale, bias, None)
        dresidual, dgate = None if residual is None else dx.clone(), None
    else:
        dh_of_both, dscale, dbias, dgate = recipe.backward(space, call, dy, dh, x, residual, scale, bias, mask, gate)
        dx, dresidual = (None if t is None else space.cast(dh_of_both, space.name_of(t)) for t in (x, residual))
    others = (laid_out(result, t) for result, t in ((dresidual, residual), (dgate, gate)) if t is not None)
    return laid_out(dx, x), dscale, dbias, *others


def _checked(
    op: str, options: Options, x: Any, scale: Any, bias: Any, mask: Any, residual: Any, gate: Any, **gradients: Any
) -> Prepared:
    """The prepared call of a function with these tensors, whatever they are.

    Raises:
        TypeError, ValueError: what is wrong with an argument.
    """
    tensors = {"x": x, "scale": scale, "bias": bias, "mask": mask, "residual": residual, "gate": gate, **gradients}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) and (tensor is not None or name == "x"):
            raise errors.wrong_type(op, name, tensor, "a torch.Tensor", "convert it with torch.as_tensor")
    check_storage(op, **tensors)
    return prepare(op, options, **tensors)
