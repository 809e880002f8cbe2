"""RNNSearch's decoder in training by compiled steps: GRUs, and between the first and the second one the attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from rmsnorm.nematus.config import Bias
from rmsnorm.nematus.torch import compiled
from rmsnorm.nematus.torch.compiled import GRU, Job, Norm, maker, norm_of, sums
from rmsnorm.nematus.torch.parameters import Parameters
from rmsnorm.torch_impl.memory import is_plain

Pair = tuple[Tensor, Tensor]


def decoder(
    plain: Callable[..., Pair], p: Parameters, from_word: Pair, h0: Tensor, memory: Sequence[Tensor],
    biases: Sequence[Bias],
) -> Pair:  # fmt: skip
    """The states after each word and what they attend to; by plain(p, ...) where no compiled steps can.

    Args:
        memory: hidden (length, rows, size), context (length, rows, features) and mask (length, rows) of the source.
        biases: of the GRUs, that of the first one aside.
    """
    hidden, context, mask = memory
    n, size, features = h0.shape[-1], hidden.shape[-1], context.shape[-1]
    own: tuple[Bias, ...] = ("none", *biases)
    if not torch.is_grad_enabled() or set(biases) != {"state"} or not compiled.is_used(p, h0):
        return plain(p, from_word, h0, memory, biases)
    shapes = {
        **compiled.gru_shapes(n, own, p.norm), "attention/state_to_hidden": (n, size),
        "attention/hidden_to_score": (size, 1), "gru1/input_to_gates": (features, 2 * n),
        "gru1/input_to_proposal": (features, n),
    }  # fmt: skip
    if p.norm != "none":
        shapes |= {"attention/hidden_state_norm/scale": (size,)}
        shapes |= {"gru1/gates_x_norm/scale": (2 * n,), "gru1/proposal_x_norm/scale": (n,)}
    offsets = [f"{name[:-5]}offset" for name in shapes if name.endswith("/scale")]
    rows, words = from_word[0].shape[:-1], mask.shape
    sizes = ((*rows, 2 * n), (*rows, n), (*rows[1:], n), (*words, size), (*words, features))
    if (
        0 in rows
        or words[1:] != rows[1:]
        or not compiled.serves(p, shapes, offsets, (*from_word, h0, hidden, context), sizes, None)
    ):
        return plain(p, from_word, h0, memory, biases)
    if mask.requires_grad or mask.dtype is not h0.dtype or not is_plain(mask):
        return plain(p, from_word, h0, memory, biases)

    def again(gates: Tensor, proposal: Tensor, h0: Tensor, _: None, *others: Tensor) -> Pair:
        values = Parameters(dict(zip(shapes, others[3:], strict=True)), p.norm, partial=p.partial, eps=p.eps)
        return plain(values, (gates, proposal), h0, others[:3], biases)

    settings = p.norm, p.partial, p.eps
    cell = GRU(tuple(shapes), own, norm_of(*settings, 2 * n, n), middle=Attention(norm_of(*settings, size, size)))
    return cast(Pair, compiled.computed(cell, again, *from_word, h0, None, *memory, *(p[name] for name in shapes)))


class Attention(NamedTuple):
    """What is between the first GRU of a decoder and the second one, as _attend of rnnsearch.py and nematus_input."""

    norm: Norm

    def forward(self, cell: GRU, memory: Sequence[Tensor], p: Mapping[str, Tensor], states: Tensor) -> _Forward:
        return _Forward(self, cell, memory, p, states)

    def backward(self, *arguments: Any) -> _Backward:
        return _Backward(self, *arguments)


class _Forward:
    """``step`` leaves what the second GRU adds to its gates and its proposal in ``below``."""

    def __init__(
        self, attention: Attention, cell: GRU, memory: Sequence[Tensor], p: Mapping[str, Tensor], states: Tensor
    ) -> None:
        self.hidden, self.context, self.mask = memory
        steps, rows, n = states.shape
        length, _, size = self.hidden.shape
        new = maker(states)
        self.to_hidden, self.v = p["attention/state_to_hidden"], p["attention/hidden_to_score"][:, 0]
        self.matrix = torch.cat((p["gru1/input_to_gates"], p["gru1/input_to_proposal"]), 1)
        gains = _gains(p, states)
        a, self.query, inverse = (
            new(steps, rows, size),
            new(steps, rows, size),
            new(steps, rows, 2, dtype=torch.float64),
        )
        b, y, inverses = new(steps, rows, 3 * n), new(steps, rows, 3 * n), new(steps, rows, 2, dtype=torch.float64)
        self.below = y[..., : 2 * n], y[..., 2 * n :]
        self.activated, self.weights = new(steps, length, rows, size), new(steps, length, rows)
        self.attended = new(steps, rows, self.context.shape[-1])
        self.products = a.unbind(), b.unbind()
        self.jobs = (
            Job("norm_forward", states[0], size, attention.norm, left=size, a=a, y=self.query, inverse=inverse,
                gain=gains[0], right=0),
            Job("norm_forward", states[0], 3 * n, cell.norm, left=2 * n, a=b, y=y, inverse=inverses, gain=gains[1],
                right=n),
        )  # fmt: skip
        self.kept = [a, inverse, b, inverses, self.activated, self.weights, self.attended, self.matrix, *gains]

    def step(self, t: int, state: Tensor) -> None:
        torch.mm(state, self.to_hidden, out=self.products[0][t])
        self.jobs[0].run(t)
        activated = torch.add(self.hidden, self.query[t], out=self.activated[t]).tanh_()
        scores = activated @ self.v
        scores = (scores - scores.amax(0)).exp_().mul_(self.mask)  # of all scores, padding too, as in Nematus
        weights = torch.div(scores, scores.sum(0), out=self.weights[t])
        torch.bmm(weights.t()[:, None], self.context.transpose(0, 1), out=self.attended[t][:, None])
        torch.mm(self.attended[t], self.matrix, out=self.products[1][t])
        self.jobs[1].run(t)


class _Backward:
    """``step`` adds to the gradient of the first GRU's state; the rest is summed over all steps at the end."""

    def __init__(
        self, attention: Attention, cell: GRU, memory: Sequence[Tensor], p: Mapping[str, Tensor], states: Tensor,
        kept: Sequence[Tensor], dbelow: Sequence[Tensor], dattended: Tensor,
    ) -> None:  # fmt: skip
        self.states, self.dbelow, self.dattended = states, dbelow, dattended.clone()
        _, self.context, _ = memory
        a, inverse, b, inverses, self.activated, self.weights, self.attended, self.matrix, *gains = kept
        rows, n = states.shape[1:]
        self.size, new = a.shape[-1], maker(states)
        self.to_hidden, self.v = p["attention/state_to_hidden"], p["attention/hidden_to_score"][:, 0]
        self.da, self.db, self.dscores = torch.empty_like(a), torch.empty_like(b), torch.empty_like(self.weights)
        self.dhidden = new(*self.activated.shape[1:]).zero_()
        self.dgains = sums(rows, self.size), sums(rows, 3 * n)
        self.jobs = (
            Job("norm_backward", states[0], self.size, attention.norm, left=self.size, a=a, v=self.da, inverse=inverse,
                gain=gains[0], right=0, dgain=self.dgains[0]),
            Job("norm_backward", states[0], 3 * n, cell.norm, left=2 * n, a=b, v=self.db, inverse=inverses,
                gain=gains[1], right=n, dgain=self.dgains[1]),
        )  # fmt: skip

    def step(self, t: int, dh: Tensor) -> None:
        torch.cat([part[t] for part in self.dbelow], 1, out=self.db[t])
        self.jobs[1].run(t)
        dattended = self.dattended[t].addmm_(self.db[t], self.matrix.t())
        dweights = torch.bmm(self.context.transpose(0, 1), dattended[..., None])[..., 0].t()
        weights, activated = self.weights[t], self.activated[t]
        dscores = torch.mul(weights, dweights - (weights * dweights).sum(0), out=self.dscores[t])
        dactivated = (1 - activated * activated).mul_(self.v).mul_(dscores[..., None])
        self.dhidden += dactivated
        torch.sum(dactivated, 0, out=self.da[t])
        self.jobs[0].run(t)
        dh.addmm_(self.da[t], self.to_hidden.t())

    def of_others(self) -> list[Tensor | None]:
        """The gradients of hidden, context and mask."""
        dcontext = torch.bmm(self.weights.permute(2, 1, 0), self.dattended.transpose(0, 1)).transpose(0, 1)
        return [self.dhidden, dcontext, None]

    def gradients(self) -> dict[str, Tensor]:
        """Those of the parameters, by name."""
        n, (da, db) = self.states.shape[-1], (part.flatten(0, 1) for part in (self.da, self.db))
        sizes, dgains = (2 * n, n), [part.sum(0).to(da.dtype) for part in self.dgains]
        dgates, dproposal = (self.attended.flatten(0, 1).t() @ db).split(sizes, 1)
        return {
            "attention/state_to_hidden": self.states.flatten(0, 1).t() @ da,
            "attention/hidden_to_score": self.activated.reshape(-1, self.size).t() @ self.dscores.reshape(-1, 1),
            "attention/hidden_state_norm/scale": dgains[0],
            "gru1/input_to_gates": dgates,
            "gru1/input_to_proposal": dproposal,
            **dict(zip(("gru1/gates_x_norm/scale", "gru1/proposal_x_norm/scale"), dgains[1].split(sizes), strict=True)),
        }


def _gains(p: Mapping[str, Tensor], states: Tensor) -> tuple[Tensor, Tensor]:
    """Of the norm of the state and of both norms of what is attended to; 1 without a norm."""
    size, n = p["attention/state_to_hidden"].shape[1], states.shape[-1]
    if "attention/hidden_state_norm/scale" not in p:
        return states.new_ones(size), states.new_ones(3 * n)
    gains = torch.cat((p["gru1/gates_x_norm/scale"], p["gru1/proposal_x_norm/scale"]))
    return p["attention/hidden_state_norm/scale"].contiguous(), gains
