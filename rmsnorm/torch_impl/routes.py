"""Which code computes a call: the first of ROUTES that holds.

A layer, and a program that Inductor wrote, make a call again with what they keep of it (rows.Kept), and do not ask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor

from rmsnorm.call import Call
from rmsnorm.torch_impl import arithmetic, onnx, operators, rows
from rmsnorm.torch_impl.autograd import RMSNormFunction
from rmsnorm.torch_impl.calls import call_of, named, planned, resolved
from rmsnorm.torch_impl.memory import laid_out, moved, moved_back
from rmsnorm.torch_impl.private import is_differentiated, is_transformed, is_watched, untraced
from rmsnorm.torch_impl.rounding import add, cast, dtype_name

Tensors = tuple[Any, Any, Any, Any, Any, Any]  # x, residual, scale, bias, mask and gate
Route = tuple[Callable[..., bool], Callable[..., Any]]  # of the call and its tensors; of these and its plan, as _run


@untraced
def rms_norm(options: Any, return_inverse_rms: bool, *tensors: Any) -> Any:
    """What the public function returns: y, then h and 1 / rho where they are there or asked for."""
    call, y, h, inverse_rms = _forward(options, tensors, return_inverse_rms)
    x, residual, *_ = tensors
    y = laid_out(y, x)
    if residual is None and not return_inverse_rms:
        return y
    outputs = [y]
    if residual is not None:
        outputs.append(laid_out(h if call.x == call.sum else cast(h, call.sum), x))
    if return_inverse_rms:
        outputs.append(cast(inverse_rms.detach(), call.inverse_rms).contiguous())
    return tuple(outputs)


def rms_norm_vjp(
    options: Any, dy: Any, x: Tensor, residual: Tensor | None, scale: Tensor | None, bias: Tensor | None,
    mask: Tensor | None, gate: Tensor | None,
) -> Any:  # fmt: skip
    """The gradients that the public function returns."""
    dy, dh = dy if isinstance(dy, tuple) and residual is not None else (dy, None)
    tensors = {"x": x, "scale": scale, "bias": bias, "mask": mask, "residual": residual, "gate": gate}
    call = resolved("rms_norm_vjp", {**tensors, "dy": dy, "dh": dh}, **named("rms_norm_vjp", *options))
    one_dtype = call.x == call.sum and all(t is None or t.dtype == x.dtype for t in (residual, dh))
    results = None
    if one_dtype and not is_transformed() and not is_differentiated(dy, dh, x, residual, scale, gate):
        results = rows.gradients(call, dy, x, residual, scale, bias, mask, dh, gate)
    if results is not None:
        dx, dscale, dbias, dgate = results
        dresidual = None if residual is None else dx.clone()
    else:
        wide, dscale, dbias, dgate = arithmetic.gradients(
            call, dy, add(x, residual, call.x), scale, bias, mask, dh, gate
        )
        dx, dresidual = (None if t is None else cast(wide, dtype_name(t.dtype)) for t in (x, residual))
    others = (laid_out(own, t) for own, t in ((dresidual, residual), (dgate, gate)) if t is not None)
    return laid_out(dx, x), dscale, dbias, *others


def _forward(options: Any, tensors: Tensors, with_inverse_rms: bool) -> Any:
    """The call, y, h = x + residual and 1 / rho in float64; the last two may be None where they are not asked for."""
    if is_watched():  # sizes may be symbols, for which no plan can be looked up
        call = call_of(options, *tensors)
        return call, *_run(ROUTES, call, None, with_inverse_rms, tensors)
    call, own, plan = planned(options, *tensors)
    if own is call:
        return call, *_run(_EAGER, call, plan, with_inverse_rms, tensors)
    x, residual, scale, bias, mask, gate = tensors
    x, residual, mask, gate = moved(call, x, residual, mask, gate)
    results = _run(_EAGER, own, plan, with_inverse_rms, (x, residual, scale, bias, mask, gate))
    return call, *moved_back(call, *results)


def _run(routes: Sequence[Route], call: Call, plan: Any, with_inverse_rms: bool, tensors: Tensors) -> Any:
    for holds, run in routes:
        if holds(call, tensors):
            return run(call, plan, with_inverse_rms, *tensors)
    raise AssertionError("the last route always holds")


def _is_exported(call: Call, tensors: Tensors) -> bool:
    return onnx.is_exported()


def _is_gated(call: Call, tensors: Tensors) -> bool:
    return call.gate is not None


def _is_served(call: Call, tensors: Tensors) -> bool:
    return operators.serve(call, *tensors)


def _is_traced(call: Call, tensors: Tensors) -> bool:
    return is_transformed()


def _has_derivatives(call: Call, tensors: Tensors) -> bool:
    return is_differentiated(*tensors)


def _always(call: Call, tensors: Tensors) -> bool:
    return True


def _gate_beside(
    call: Call, plan: Any, with_inverse_rms: bool, x: Tensor, residual: Tensor | None, scale: Tensor | None,
    bias: Tensor | None, mask: Tensor | None, gate: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gate by plain operations, which a compiler joins with those around it; the norm takes a route of its own."""

    def norm(ungated: Call, h: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor]:
        y, _, inverse_rms = _run(ROUTES, ungated, None, True, (h, None, *others, None))
        return y, inverse_rms

    h = add(x, residual, call.x)
    y, inverse_rms = arithmetic.gated(call, norm, h, scale, bias, mask, gate)
    return y, h, inverse_rms


def _plain(
    call: Call, plan: Any, with_inverse_rms: bool, x: Tensor, residual: Tensor | None, *others: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    h = add(x, residual, call.x)
    y, inverse_rms = arithmetic.forward(call, h, *others)
    return y, h, inverse_rms


ROUTES: Final[tuple[Route, ...]] = (
    (_is_exported, onnx.forward),  # to ONNX, or by torch.jit.trace: operations that other runtimes have
    (_is_gated, _gate_beside),
    (_is_served, operators.forward),  # one node of a program, and a kernel when it runs
    (_is_traced, _plain),  # operations that a compiler or torch.func takes apart
    (_has_derivatives, RMSNormFunction.apply),
    (_always, rows.forward),  # kernels if there is a plan, else blocks of rows that stay in cache
)
_EAGER: Final = ROUTES[-2:]  # where nothing watches
