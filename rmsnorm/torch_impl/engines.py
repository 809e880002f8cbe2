"""Which engine computes a call, and the call itself: arguments are prepared, an engine is chosen, and it runs.

A layer, and a program that Inductor wrote, make a call again with what they keep of it (kernels.Kept), and choose
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

from torch import Tensor

from rmsnorm.cpu.prepared import Options, Prepared, prepare
from rmsnorm.specification import errors
from rmsnorm.specification.call import Call
from rmsnorm.specification.interface import dy_and_dh
from rmsnorm.torch_impl import kernels, onnx, operations, operators
from rmsnorm.torch_impl.autograd import compute, keep
from rmsnorm.torch_impl.kernels import Results
from rmsnorm.torch_impl.memory import check_storage, laid_out, moved, moved_back
from rmsnorm.torch_impl.private import is_differentiated, is_transformed, is_watched, untraced
from rmsnorm.torch_impl.rounding import add, cast, dtype_name

Tensors: TypeAlias = tuple[Any, Any, Any, Any, Any, Any]  # x, residual, scale, bias, mask and gate


class Engine(Enum):
    """What computes a call."""

    KERNELS = "kernels"  # those of rmsnorm.cpu, or of Triton on a GPU
    OPERATOR = "an operator of a program"  # which is a kernel when the program runs
    OPERATIONS = "operations of PyTorch"
    GATE_BESIDE = "operations for the gate"  # beside a norm that has an engine of its own
    ONNX = "operations of ONNX"


class Context(NamedTuple):
    """What is around a call, asked once.

    Attributes:
        is_exported: torch.onnx.export or torch.jit.trace writes the call down.
        is_transformed: a compiler, torch.func or a tracer sees the operations.
        joins_gate: one of these or a mode does, and there is a gate.
        has_operator: one of these or a mode does, and the operators of this package can compute the call.
        has_kernels: kernels can compute it, and can read these tensors.
    """

    is_exported: bool
    is_transformed: bool
    joins_gate: bool
    has_operator: bool
    has_kernels: bool


@lru_cache
def engine_of(context: Context) -> tuple[Engine, str]:
    """The engine of a call, and why it is that one."""
    if context.is_exported:
        return Engine.ONNX, "the program is for other runtimes"
    if context.has_operator:
        return Engine.OPERATOR, "a compiler, torch.func or a mode sees one node"
    if context.joins_gate:
        return Engine.GATE_BESIDE, "kernels for GPUs have no gate, and the norm may have an operator"
    if context.is_transformed:
        return Engine.OPERATIONS, "a compiler or torch.func takes the operations apart"
    if context.has_kernels:
        return Engine.KERNELS, "the tensors are in memory as they are"
    return Engine.OPERATIONS, "no kernel can compute the call, or read the numbers of the tensors"


def why_not(prepared: Prepared, tensors: Iterable[Any]) -> str | None:
    """Why no kernel computes a call with these tensors, the first of which is x; None if one does."""
    x, *others = (tensor for tensor in tensors if tensor is not None)
    if (reason := kernels.refusal(x.device, prepared.kernel_call, *prepared.formats[:2])) is not None:
        return reason
    if kernels.are_readable(x, *others):
        return None
    if is_watched():
        return engine_of(Context(onnx.is_exported(), is_transformed(), False, False, False))[1]
    return "the numbers of a tensor are not in memory as they are"


def context_of(call: Call, tensors: Tensors) -> Context:
    """The context of a call that something watches."""
    has_operator = operators.can_compute(call, *tensors)
    return Context(onnx.is_exported(), is_transformed(), call.gate is not None, has_operator, False)


# Where nothing watches the operations, most questions need not be asked.
_IN_MEMORY: Final = Context(False, False, False, False, True)
_ELSEWHERE: Final = Context(False, False, False, False, False)


@untraced
def rms_norm(
    options: Options, return_inverse_rms: bool, *tensors: Any, layer: Any = None, attributes: Any = None
) -> Any:
    """What the public function returns: y, then h and 1 / rho where they are there or asked for.

    A ``layer`` keeps the call for the next one with these attributes.
    """
    call, (y, h, inverse_rms) = _forward(options, tensors, return_inverse_rms, layer, attributes)
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
    options: Options, dy: Any, x: Tensor, residual: Tensor | None, scale: Tensor | None, bias: Tensor | None,
    mask: Tensor | None, gate: Tensor | None,
) -> Any:  # fmt: skip
    """The gradients that the public function returns."""
    dy, dh = dy_and_dh(dy, residual)
    prepared = check("rms_norm_vjp", options, x, scale, bias, mask, residual, gate, dy=dy, dh=dh)
    call, kept = prepared.call, None
    if (
        call.x == call.sum
        and all(t is None or t.dtype == x.dtype for t in (residual, dh))
        and not is_transformed()
        and not is_differentiated(dy, dh, x, residual, scale, gate)
        and kernels.are_readable(x, dy, residual, scale, bias, mask, dh, gate)
    ):
        kept = kernels.kept_of(prepared, x, residual, scale, bias, gate)
    if kept is not None:
        dy, first, second, mask, dh, gate_rows = moved(call, dy, x, residual, mask, dh, gate)
        h = first if second is None else first + second  # of one dtype: rounded once
        dx, dscale, dbias, dgate = kept.backward(kernels.ALL, dy, dh, h, scale, bias, mask, gate_rows, None)
        dx, dgate = moved_back(call, dx, dgate)
        dresidual = None if residual is None else dx.clone()
    else:
        h = add(x, residual, call.x)
        wide, dscale, dbias, dgate = operations.gradients(call, dy, h, scale, bias, mask, dh, gate)
        dx, dresidual = (None if t is None else cast(wide, dtype_name(t.dtype)) for t in (x, residual))
    others = (laid_out(result, t) for result, t in ((dresidual, residual), (dgate, gate)) if t is not None)
    return laid_out(dx, x), dscale, dbias, *others


def check(
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


def kept_for(options: Options, tensors: Tensors) -> kernels.Kept | None:
    """The call as kernels compute it in memory, on the device of its tensors; None if they cannot."""
    x, residual, scale, bias, mask, gate = tensors
    if not isinstance(x, Tensor) or not kernels.are_readable(x, residual, scale, bias, mask, gate):
        return None
    prepared = prepare("rms_norm", options, x, scale, bias, mask, residual, gate)
    return kernels.kept_of(prepared, x, residual, scale, bias, gate)


def _forward(
    options: Options, tensors: Tensors, with_inverse_rms: bool, layer: Any, attributes: Any
) -> tuple[Call, Results]:
    x, residual, scale, bias, mask, gate = tensors
    if is_watched():  # sizes may be symbols, for which nothing can be looked up
        call = check("rms_norm", options, x, scale, bias, mask, residual, gate).call
        return call, _run(call, None, context_of(call, tensors), tensors, with_inverse_rms)
    kept = kept_for(options, tensors)
    if kept is None:
        call = check("rms_norm", options, x, scale, bias, mask, residual, gate).call
        return call, _run(call, None, _ELSEWHERE, tensors, with_inverse_rms)
    if layer is not None:
        keep(layer, attributes, kept, x)
    if kept.order is None:
        return kept.call, _run(kept.call, kept, _IN_MEMORY, tensors, with_inverse_rms)
    x, residual, mask, gate = moved(kept.call, x, residual, mask, gate)
    results = _run(kept.rows, kept, _IN_MEMORY, (x, residual, scale, bias, mask, gate), with_inverse_rms)
    y, h, inverse_rms = moved_back(kept.call, *results)
    return kept.call, (y, h, inverse_rms)


def _run(call: Call, kept: kernels.Kept | None, context: Context, tensors: Tensors, with_inverse_rms: bool) -> Results:
    """y, h and 1 / rho in float64; the last two may be None where they are not asked for."""
    engine, _ = engine_of(context)
    if engine not in _WITHOUT_GRAPH:
        return _RUN[engine](call, with_inverse_rms, *tensors)
    run = kept or kernels.Plain(call)
    return (
        run.forward(with_inverse_rms, *tensors) if context.is_transformed else compute(run, with_inverse_rms, *tensors)
    )


def _gate_beside(
    call: Call, with_inverse_rms: bool, x: Tensor, residual: Tensor | None, scale: Tensor | None, bias: Tensor | None,
    mask: Tensor | None, gate: Tensor,
) -> Results:  # fmt: skip
    def norm(ungated: Call, h: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor]:
        tensors: Any = (h, None, *others, None)
        y, _, inverse_rms = _run(ungated, None, context_of(ungated, tensors), tensors, True)
        return y, inverse_rms

    h = add(x, residual, call.x)
    y, inverse_rms = operations.gated(call, norm, h, scale, bias, mask, gate)
    return y, h, inverse_rms


_WITHOUT_GRAPH: Final = Engine.KERNELS, Engine.OPERATIONS  # whose derivatives are those of RMSNormFunction
_RUN: Final[dict[Engine, Callable[..., Results]]] = {
    Engine.OPERATOR: operators.forward,
    Engine.GATE_BESIDE: _gate_beside,
    Engine.ONNX: onnx.forward,
}
