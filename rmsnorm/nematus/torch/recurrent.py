"""The recurrent cells: Nematus's GRU, the GRU and the LSTM of the authors' Theano code, with any norm.

Sequences are time-major: x (length, batch, features), mask (length, batch), states (batch, features). The dtype is that
of the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor

from rmsnorm.nematus.cells import PARTIAL, CellNorm
from rmsnorm.nematus.config import Bias
from rmsnorm.nematus.models import recurrent
from rmsnorm.nematus.models.parameters import Parameters
from rmsnorm.nematus.torch import operations

__all__ = ["gru", "lstm", "nematus_gru"]


def nematus_gru(
    x: Tensor,
    h0: Tensor,
    parameters: Mapping[str, Tensor],
    *,
    biases: Sequence[Bias] = ("input",),
    mask: Tensor | None = None,
    masking: Literal["zero", "carry"] = "zero",
    reverse: bool = False,
    norm: CellNorm = "none",
    partial: float = PARTIAL,
) -> Tensor:
    """Nematus's GRU with deep transition: see rmsnorm.nematus.protocol.Cells.nematus_gru.

    Example:
        >>> import torch
        >>> weights = {"gru0/state_to_gates": torch.ones((1, 2)), "gru0/state_to_proposal": torch.ones((1, 1))}
        >>> weights |= {"gru0/input_to_gates": torch.ones((1, 2)), "gru0/input_to_proposal": torch.ones((1, 1))}
        >>> weights |= {"gru0/gates_bias": torch.zeros(2), "gru0/proposal_bias": torch.zeros(1)}
        >>> nematus_gru(torch.zeros((2, 1, 1)), torch.ones((1, 1)), weights).ravel()
        tensor([0.8988, 0.8020])
    """
    p = Parameters(operations, parameters, norm, partial=partial)
    return recurrent.nematus_level(p, x, h0, biases, mask, masking=masking, reverse=reverse)


def gru(
    x: Tensor,
    h0: Tensor,
    parameters: Mapping[str, Tensor],
    *,
    mask: Tensor | None = None,
    norm: CellNorm = "none",
    partial: float = PARTIAL,
) -> Tensor:
    """The GRU of the authors' Theano code: see rmsnorm.nematus.protocol.Cells.gru.

    Example:
        >>> import torch
        >>> weights = {"W": torch.ones((1, 2)), "U": torch.ones((1, 2)), "b": torch.zeros(2)}
        >>> weights |= {"Wx": torch.ones((1, 1)), "Ux": torch.ones((1, 1)), "bx": torch.zeros(1)}
        >>> gru(torch.zeros((2, 1, 1)), torch.ones((1, 1)), weights, mask=torch.tensor([[1.0], [0.0]])).ravel()
        tensor([0.8988, 0.8988])
    """
    own = recurrent.renamed(parameters, norm)
    return nematus_gru(x, h0, own, mask=mask, masking="carry", norm=norm, partial=partial)


def lstm(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    parameters: Mapping[str, Tensor],
    *,
    mask: Tensor | None = None,
    norm: CellNorm = "none",
    partial: float = PARTIAL,
) -> tuple[Tensor, Tensor]:
    """The LSTM of the authors' Theano code: see rmsnorm.nematus.protocol.Cells.lstm.

    Example:
        >>> import torch
        >>> weights = {"W": torch.ones((1, 4)), "U": torch.ones((1, 4)), "b": torch.zeros(4)}
        >>> h, c = lstm(torch.zeros((1, 1, 1)), torch.ones((1, 1)), torch.ones((1, 1)), weights)
        >>> h.ravel(), c.ravel()
        (tensor([0.6277]), tensor([1.2878]))
    """
    return recurrent.lstm(Parameters(operations, parameters, norm, partial=partial), x, h0, c0, mask)
