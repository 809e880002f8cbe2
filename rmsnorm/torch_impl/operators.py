"""The kernels as operators of PyTorch: one node each in a program that is compiled, exported or otherwise traced.

    rmsnorm::forward    y, h = x + residual, 1 / rho
    rmsnorm::backward   dx + dh, dscale, dbias, dgate

They compute where the last axes are normalised. A result that is not there (h without a residual, the
gradient of a parameter that is None) is a tensor of no elements, as a schema has no optional results. Derivatives of
the gradients, tangents and batches of parameters are those of the plain operations of operations.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from rmsnorm.cpu.prepared import KERNELS, refusal
from rmsnorm.cpu.rows import axes_last
from rmsnorm.specification import text as texts
from rmsnorm.specification.call import Call
from rmsnorm.torch_impl import gpu, inductor, private
from rmsnorm.torch_impl.kernels import ALL, Kept, Plain, run_of
from rmsnorm.torch_impl.memory import is_plain, moved, moved_back
from rmsnorm.torch_impl.private import constant, is_differentiated, untraced
from rmsnorm.torch_impl.rounding import dtype_name, straight_through

TYPES: Final = (Tensor, Parameter, *private.TRACED)  # others, a DTensor say, do not know the operators

LIBRARY: Final = torch.library.Library("rmsnorm", "DEF")
LIBRARY.define(
    "forward(Tensor x, Tensor? residual, Tensor? scale, Tensor? bias, Tensor? mask, Tensor? gate, "
    "str text, SymInt? k) -> (Tensor y, Tensor h, Tensor inverse_rms)",
    tags=torch.Tag.pt2_compliant_tag,
)
LIBRARY.define(
    "backward(Tensor dy, Tensor? dh, Tensor h, Tensor inverse_rms, Tensor? scale, Tensor? bias, Tensor? mask, "
    "Tensor? gate, str text, SymInt? k) -> (Tensor dx, Tensor dscale, Tensor dbias, Tensor dgate)",
    tags=torch.Tag.pt2_compliant_tag,
)
_forward, _backward = torch.ops.rmsnorm.forward.default, torch.ops.rmsnorm.backward.default
_text_of = constant(lambda *fields: texts.text_of(*fields))
_platform_of = constant(lambda device: gpu.platform_of(device))
_are_there = constant(lambda device: KERNELS[gpu.platform_of(device)].missing(gpu.card_of(device)) is None)


def can_compute(call: Call, x: Tensor | None, residual: Tensor | None, *others: Tensor | None) -> bool:
    """Whether the operators can compute a call on these tensors, once its axes are in order."""
    present = [t for t in (x, residual, *others) if t is not None]
    if (
        private.below_autograd is None
        or (not private.nests_operators and private.is_in_transform())
        or call.x != call.sum
        or not all(type(t) in TYPES and t.layout is torch.strided for t in present)
        or (residual is not None and x is not None and residual.dtype != x.dtype)
    ):
        return False
    device = present[0].device
    formats = [dtype_name(t.dtype) for t in present if t.dtype != torch.bool]
    if any(t.device != device for t in present) or refusal(axes_last(call), _platform_of(device), formats) is not None:
        return False
    return _are_there(device)


def forward(
    call: Call, with_inverse_rms: bool, x: Tensor, residual: Tensor | None, scale: Tensor | None, bias: Tensor | None,
    mask: Tensor | None, gate: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """y, h = x + residual (None without one) and 1 / rho in float64."""
    x, residual, mask, gate = moved(call, x, residual, mask, gate)
    y, h, inverse_rms = _forward(x, residual, scale, bias, mask, gate, *arguments_of(axes_last(call)))
    y, h, inverse_rms = moved_back(call, y, None if residual is None else h, inverse_rms)
    return y, h, inverse_rms


class Node(NamedTuple):
    """A call of the operator whose derivatives are somebody else's."""

    arguments: tuple[str, Any]  # of the operators beside the tensors
    shape: Any
    dtype: str

    @property
    def rows(self) -> Call:
        text, k = self.arguments
        return texts.call_of(text, self.shape, self.dtype, k)

    def forward(
        self, with_inverse_rms: bool, x: Tensor, residual: Tensor | None, *others: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        with private.below_autograd():
            y, h, inverse_rms = _forward(x, residual, *others, *self.arguments)
        return y, None if residual is None else h, inverse_rms


def backward(
    arguments: tuple[str, Any], dy: Tensor, h: Tensor, scale: Tensor | None, bias: Tensor | None, mask: Tensor | None,
    inverse_rms: Tensor, dh: Tensor | None, gate: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """dx + dh in T; dscale, dbias and dgate in the dtypes of the parameters and the gate."""
    dx, *others = _backward(dy, dh, h, inverse_rms, scale, bias, mask, gate, *arguments)
    dscale, dbias, dgate = (None if p is None else d for p, d in zip((scale, bias, gate), others, strict=True))
    return dx, dscale, dbias, dgate


def arguments_of(call: Call) -> tuple[str, Any]:
    """The arguments of the operators beside the tensors: the text of a call, and k if it is not n.

    Every argument takes half a microsecond, so most are one text.
    """
    return _text_of(*texts.fields_of(call)), None if call.variant.partial is None else call.k


def _call_of(x: Tensor, text: str, k: Any) -> Call:
    """The call with these arguments, on tensors like x."""
    return texts.call_of(text, x.shape, dtype_name(x.dtype), k)


def _run_of(x: Tensor, *others: Any) -> Any:
    """What computes the call of an operator on x; the others are scale, bias and gate, then the text and k."""
    *tensors, text, k = others
    return run_of(x.device, x.shape, (*(None if t is None else dtype_name(t.dtype) for t in (x, *tensors)), text, k))


@untraced
def _run_forward(
    x: Tensor, residual: Tensor | None, scale: Tensor | None, bias: Tensor | None, mask: Tensor | None,
    gate: Tensor | None, *text: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    run = _run_of(x, scale, bias, gate, *text)
    return in_order(x, *run.forward(True, x, residual, scale, bias, mask, gate))


@untraced
def _run_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, inverse_rms: Tensor, scale: Tensor | None, bias: Tensor | None,
    mask: Tensor | None, gate: Tensor | None, *text: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    run = _run_of(h, scale, bias, gate, *text)
    if isinstance(run, Kept) and not run.is_readable(dy, dh):
        run = Plain(run.rows)
    return in_order(h, *run.backward(ALL, dy, dh, h, scale, bias, mask, gate, inverse_rms))


def _forward_in_program(
    key: Any, x: Tensor, scale: Tensor | None, bias: Tensor | None, gate: Tensor | None, with_inverse_rms: bool
) -> Any:
    """The results in the lines of inductor.py, of tensors without gaps; 1 / rho may be None."""
    return run_of(x.device, x.shape, key).forward(with_inverse_rms, x, None, scale, bias, None, gate)


def _backward_in_program(
    key: Any, dy: Tensor, h: Tensor, inverse_rms: Tensor, scale: Tensor | None, bias: Tensor | None, gate: Tensor | None
) -> Any:
    """The same; None for the gradient of a parameter that is None."""
    run = run_of(h.device, h.shape, key)
    return run.backward(ALL, dy, None, h, scale, bias, None, gate, inverse_rms)


_forward.in_program, _backward.in_program = _forward_in_program, _backward_in_program


def present(like: Tensor, *tensors: Tensor | None) -> Any:
    """The tensors, with one of no elements where there is none."""
    return tuple(like.new_empty(0) if tensor is None else tensor for tensor in tensors)


def in_order(like: Tensor, *tensors: Tensor | None) -> Any:
    """As ``present``, with the strides that ``_forward_types`` and ``_backward_types`` say."""
    return tuple(tensor.contiguous() for tensor in present(like, *tensors))


def _forward_types(
    x: Tensor, residual: Tensor | None, scale: Any, bias: Any, mask: Any, gate: Any, text: str, k: Any
) -> tuple[Tensor, Tensor, Tensor]:
    inductor.register()
    private.decompose_in_exports(_forward, _plain_forward)
    fields = texts.read(text)
    axes, result = fields["axes"], getattr(torch, fields["result"])
    reduced = [*x.shape[:-axes], *(1 for _ in range(axes))]
    y, inverse_rms = x.new_empty(x.shape, dtype=result), x.new_empty(reduced, dtype=torch.float64)
    return y, x.new_empty(0) if residual is None else x.new_empty(x.shape), inverse_rms


def _backward_types(
    dy: Tensor, dh: Any, h: Tensor, inverse_rms: Any, scale: Tensor | None, bias: Tensor | None, mask: Any,
    gate: Tensor | None, text: str, k: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    private.decompose_in_exports(_backward, _plain_backward)
    results: tuple[Tensor, ...] = present(
        h, *(None if p is None else p.new_empty(p.shape) for p in (h, scale, bias, gate))
    )
    return results


def _plain_forward(x: Tensor, *arguments: Any) -> Any:
    *tensors, text, k = arguments
    return in_order(x, *Plain(_call_of(x, text, k)).forward(True, x, *tensors))


def _plain_backward(dy: Tensor, dh: Any, h: Tensor, *arguments: Any) -> Any:
    *tensors, text, k = arguments
    return _gradients_by_operations(_call_of(h, text, k), dy, dh, h, *tensors)


def _gradients_by_operations(
    call: Call, dy: Any, dh: Any, h: Any, _: Any, scale: Any, bias: Any, mask: Any, gate: Any
) -> Any:
    """Through 1 / rho, too, so the one of the forward pass is not used."""
    return in_order(h, *Plain(call).backward(ALL, dy, dh, h, scale, bias, mask, gate, None))


class _Backward(torch.autograd.Function):
    """The operator with the derivatives of plain operations, which also go through 1 / rho."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *tensors, text, k = arguments
        ctx.text = text, k
        ctx.save_for_backward(*tensors)
        with private.below_autograd():
            return _backward(*arguments)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        tensors = dict(enumerate(ctx.saved_tensors))
        indices = [i for i, t in tensors.items() if t is not None and t.is_floating_point()]

        def gradients(*primals: Tensor) -> Any:
            return _plain_backward(*(tensors | dict(zip(indices, primals, strict=True))).values(), *ctx.text)

        _, pull_back = torch.func.vjp(gradients, *(tensors[i] for i in indices))
        results = dict(zip(indices, pull_back(cotangents), strict=True))
        return *map(results.get, tensors), None, None


def _differentiable_backward(*arguments: Any) -> Any:
    if not private.has_tangents():
        return _Backward.apply(*arguments)
    with private.below_autograd():
        values = _backward(*arguments)
    return tuple(map(straight_through, values, _plain_backward(*arguments)))


def _batched_forward(info: Any, in_dims: Any, *arguments: Any) -> Any:
    """More rows; plain operations where a parameter is batched, too."""
    *tensors, text, k = arguments
    x, residual, scale, bias, mask, gate = _with_batches(info, in_dims, tensors, 0, 4)
    out_dims = 0, None if residual is None else 0, 0
    if in_dims[2] is None and in_dims[3] is None:
        return _forward(x, residual, tensors[2], tensors[3], mask, gate, text, k), out_dims
    call = _call_on_batch(x, text, k)
    return in_order(x, *Plain(call).forward(True, x, residual, scale, bias, mask, gate)), out_dims


def _batched_backward(info: Any, in_dims: Any, *arguments: Any) -> Any:
    """More rows; plain operations where a parameter has gradients, which each element of the batch has of its own."""
    *tensors, text, k = arguments
    tensors = _with_batches(info, in_dims, tensors, 2, 6)
    _, _, h, _, scale, bias, _, gate = tensors
    out_dims = 0, *(None if t is None else 0 for t in (scale, bias, gate))
    if scale is None and bias is None:
        return _backward(*tensors, text, k), out_dims
    return _gradients_by_operations(_call_on_batch(h, text, k), *tensors), out_dims


def _with_batches(info: Any, in_dims: Any, tensors: list[Any], x: int, mask: int) -> list[Any]:
    """The tensors with the batch as their first axis. ``x`` and ``mask`` are indices; the mask gets the axes of x."""
    batches: list[Any] = [
        None if t is None else t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(tensors, in_dims, strict=False)
    ]
    if (m := batches[mask]) is not None:
        batches[mask] = m.reshape(info.batch_size, *(1 for _ in range(batches[x].ndim - m.ndim)), *m.shape[1:])
    return batches


def _call_on_batch(x: Tensor, text: str, k: Any) -> Call:
    """The call on a batch in which each element has parameters of its own."""
    call = _call_of(x, text, k)
    return replace(call, feature_axes=(0, *call.feature_axes))


def _in_autograd(
    operator: Any, plain: Callable[..., Any], differentiable: Callable[..., Any], run_on_cpu: Callable[..., Any]
) -> Callable[..., Any]:
    """What autograd sees of an operator; plain operations under torch.func, as a Function does not nest there."""

    @untraced
    def run(*arguments: Any) -> Any:
        if private.is_in_transform():
            return plain(*arguments)
        tensors = [t for t in arguments if isinstance(t, Tensor)]
        if is_differentiated(*tensors):
            return differentiable(*arguments)
        if is_plain(*tensors):
            return run_on_cpu(*arguments)  # the dispatcher would take as long as a small kernel
        with private.below_autograd():
            return operator(*arguments)

    return run


def register(differentiable_forward: Callable[..., Any]) -> None:
    """Register the operators, of which the forward pass with derivatives is that function."""
    for name, operator, run, types, plain, differentiable, batched in (
        ("forward", _forward, _run_forward, _forward_types, _plain_forward, differentiable_forward, _batched_forward),
        ("backward", _backward, _run_backward, _backward_types, _plain_backward, _differentiable_backward,
         _batched_backward),
    ):  # fmt: skip
        LIBRARY.impl(name, run, "CPU")
        LIBRARY.impl(name, run, "CUDA")
        LIBRARY.impl(name, _in_autograd(operator, plain, differentiable, run), "Autograd")
        torch.library.register_fake(f"rmsnorm::{name}", types, lib=LIBRARY)
        torch.library.register_vmap(f"rmsnorm::{name}", batched, lib=LIBRARY)
