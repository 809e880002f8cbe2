"""RMSNorm on PyTorch tensors: a call is computed by calls.py, or becomes one node of a program that is read.

    y = h / rho * (o + g) + b        rho = sqrt(mean(h_i^2) + eps), or as the variant says

Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rmsnorm.specification.interface import Forward, Gradients, Options, declared
from rmsnorm.torch_impl.calls import compute, compute_vjp
from rmsnorm.torch_impl.private import is_dynamo_compiling

__all__ = ["rms_norm", "rms_norm_vjp"]

rms_norm: Forward[Tensor, Tensor]
rms_norm_vjp: Gradients[Tensor, Tensor]


def _forward(options: Options, return_inverse_rms: bool, x: Any, *others: Any) -> Any:
    if is_dynamo_compiling() or (not isinstance(x, Tensor) and isinstance(x, torch.fx.Proxy)):
        from rmsnorm.torch_impl.compiled import as_constants, rms_norm_in_graph

        return rms_norm_in_graph(as_constants(*options), return_inverse_rms, x, *others)
    return compute(options, return_inverse_rms, x, *others)


def _gradients(options: Options, *tensors: Any) -> Any:
    if is_dynamo_compiling():
        from rmsnorm.torch_impl.compiled import as_constants, rms_norm_vjp_in_graph

        return rms_norm_vjp_in_graph(as_constants(*options), *tensors)
    return compute_vjp(options, *tensors)


rms_norm, rms_norm_vjp = declared(__name__, "torch.tensor", _forward, _gradients)
