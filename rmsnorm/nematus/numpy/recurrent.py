"""The recurrent cells: Nematus's GRU, the GRU and the LSTM of the authors' Theano code, with any norm.

Sequences are time-major: x (length, batch, features), mask (length, batch), states (batch, features). The dtype is that
of the arguments. The golden: every function has its gradients by back-propagation through time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from rmsnorm.nematus.cells import PARTIAL, CellNorm, gru_names
from rmsnorm.nematus.config import Bias
from rmsnorm.nematus.numpy.parameters import Array, Parameters, leaves, normalise, project, rows, sigmoid

__all__ = ["gru", "gru_vjp", "lstm", "lstm_vjp", "nematus_gru", "nematus_gru_vjp"]


def nematus_input(p: Parameters, x: Array, bias: Bias) -> tuple[Array, Array, Callable[[Array, Array], Array]]:
    """What the input of a Nematus GRU adds to its gates and to its proposal, for any number of steps at once."""
    inside = bias == "input"
    gates, gates_pullback = project(
        p, x, "input_to_gates", "gates_bias" if inside else None, leaves(p, "gates_x_norm/")
    )
    proposal, proposal_pullback = project(
        p, x, "input_to_proposal", "proposal_bias" if inside else None, leaves(p, "proposal_x_norm/")
    )
    return gates, proposal, lambda dgates, dproposal: gates_pullback(dgates) + proposal_pullback(dproposal)


def nematus_step(
    p: Parameters, h: Array, from_input: tuple[Array, Array] | None, bias: Bias
) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
    """One step of a Nematus GRU; its pullback returns the gradients of h and of both parts of ``from_input``.

    r, u = sigmoid(norm(h U) + gates of the input);   h' = u h + (1 - u) tanh(r norm(h Ux) + proposal of the input)
    """
    inside = bias == "state"
    gates_state, gates_pullback = project(
        p, h, "state_to_gates", "gates_bias" if inside else None, leaves(p, "gates_state_norm/")
    )
    proposal_state, proposal_pullback = project(
        p, h, "state_to_proposal", "proposal_bias" if inside else None, leaves(p, "proposal_state_norm/")
    )
    gates, proposal = from_input or (np.zeros((), h.dtype), np.zeros((), h.dtype))
    if bias == "outside":
        gates, proposal = gates + p["gates_bias"], proposal + p["proposal_bias"]
    r, u = np.split(sigmoid(gates_state + gates), 2, axis=-1)
    candidate = np.tanh(r * proposal_state + proposal)
    new = u * h + (1 - u) * candidate

    def pullback(dnew: Array) -> tuple[Array, Array, Array]:
        dproposal = dnew * (1 - u) * (1 - candidate**2)
        dgates = np.concatenate((dproposal * proposal_state * r * (1 - r), dnew * (h - candidate) * u * (1 - u)), -1)
        if bias == "outside":
            p.add("gates_bias", rows(dgates).sum(axis=0))
            p.add("proposal_bias", rows(dproposal).sum(axis=0))
        return dnew * u + gates_pullback(dgates) + proposal_pullback(dproposal * r), dgates, dproposal

    return new, pullback


def nematus_deep_step(
    p: Parameters, h: Array, from_input: tuple[Array, Array], biases: Sequence[Bias], first: int = 0
) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
    """One step of gru<first> with the projected input, then one step of each GRU after it, which have no input."""
    h, pullback_first = nematus_step(p / f"gru{first}", h, from_input, biases[0])
    pullbacks = []
    for index, bias in enumerate(biases[1:], start=first + 1):
        h, pullback_next = nematus_step(p / f"gru{index}", h, None, bias)
        pullbacks.append(pullback_next)

    def pullback(dh: Array) -> tuple[Array, Array, Array]:
        for pullback_next in reversed(pullbacks):
            dh, _, _ = pullback_next(dh)
        return pullback_first(dh)

    return h, pullback


def nematus_level(
    p: Parameters,
    x: Array,
    h0: Array,
    biases: Sequence[Bias],
    *,
    mask: Array | None = None,
    masking: Literal["zero", "carry"] = "zero",
    reverse: bool = False,
) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    """A level of GRUs over a sequence; its pullback returns the gradients of x and h0."""
    gates, proposal, input_pullback = nematus_input(p / "gru0", x, biases[0])
    order = range(len(x))[:: -1 if reverse else 1]
    masks = np.ones(x.shape[:2], x.dtype) if mask is None else np.asarray(mask, x.dtype)
    carries = np.asarray(masking == "carry", x.dtype)
    states = np.empty((*x.shape[:2], h0.shape[-1]), np.result_type(x, h0))
    pullbacks = []
    h = h0
    for t in order:
        new, pullback_step = nematus_deep_step(p, h, (gates[t], proposal[t]), biases)
        m = masks[t][:, None]
        states[t] = h = m * new + carries * (1 - m) * h
        pullbacks.append(pullback_step)

    def pullback(dstates: Array) -> tuple[Array, Array]:
        dgates, dproposal = np.empty_like(gates), np.empty_like(proposal)
        dh = np.zeros_like(h0)
        for t, pullback_step in zip(reversed(order), reversed(pullbacks), strict=True):
            dnew, m = dh + dstates[t], masks[t][:, None]
            dh, dgates[t], dproposal[t] = pullback_step(m * dnew)
            dh = dh + carries * (1 - m) * dnew
        return input_pullback(dgates, dproposal), dh

    return states, pullback


def nematus_gru(
    x: Array,
    h0: Array,
    parameters: Mapping[str, Array],
    *,
    biases: Sequence[Bias] = ("input",),
    mask: Array | None = None,
    masking: Literal["zero", "carry"] = "zero",
    reverse: bool = False,
    norm: CellNorm = "none",
    partial: float = PARTIAL,
) -> Array:
    """Nematus's GRU with deep transition: see rmsnorm.nematus.protocol.Cells.nematus_gru.

    Example:
        >>> weights = {"gru0/state_to_gates": np.ones((1, 2)), "gru0/state_to_proposal": np.ones((1, 1))}
        >>> weights |= {"gru0/input_to_gates": np.ones((1, 2)), "gru0/input_to_proposal": np.ones((1, 1))}
        >>> weights |= {"gru0/gates_bias": np.zeros(2), "gru0/proposal_bias": np.zeros(1)}
        >>> nematus_gru(np.zeros((2, 1, 1)), np.ones((1, 1)), weights).round(4).ravel()
        array([0.8988, 0.802 ])
    """
    p = Parameters(parameters, norm, partial=partial)
    return nematus_level(p, x, h0, biases, mask=mask, masking=masking, reverse=reverse)[0]


def nematus_gru_vjp(
    dh: Array,
    x: Array,
    h0: Array,
    parameters: Mapping[str, Array],
    *,
    biases: Sequence[Bias] = ("input",),
    mask: Array | None = None,
    masking: Literal["zero", "carry"] = "zero",
    reverse: bool = False,
    norm: CellNorm = "none",
    partial: float = PARTIAL,
) -> tuple[Array, Array, dict[str, Array]]:
    """Gradients of nematus_gru: (dx, dh0, those of the parameters by name); dh is the gradient of the states.

    Example:
        >>> weights = {"gru0/state_to_gates": np.ones((1, 2)), "gru0/state_to_proposal": np.ones((1, 1))}
        >>> weights |= {"gru0/input_to_gates": np.ones((1, 2)), "gru0/input_to_proposal": np.ones((1, 1))}
        >>> weights |= {"gru0/gates_bias": np.zeros(2), "gru0/proposal_bias": np.zeros(1)}
        >>> dx, dh0, gradients = nematus_gru_vjp(np.ones((2, 1, 1)), np.zeros((2, 1, 1)), np.ones((1, 1)), weights)
        >>> dh0.round(4)
        array([[1.873]])
    """
    p = Parameters(parameters, norm, partial=partial)
    _, pullback = nematus_level(p, x, h0, biases, mask=mask, masking=masking, reverse=reverse)
    dx, dh0 = pullback(dh)
    return dx, dh0, p.gradients


def gru(
    x: Array,
    h0: Array,
    parameters: Mapping[str, Array],
    *,
    mask: Array | None = None,
    norm: CellNorm = "none",
    partial: float = PARTIAL,
) -> Array:
    """The GRU of the authors' Theano code: see rmsnorm.nematus.protocol.Cells.gru.

    Example:
        >>> weights = {"W": np.ones((1, 2)), "U": np.ones((1, 2)), "b": np.zeros(2)}
        >>> weights |= {"Wx": np.ones((1, 1)), "Ux": np.ones((1, 1)), "bx": np.zeros(1)}
        >>> gru(np.zeros((2, 1, 1)), np.ones((1, 1)), weights, mask=np.array([[1.0], [0.0]])).round(4).ravel()
        array([0.8988, 0.8988])
    """
    names = gru_names(norm)
    renamed = {names[name]: value for name, value in parameters.items()}
    return nematus_gru(x, h0, renamed, mask=mask, masking="carry", norm=norm, partial=partial)


def gru_vjp(
    dh: Array,
    x: Array,
    h0: Array,
    parameters: Mapping[str, Array],
    *,
    mask: Array | None = None,
    norm: CellNorm = "none",
    partial: float = PARTIAL,
) -> tuple[Array, Array, dict[str, Array]]:
    """Gradients of gru: (dx, dh0, those of the parameters by name); dh is the gradient of the states.

    Example:
        >>> weights = {"W": np.ones((1, 2)), "U": np.ones((1, 2)), "b": np.zeros(2)}
        >>> weights |= {"Wx": np.ones((1, 1)), "Ux": np.ones((1, 1)), "bx": np.zeros(1)}
        >>> gru_vjp(np.ones((2, 1, 1)), np.zeros((2, 1, 1)), np.ones((1, 1)), weights)[1].round(4)
        array([[1.873]])
    """
    names = gru_names(norm)
    renamed = {names[name]: value for name, value in parameters.items()}
    dx, dh0, gradients = nematus_gru_vjp(dh, x, h0, renamed, mask=mask, masking="carry", norm=norm, partial=partial)
    return dx, dh0, {name: gradients[names[name]] for name in parameters}


def lstm(
    x: Array,
    h0: Array,
    c0: Array,
    parameters: Mapping[str, Array],
    *,
    mask: Array | None = None,
    norm: CellNorm = "none",
    partial: float = PARTIAL,
) -> tuple[Array, Array]:
    """The LSTM of the authors' Theano code: see rmsnorm.nematus.protocol.Cells.lstm.

    Example:
        >>> weights = {"W": np.ones((1, 4)), "U": np.ones((1, 4)), "b": np.zeros(4)}
        >>> h, c = lstm(np.zeros((1, 1, 1)), np.ones((1, 1)), np.ones((1, 1)), weights)
        >>> h.round(4).item(), c.round(4).item()
        (0.6277, 1.2878)
    """
    return _lstm(Parameters(parameters, norm, partial=partial), x, h0, c0, mask)[0]


def lstm_vjp(
    dh: Array,
    dc: Array,
    x: Array,
    h0: Array,
    c0: Array,
    parameters: Mapping[str, Array],
    *,
    mask: Array | None = None,
    norm: CellNorm = "none",
    partial: float = PARTIAL,
) -> tuple[Array, Array, Array, dict[str, Array]]:
    """Gradients of lstm: (dx, dh0, dc0, those of the parameters by name); dh, dc are the gradients of the results.

    Example:
        >>> weights = {"W": np.ones((1, 4)), "U": np.ones((1, 4)), "b": np.zeros(4)}
        >>> one = np.ones((1, 1))
        >>> lstm_vjp(one[None], 0 * one[None], 0 * one[None], one, one, weights)[2].round(4)
        array([[0.1405]])
    """
    p = Parameters(parameters, norm, partial=partial)
    return *_lstm(p, x, h0, c0, mask)[1](dh, dc), p.gradients


def _lstm(
    p: Parameters, x: Array, h0: Array, c0: Array, mask: Array | None
) -> tuple[tuple[Array, Array], Callable[[Array, Array], tuple[Array, Array, Array]]]:
    below, below_pullback = project(p, x, "W", "b", ("s1", "b1"))
    masks = np.ones(x.shape[:2], x.dtype) if mask is None else np.asarray(mask, x.dtype)
    hs, cs, pullbacks = [], [], []
    h, c = h0, c0
    for t, m in enumerate(masks[:, :, None]):
        h, c, pullback_step = lstm_step(p, h, c, below[t], m)
        hs.append(h)
        cs.append(c)
        pullbacks.append(pullback_step)

    def pullback(dhs: Array, dcs: Array) -> tuple[Array, Array, Array]:
        dbelow = np.empty_like(below)
        dh, dc = np.zeros_like(h0), np.zeros_like(c0)
        for t in reversed(range(len(x))):
            dh, dc, dbelow[t] = pullbacks[t](dh + dhs[t], dc + dcs[t])
        return below_pullback(dbelow), dh, dc

    return (np.stack(hs), np.stack(cs)), pullback


def lstm_step(
    p: Parameters, h: Array, c: Array, below: Array, m: Array
) -> tuple[Array, Array, Callable[[Array, Array], tuple[Array, Array, Array]]]:
    before, before_pullback = project(p, h, "U", None, ("s2", "b2"))
    *gates, g = np.split(below + before + p["b"], 4, axis=-1)
    i, f, o = (sigmoid(gate) for gate in gates)
    g = np.tanh(g)
    new_c = m * (f * c + i * g) + (1 - m) * c
    normed, norm_pullback = normalise(p, new_c, "s3", "b3")
    output = np.tanh(normed)

    def pullback(dh: Array, dc: Array) -> tuple[Array, Array, Array]:
        do = m * dh * output
        dc = dc + norm_pullback(m * dh * o * (1 - output**2))
        inner = m * dc
        dgates = (inner * g * i * (1 - i), inner * c * f * (1 - f), do * o * (1 - o), inner * i * (1 - g**2))
        dpre = np.concatenate(dgates, axis=-1)
        p.add("b", rows(dpre).sum(axis=0))
        return (1 - m) * dh + before_pullback(dpre), (1 - m) * dc + inner * f, dpre

    return m * o * output + (1 - m) * h, new_c, pullback
