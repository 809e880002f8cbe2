"""Recurrent cells: Nematus's GRU, the GRU and the LSTM of the authors' Theano code, with any norm.

As functions of their parameters and as modules. Sequences are time-major: x (length, batch, features), mask (length,
batch), states (batch, features). The dtype is that of the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from rmsnorm.nematus.cells import PARTIAL, CellNorm, gru_names
from rmsnorm.nematus.config import Bias
from rmsnorm.nematus.torch.parameters import Parameters, leaves, normalize, project

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
    more = [] if from_input is None else [from_input]
    if bias == "outside":
        more.append((p["gates_bias"], p["proposal_bias"]))
    r, u = sum((each for each, _ in more), gates).sigmoid().chunk(2, -1)
    candidate = sum((each for _, each in more), r * proposal).tanh()
    return u * h + (1 - u) * candidate


def nematus_deep_step(
    p: Parameters, h: Tensor, from_input: tuple[Tensor, Tensor], biases: Sequence[Bias], first: int = 0
) -> Tensor:
    """One step of gru<first> with what comes from the input, then of the GRUs after it, without any."""
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
    # Unbound, and not one step after another picked out: the gradient of that would be as long as the sequence.
    steps = list(zip(*(each.unbind() for each in nematus_input(p / "gru0", x, biases[0])), strict=True))
    masks = None if mask is None else mask.to(x.dtype)[..., None].unbind()
    h, states = h0, []
    for t in range(len(steps))[:: -1 if reverse else 1]:
        new = nematus_deep_step(p, h, steps[t], biases)
        if masks is not None:
            new = masks[t] * new + (1 - masks[t]) * h if masking == "carry" else masks[t] * new
        h = new
        states.append(h)
    return torch.stack(states[:: -1 if reverse else 1])


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
    """Nematus's GRU with deep transition.

        r, u = sigmoid(norm(h U) + norm(x W + b))        h' = u h + (1 - u) tanh(r norm(h Ux) + norm(x Wx + bx))

    Args:
        x: (length, batch, features).
        h0: (batch, state).
        parameters: by Nematus's names, ``gru0/state_to_gates`` and so on; transitions ``gru1/...`` have no input.
        biases: where each GRU of a step adds its bias: inside the norm of what comes from the ``input`` or from the
            ``state``, ``outside`` of both, or ``none``. As many as there are GRUs.
        mask: (length, batch), 1 where there is a word.
        masking: ``zero`` multiplies the state by the mask; ``carry`` keeps the old state, as Theano does.
        reverse: from the last word to the first.
        norm: ``none``, ``layer``, ``rms``, or ``prms`` over the first ``partial`` of the features.

    Returns:
        The states, (length, batch, state).

    Raises:
        ValueError: the norm is none of these.
        KeyError: a parameter is missing.

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
    """The GRU of the authors' Theano code: ``gru``, ``lngru``, ``rlngru``.

        r, u = sigmoid(norm(h U; s3) + norm(x W + b; s1))
        h' = u h + (1 - u) tanh(r norm(h Ux; s4) + norm(x Wx + bx; s2)),    then m h' + (1 - m) h

    Args:
        x: (length, batch, features).
        h0: (batch, state).
        parameters: W, U, b, Wx, Ux, bx; with a norm the gains s1 to s4; with LayerNorm the offsets b1 to b4 too.
        mask: m, (length, batch), any numbers.
        norm: ``none``, ``layer``, ``rms``, or ``prms`` over the first ``partial`` of the features.

    Returns:
        The states, (length, batch, state).

    Raises:
        ValueError: the norm is none of these.
        KeyError: a parameter is missing.

    Source: Zhang & Sennrich 2019, layers.py.

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
    """The LSTM of the authors' Theano code: ``lstm``, ``lnlstm``, ``rlnlstm``.

        i, f, o, g = norm(x W + b; s1) + norm(h U; s2) + b,    sigmoid of i, f, o and tanh of g
        c' = f c + i g,    then m c' + (1 - m) c;    h' = o tanh(norm(c'; s3)),    then m h' + (1 - m) h

    b is added twice, as that code does.

    Args:
        x: (length, batch, features).
        h0, c0: (batch, state).
        parameters: W, U, b; with a norm the gains s1 to s3; with LayerNorm the offsets b1 to b3 too.
        mask: m, (length, batch), any numbers.
        norm: ``none``, ``layer``, ``rms``, or ``prms`` over the first ``partial`` of the features.

    Returns:
        (h, c), each (length, batch, state).

    Raises:
        ValueError: the norm is none of these.
        KeyError: a parameter is missing.

    Source: Zhang & Sennrich 2019, README and layers.py.

    Example:
        >>> weights = {"W": torch.ones((1, 4)), "U": torch.ones((1, 4)), "b": torch.zeros(4)}
        >>> h, c = lstm(torch.zeros((1, 1, 1)), torch.ones((1, 1)), torch.ones((1, 1)), weights)
        >>> h.ravel(), c.ravel()
        (tensor([0.6277]), tensor([1.2878]))
    """
    p = Parameters(parameters, norm, partial=partial)
    below = project(p, x, "W", "b", ("s1", "b1")).unbind()
    masks = [None] * len(x) if mask is None else mask.to(x.dtype)[..., None].unbind()
    h, c, states = h0, c0, []
    for each, m in zip(below, masks, strict=True):
        h, c = lstm_step(p, h, c, each, m)
        states.append((h, c))
    hs, cs = zip(*states, strict=True)
    return torch.stack(hs), torch.stack(cs)


def lstm_step(p: Parameters, h: Tensor, c: Tensor, below: Tensor, m: Tensor | None) -> tuple[Tensor, Tensor]:
    i, f, o, g = (below + project(p, h, "U", None, ("s2", "b2")) + p["b"]).chunk(4, -1)
    new_c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    if m is not None:
        new_c = m * new_c + (1 - m) * c
    new_h = o.sigmoid() * normalize(p, new_c, "s3", "b3").tanh()
    return new_h if m is None else m * new_h + (1 - m) * h, new_c
