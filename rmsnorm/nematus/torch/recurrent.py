"""The recurrent cells: Nematus's GRU, the GRU and the LSTM of the authors' Theano code, with any norm.

Sequences are time-major: x (length, batch, features), mask (length, batch), states (batch, features). The dtype is that
of the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from rmsnorm.nematus.cells import PARTIAL, CellNorm, gru_names
from rmsnorm.nematus.config import Bias
from rmsnorm.nematus.torch.parameters import Parameters, leaves, normalise, project

__all__ = ["gru", "lstm", "nematus_gru"]


def nematus_input(p: Parameters, x: Tensor, bias: Bias) -> tuple[Tensor, Tensor]:
    """What the input of a Nematus GRU adds to its gates and to its proposal, for any number of steps at once."""
    inside = bias == "input"
    gates = project(p, x, "input_to_gates", "gates_bias" if inside else None, leaves(p, "gates_x_norm/"))
    proposal = project(p, x, "input_to_proposal", "proposal_bias" if inside else None, leaves(p, "proposal_x_norm/"))
    return gates, proposal


def nematus_step(p: Parameters, h: Tensor, from_input: tuple[Tensor, Tensor] | None, bias: Bias) -> Tensor:
    """One step of a Nematus GRU.

    r, u = sigmoid(norm(h U) + gates of the input);   h' = u h + (1 - u) tanh(r norm(h Ux) + proposal of the input)
    """
    inside = bias == "state"
    gates = project(p, h, "state_to_gates", "gates_bias" if inside else None, leaves(p, "gates_state_norm/"))
    proposal = project(
        p, h, "state_to_proposal", "proposal_bias" if inside else None, leaves(p, "proposal_state_norm/")
    )
    terms = [] if from_input is None else [from_input]
    if bias == "outside":
        terms.append((p["gates_bias"], p["proposal_bias"]))
    r, u = sum((of_gates for of_gates, _ in terms), gates).sigmoid().chunk(2, -1)
    candidate = sum((of_proposal for _, of_proposal in terms), r * proposal).tanh()
    return u * h + (1 - u) * candidate


def nematus_deep_step(
    p: Parameters, h: Tensor, from_input: tuple[Tensor, Tensor], biases: Sequence[Bias], first: int = 0
) -> Tensor:
    """One step of gru<first> with the projected input, then one step of each GRU after it, which have no input."""
    h = nematus_step(p / f"gru{first}", h, from_input, biases[0])
    for index, bias in enumerate(biases[1:], start=first + 1):
        h = nematus_step(p / f"gru{index}", h, None, bias)
    return h


def nematus_level(
    p: Parameters,
    x: Tensor,
    h0: Tensor,
    biases: Sequence[Bias],
    *,
    mask: Tensor | None = None,
    masking: Literal["zero", "carry"] = "zero",
    reverse: bool = False,
) -> Tensor:
    """A level of GRUs over a sequence."""
    from_input = nematus_input(p / "gru0", x, biases[0])
    # unbind, because the gradient of picking out one step has the length of the whole sequence.
    steps = list(zip(*(part.unbind() for part in from_input), strict=True))
    masks = None if mask is None else mask.to(x.dtype)[..., None].unbind()
    h, states = h0, []
    for t in range(len(steps))[:: -1 if reverse else 1]:
        new = nematus_deep_step(p, h, steps[t], biases)
        if masks is not None:
            new = masks[t] * new + (1 - masks[t]) * h if masking == "carry" else masks[t] * new
        h = new
        states.append(h)
    return torch.stack(states[:: -1 if reverse else 1]) if states else from_input[1]


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
        >>> weights = {"gru0/state_to_gates": torch.ones((1, 2)), "gru0/state_to_proposal": torch.ones((1, 1))}
        >>> weights |= {"gru0/input_to_gates": torch.ones((1, 2)), "gru0/input_to_proposal": torch.ones((1, 1))}
        >>> weights |= {"gru0/gates_bias": torch.zeros(2), "gru0/proposal_bias": torch.zeros(1)}
        >>> nematus_gru(torch.zeros((2, 1, 1)), torch.ones((1, 1)), weights).ravel()
        tensor([0.8988, 0.8020])
    """
    p = Parameters(parameters, norm, partial=partial)
    return nematus_level(p, x, h0, biases, mask=mask, masking=masking, reverse=reverse)


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
        >>> weights = {"W": torch.ones((1, 2)), "U": torch.ones((1, 2)), "b": torch.zeros(2)}
        >>> weights |= {"Wx": torch.ones((1, 1)), "Ux": torch.ones((1, 1)), "bx": torch.zeros(1)}
        >>> gru(torch.zeros((2, 1, 1)), torch.ones((1, 1)), weights, mask=torch.tensor([[1.0], [0.0]])).ravel()
        tensor([0.8988, 0.8988])
    """
    names = gru_names(norm)
    renamed = {names[name]: value for name, value in parameters.items()}
    return nematus_gru(x, h0, renamed, mask=mask, masking="carry", norm=norm, partial=partial)


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
        >>> weights = {"W": torch.ones((1, 4)), "U": torch.ones((1, 4)), "b": torch.zeros(4)}
        >>> h, c = lstm(torch.zeros((1, 1, 1)), torch.ones((1, 1)), torch.ones((1, 1)), weights)
        >>> h.ravel(), c.ravel()
        (tensor([0.6277]), tensor([1.2878]))
    """
    return _lstm(Parameters(parameters, norm, partial=partial), x, h0, c0, mask)


def _lstm(p: Parameters, x: Tensor, h0: Tensor, c0: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    below = project(p, x, "W", "b", ("s1", "b1"))
    masks = [None] * len(below) if mask is None else mask.to(x.dtype)[..., None].unbind()
    h, c, states = h0, c0, []
    for from_input, m in zip(below.unbind(), masks, strict=True):
        h, c = lstm_step(p, h, c, from_input, m)
        states.append((h, c))
    if not states:
        return below[..., : h.shape[-1]], below[..., : c.shape[-1]]
    hs, cs = zip(*states, strict=True)
    return torch.stack(hs), torch.stack(cs)


def lstm_step(p: Parameters, h: Tensor, c: Tensor, below: Tensor, m: Tensor | None) -> tuple[Tensor, Tensor]:
    i, f, o, g = (below + project(p, h, "U", None, ("s2", "b2")) + p["b"]).chunk(4, -1)
    new_c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    if m is not None:
        new_c = m * new_c + (1 - m) * c
    new_h = o.sigmoid() * normalise(p, new_c, "s3", "b3").tanh()
    return new_h if m is None else m * new_h + (1 - m) * h, new_c
