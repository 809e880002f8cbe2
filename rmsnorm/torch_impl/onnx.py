"""RMSNorm for other runtimes, in operations that they have: what torch.onnx.export and torch.jit.trace write down.

In ONNX that is the operator RMSNormalization of opset 23 where it can express the variant.

It can where the statistic is that of all elements of the last axes, with eps inside, and nothing is float64,
for it keeps eps in float32. Elsewhere the graph has plain operations, and below opset 23 the exporter writes the
operator out itself. A trace has plain operations alone, as the exporter of TorchScript (``dynamo=False``) does not know
rms_norm; opset 9 has all of them, and opset 7 those of a call without a mask or a partial statistic. Arithmetic is
float32, or float64 where x, a parameter or y is: what a runtime for ONNX has, in place of the float64 and the bit
patterns of the other path.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rmsnorm.specification.call import Call
from rmsnorm.torch_impl import private
from rmsnorm.torch_impl.operations import counted_elements, counted_only, gated, leading_part


def is_exported() -> bool:
    return torch.jit.is_tracing() or (private.is_exporting() and torch.onnx.is_in_onnx_export())


def forward(
    call: Call, with_inverse_rms: bool, x: Tensor, residual: Tensor | None, scale: Tensor | None,
    bias: Tensor | None, mask: Tensor | None, gate: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """y, x + residual and 1 / rho; the exporter drops what is not used of them."""
    wide = _wide(call)
    h = x if residual is None else (x.to(wide) + residual.to(wide)).to(getattr(torch, call.x))
    if gate is None:
        y, inverse_rms = _ungated(call, h, scale, bias, mask)
    else:
        y, inverse_rms = gated(call, _ungated, h, scale, bias, mask, gate, _sigmoid)
    return y, h, inverse_rms


def _ungated(
    call: Call, h: Tensor, scale: Tensor | None, bias: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y and 1 / rho of a call without a gate."""
    wide = _wide(call)
    product = wide if call.norm is None else getattr(torch, call.product)
    norm = wide if call.norm is None else getattr(torch, call.norm)
    rho, empty = _rho(call, h.to(wide), mask)
    gain = None if scale is None else scale.to(product)
    if scale is not None and call.variant.scale_offset:
        gain = (call.variant.scale_offset + scale.to(wide)).to(product)

    first = min(call.axes)
    last_axes = call.axes == tuple(range(first, len(call.shape)))
    plain = call.variant.eps_position == "inside" and call.k == call.n
    has_operator = (
        last_axes and plain and empty is None and wide == torch.float32 and not _vanishes(call.eps)
        and not torch.jit.is_tracing()
    )  # fmt: skip
    takes_gain = call.feature_axes == call.axes and norm == product and norm in (wide, h.dtype)
    if has_operator and takes_gain and gain is not None:
        y = functional.rms_norm(h.to(norm), h.shape[first:], gain, call.eps)
    else:
        if has_operator:
            y = functional.rms_norm(h.to(wide), h.shape[first:], h.new_ones(h.shape[first:], dtype=wide), call.eps)
        else:
            y = h.to(wide) / rho
        y = y.to(norm).to(product)
        y = y if gain is None else y * gain.reshape(call.feature_shape)
    y = y if bias is None else y + bias.to(product).reshape(call.feature_shape)
    y, inverse_rms = y.to(getattr(torch, call.result)), 1 / rho
    if mask is not None and torch.jit.is_tracing():  # a trace may be trained
        y = torch.where(mask, y, y.detach())
    if empty is not None:
        y, inverse_rms = torch.where(empty, 0.0, y), torch.where(empty, 0.0, inverse_rms)
    return y, inverse_rms


def _wide(call: Call) -> torch.dtype:
    return torch.float64 if "float64" in (call.x, call.product, call.result) else torch.float32


def _sigmoid(z: Tensor) -> Tensor:
    """By the exponential of -|z|: onnxruntime's operator Sigmoid (1.31) is 0 below -15.9 in float32."""
    return z.clamp(max=0).exp() / (1 + (-z.abs()).exp())


def _rho(call: Call, h: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Of every row, and which rows have nothing counted, None where none can."""
    if not torch.jit.is_tracing():  # whose exporter can cut at an unknown size only from opset 10 on
        call, h = leading_part(call, h, mask)
    counted, k, empty = counted_elements(call, h, mask)
    k = k.to(h.dtype) if isinstance(k, Tensor) else k
    q = counted_only(h, counted).square().sum(call.axes, keepdim=True) / k
    eps = torch.tensor(call.eps, dtype=h.dtype, device=h.device)  # a number would be kept in float32
    unit = 2.0**30 if _vanishes(call.eps) else 1.0
    if call.variant.eps_position == "inside":
        return (q * unit + eps * unit).sqrt() / unit**0.5, empty
    if call.variant.eps_position == "outside":
        return (q.sqrt() * unit + eps * unit) / unit, empty
    return torch.maximum(q.sqrt(), eps / k**0.5), empty


def _vanishes(eps: float) -> bool:
    # onnxscript's optimizer takes such an addend for 0: github.com/microsoft/onnxscript, rewriter/_matcher.py, abs_tol
    return 0 < eps < 2e-8
