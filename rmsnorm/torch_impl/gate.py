"""The factor f(z) of a gate z and its derivative, in the dtype of the product with the gate.

sigmoid: f = s(z),    f' = s(z) s(-z)            s(z) = 1 / (1 + exp(-z))
silu:    f = z s(z),  f' = s(z) (1 + z s(-z))
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rmsnorm.specification.call import Call


def factor(call: Call, gate: Tensor, sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid) -> Tensor:
    """f(z), with PyTorch's s(z) or another one. Not by PyTorch's silu, whose gradient has no forward mode."""
    z = gate.to(getattr(torch, str(call.gate)))
    return z * sigmoid(z) if call.variant.gate_function == "silu" else sigmoid(z)


def slope(call: Call, gate: Tensor) -> Tensor:
    z = gate.to(getattr(torch, str(call.gate)))
    below = (-z).sigmoid()
    return z.sigmoid() * (1 + z * below if call.variant.gate_function == "silu" else below)
