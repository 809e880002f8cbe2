"""RMSNorm as the operator RMSNormalization of ONNX, of opset 23, where that can express a call.

It can where the statistic is that of all elements of the last axes, with eps inside, in float32 arithmetic. Elsewhere
``torch.onnx.export`` has the operations of recipe.py, and so does a trace of torch.jit, whose exporter
(``dynamo=False``) does not know rms_norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rmsnorm.specification.call import Call
from rmsnorm.torch_impl.space import cast, vanishes


def has_operator(call: Call) -> bool:
    """Whether the operator computes the norm of a call, in a program for ONNX."""
    counts_all = not call.masked and call.variant.partial is None and call.n != 0
    is_inside = call.variant.eps_position == "inside" and not vanishes(call.eps)
    return counts_all and is_inside and call.has_last_axes and not _is_wide(call) and not torch.jit.is_tracing()


def norm_of(whole: Call) -> Callable[..., tuple[Tensor, Any]]:
    """The ``norm`` of recipe.around, by that operator."""
    call = whole.in_rows
    sizes, first = call.shape[call.axes[0] :], call.first_of_row
    norm, product = (call.norm_dtype, call.product_dtype) if call.norm_dtype else ("float32", "float32")
    takes_gain = call.feature_axes == call.axes and norm == product and norm in ("float32", call.x_dtype)

    def compute(x: Tensor, residual: Any, scale: Any, bias: Any) -> tuple[Tensor, Any]:
        total = None if residual is None else cast(x, "float32") + cast(residual, "float32")
        h = x if total is None else cast(total, call.x_dtype)
        gain = scale if scale is None or call.gain_dtype is None else cast(scale, call.gain_dtype)
        if gain is not None and call.variant.scale_offset:
            gain = call.variant.scale_offset + cast(gain, "float32")
        gain = None if gain is None else cast(gain, product)
        if gain is not None and takes_gain:
            y = functional.rms_norm(cast(h, norm), sizes, gain, call.eps)
        else:
            ones = torch.ones(sizes, dtype=torch.float32, device=x.device)
            y = cast(cast(functional.rms_norm(cast(h, "float32"), sizes, ones, call.eps), norm), product)
            y = y if gain is None else y * gain.reshape(call.shape[first:])
        y = y if bias is None else y + cast(bias, product).reshape(call.shape[first:])
        return cast(y, call.result_dtype), None if total is None else cast(total, call.sum_dtype)

    return compute


def with_exact_eps(call: Call) -> Call:
    """The call with eps as a tensor where arithmetic is float64: a program for ONNX keeps numbers in float32."""
    return replace(call, eps=torch.tensor(call.eps, dtype=torch.float64)) if _is_wide(call) else call


def _is_wide(call: Call) -> bool:
    return "float64" in (call.x_dtype, call.sum_dtype, call.product_dtype, call.result_dtype, call.gate_dtype)
