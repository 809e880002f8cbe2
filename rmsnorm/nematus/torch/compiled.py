"""Whole sequences of a cell by compiled steps, on the CPU: a matrix product and one pass over its rows for each step.

The gradients of the weights are one product over all steps at the end. Derivatives of gradients, and batches of
gradients, come from the plain operations, which the caller passes as a function of the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rmsnorm import cpu
from rmsnorm.nematus.cells import CellNorm, nematus_gru_shapes
from rmsnorm.nematus.config import Bias
from rmsnorm.nematus.torch.parameters import Parameters
from rmsnorm.torch_impl.memory import is_plain
from rmsnorm.torch_impl.rounding import dtype_name, is_watched
from rmsnorm.torch_impl.rows import openmp_threads
from rmsnorm.variants import Variant

Plain: TypeAlias = Callable[..., Any]  # of the same arguments, by operations of PyTorch
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

_CPU: Final = torch.device("cpu")


def gru(
    plain: Plain, p: Parameters, from_input: tuple[Tensor, Tensor], h0: Tensor, mask: Tensor | None,
    biases: Sequence[Bias], carries: bool, reverse: bool,
) -> Tensor:  # fmt: skip
    """The states of GRUs one after another over a sequence; by plain(p, ...) where no compiled steps can."""
    if not is_used(p, h0):
        return plain(p, from_input, h0, mask, biases, carries, reverse)
    n, rows = h0.shape[1], from_input[0].shape[:-1]
    # What is left to the steps: a bias inside the norm of the state, or outside of both norms where there is no input.
    own: tuple[Bias, ...] = tuple(
        bias if bias == "state" or (index and bias == "outside") else "none" for index, bias in enumerate(biases)
    )
    shapes = gru_shapes(n, own, p.norm)
    sizes = ((*rows, 2 * n), (*rows, n), (*rows[1:], n))
    offsets = [f"{name[:-5]}offset" for name in shapes if name.endswith("/scale")]
    if not serves(p, shapes, offsets, (*from_input, h0), sizes, mask):
        return plain(p, from_input, h0, mask, biases, carries, reverse)
    gates, proposal = from_input
    if biases[0] == "outside":
        gates, proposal = gates + p["gru0/gates_bias"], proposal + p["gru0/proposal_bias"]

    def again(gates: Tensor, proposal: Tensor, h0: Tensor, mask: Tensor | None, *weights: Tensor) -> Tensor:
        values = Parameters(dict(zip(shapes, weights, strict=True)), p.norm, partial=p.partial, eps=p.eps)
        return cast(Tensor, plain(values, (gates, proposal), h0, mask, own, carries, reverse))

    cell = GRU(tuple(shapes), own, norm_of(p.norm, p.partial, p.eps, 2 * n, n), carries, reverse)
    return cast(Tensor, computed(cell, again, gates, proposal, h0, mask, *(p[name] for name in shapes)))


def lstm(
    plain: Plain, p: Parameters, below: Tensor, h0: Tensor, c0: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The states and cells of an LSTM over a sequence; by plain(p, ...) where no compiled steps can."""
    if not is_used(p, h0):
        return cast(tuple[Tensor, Tensor], plain(p, below, h0, c0, mask))
    n, rows = h0.shape[1], below.shape[:-1]
    shapes: dict[str, tuple[int, ...]] = {"U": (n, 4 * n)}
    if p.norm != "none":
        shapes |= {"s2": (4 * n,), "s3": (n,)}
    sizes = ((*rows, 4 * n), (*rows[1:], n), (*rows[1:], n), (4 * n,))
    if not serves(p, shapes, ("b2", "b3"), (below, h0, c0, p["b"]), sizes, mask):
        return cast(tuple[Tensor, Tensor], plain(p, below, h0, c0, mask))

    def again(below: Tensor, h0: Tensor, c0: Tensor, mask: Tensor | None, *weights: Tensor) -> Any:
        values = dict(zip(shapes, weights, strict=True)) | {"b": below.new_zeros(4 * n)}
        return plain(Parameters(values, p.norm, partial=p.partial, eps=p.eps), below, h0, c0, mask)

    cell = LSTM(norm_of(p.norm, p.partial, p.eps, 4 * n, n))
    results = computed(cell, again, below + p["b"], h0, c0, mask, *(p[name] for name in shapes))
    return cast(tuple[Tensor, Tensor], results)


def is_used(p: Parameters, h0: Tensor) -> bool:
    """Whether compiled steps may be used: they know the norm, nothing looks on, and numba works."""
    return (
        p.norm != "layer"
        and h0.ndim == 2
        and not is_watched()
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled("cpu")
        and cpu.is_available()
    )


def serves(
    p: Parameters, shapes: Shapes, offsets: Sequence[str], tensors: Sequence[Tensor], sizes: Sequence[tuple[int, ...]],
    mask: Tensor | None,
) -> bool:  # fmt: skip
    """Whether compiled steps can read the parameters of these shapes, and the tensors of these sizes, as they are.

    The sizes of the first tensor are time, rows and features. The offsets of the norms must not be there, nor dropout
    of the input of a matrix, nor a gradient of the mask.
    """
    weights, dtype = [p.get(name) for name in shapes], tensors[0].dtype
    pairs = [*zip(tensors, sizes, strict=True), *zip(weights, shapes.values(), strict=True)]
    if mask is not None:
        pairs.append((mask, sizes[0][:2]))
    return (
        dtype in (torch.float32, torch.float64)
        and all(tensor is not None and tensor.dtype is dtype and tensor.shape == shape for tensor, shape in pairs)
        and len(sizes[0]) == 3
        and 0 not in sizes[0][1:]
        and not (mask is not None and mask.requires_grad)
        and not (p.dropout and any(p.dropout.rates[p.scope + name] for name, shape in shapes.items() if len(shape) > 1))
        and all(p.get(name) is None for name in offsets)
        and is_plain(*(tensor for tensor, _ in pairs))
    )


def computed(cell: Any, plain: Plain, *tensors: Tensor | None) -> Any:
    """The states of a cell, one of the classes below, over a sequence."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return _Sequence.apply(cell, plain, *tensors)
    return cell.forward(tensors, keeps=False)[0]


class _Sequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cell: Any, plain: Plain, *tensors: Tensor | None) -> Any:
        outputs, kept = cell.forward(tensors, keeps=True)
        ctx.cell, ctx.plain, ctx.count = cell, plain, len(tensors)
        ctx.save_for_backward(*tensors, *kept)
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        saved = ctx.saved_tensors  # once: a checkpoint lets nobody look twice
        tensors, kept = saved[: ctx.count], saved[ctx.count :]
        if not (torch.is_grad_enabled() or is_watched()) and is_plain(*cotangents):
            return None, None, *ctx.cell.backward(tensors, kept, *(c.contiguous() for c in cotangents))
        creates, needs = torch.is_grad_enabled(), ctx.needs_input_grad[2:]
        with torch.enable_grad():  # with names of their own: one of the tensors may have been computed from another one
            own = [t.view_as(t) if needed else t for t, needed in zip(tensors, needs, strict=True)]
            outputs = ctx.plain(*own)
        wanted = [t for t, needed in zip(own, needs, strict=True) if needed]
        gradients = iter(torch.autograd.grad(outputs, wanted, cotangents, None, creates, allow_unused=True))
        return None, None, *(next(gradients) if needed else None for needed in needs)


class Norm(NamedTuple):
    """How a cell normalises two rows: how many numbers count in the statistic of each, none without a norm; eps."""

    counted: tuple[int, int]
    eps: float


@lru_cache
def norm_of(norm: CellNorm, partial: float, eps: float, n: int, m: int) -> Norm:
    """The norm of rows of n and of m numbers."""
    variant = Variant.get("nematus").replace(partial=partial if norm == "prms" else None)
    return Norm((0, 0) if norm == "none" else (variant.counted(n), variant.counted(m)), eps)


@lru_cache
def gru_shapes(n: int, biases: tuple[Bias, ...], norm: CellNorm) -> Shapes:
    """The parameters of GRUs one after another that their steps use; biases as for GRU."""
    unused = ("/input_", "_x_norm/")
    shapes = nematus_gru_shapes(1, n, biases, norm)
    return {name: shape for name, shape in shapes.items() if not any(part in name for part in unused)}


class GRU(NamedTuple):
    """GRUs one after another, each with the state of the one before, as nematus_deep_step of recurrent.py.

    Tensors: gates and proposal of the input, the first state, the mask, and the parameters of these names; before the
    parameters those of what is between the first GRU and the second, if there is something. Results: the states, and
    then those of what is between.
    """

    names: tuple[str, ...]
    biases: tuple[Bias, ...]  # ``state``: inside the norm; ``outside``; or ``none``, as where it belongs to the input
    norm: Norm
    carries: bool = False
    reverse: bool = False
    middle: Any = None  # an Attention of attention.py

    def forward(self, tensors: Sequence[Any], *, keeps: bool) -> tuple[Any, list[Tensor]]:
        gates, proposal, h0, mask, *weights = tensors
        others, weights = (weights[:3], weights[3:]) if self.middle else ([], weights)
        mask = _contiguous(mask)
        length, rows, n = proposal.shape
        new, width = maker(h0), n * h0.element_size()
        chain = new(length + 1, rows, n)  # the first state and the states, in their order in time
        chain[length if self.reverse else 0] = h0
        before, states = self._ends(chain)
        between = [new(length, rows, n) for _ in self.biases[1:]]
        inputs, outputs, kept, steps = [before, *between], [*between, states], [], []
        room = length if keeps else min(length, 1)
        below: Sequence[Tensor] = (gates.contiguous(), proposal.contiguous())
        once = width
        p = dict(zip(self.names, weights, strict=True))
        middle = self.middle and self.middle.forward(self, others, p, outputs[0])
        for index, part in enumerate(self._parts(p, h0)):
            rest = 1
            if part.outside is not None:  # the same in all steps and rows
                below, once = part.outside, 0
            if index == 1 and middle:
                below, once, rest = middle.below, 3 * width, 0
            a, saved, inverse = new(room, rows, 3 * n), new(room, rows, 3 * n), new(room, rows, 2, dtype=torch.float64)
            last = outputs[index] is states
            job = Job(
                "gru_forward", h0, 3 * n, self.norm, a=a, saved=saved, inverse=inverse, kept=int(keeps), gain=part.gain,
                gates=below[0], gates_time=(1 + rest) * rows * once, gates_row=(1 + rest) * once,
                proposal=below[1], proposal_time=rows * once, proposal_row=once,
                before=inputs[index], states=outputs[index], mask=mask if last else None,
                start=before if last and self.carries else None,
            )  # fmt: skip
            steps.append((inputs[index].unbind(), part, a.unbind() if keeps else a.unbind() * length, job))
            kept += [a, saved, inverse, part.matrix, part.gain]
        for t in range(length)[:: -1 if self.reverse else 1]:
            for index, (xs, part, products, job) in enumerate(steps):
                if index == 1 and middle:
                    middle.step(t, xs[t])
                if part.inside is None:
                    torch.mm(xs[t], part.matrix, out=products[t])
                else:
                    torch.addmm(part.inside, xs[t], part.matrix, out=products[t])
                job.run(t)
        # a view of memory that a function of autograd keeps could not be changed in place
        results = states.clone() if keeps else states
        if middle:
            return (results, middle.attended.clone()), [chain, *between, *kept, *middle.kept]
        return results, [chain, *between, *kept]

    def backward(
        self, tensors: Sequence[Any], kept: Sequence[Tensor], dstates: Tensor, *dothers: Tensor
    ) -> list[Tensor | None]:
        _, _, h0, mask, *weights = tensors
        others, weights = (weights[:3], weights[3:]) if self.middle else ([], weights)
        mask = _contiguous(mask)
        length, rows, n = dstates.shape
        new, depth = maker(h0), len(self.biases)
        inputs, kept = [self._ends(kept[0])[0], *kept[1:depth]], kept[depth:]
        dh, carried = new(rows, n).zero_(), new(rows, n) if self.carries and mask is not None else None
        steps, results = [], []
        for index in range(depth):
            a, saved, inverse, matrix, gain = kept[5 * index : 5 * index + 5]
            da, dgates, dproposal = new(length, rows, 3 * n), new(length, rows, 2 * n), new(length, rows, n)
            dgain, last = sums(rows, 3 * n), index == depth - 1
            job = Job(
                "gru_backward", h0, 3 * n, self.norm, a=a, saved=saved, inverse=inverse, gain=gain,
                before=inputs[index], mask=mask if last else None, dstates=dstates if last else None, dh=dh,
                to_carried=carried if last else None, from_carried=None if index else carried, da=da, dgates=dgates,
                dproposal=dproposal, dgain=dgain,
            )  # fmt: skip
            steps.append((da.unbind(), matrix.t(), job))
            results.append((da, dgates, dproposal, dgain))
        middle = None
        if self.middle:
            p = dict(zip(self.names, weights, strict=True))
            middle = self.middle.backward(self, others, p, inputs[1], kept[5 * depth :], results[1][1:3], *dothers)
        for t in range(length)[:: 1 if self.reverse else -1]:
            for index, (das, transposed, job) in reversed(list(enumerate(steps))):
                job.run(t)
                dh.addmm_(das[t], transposed)
                if index == 1 and middle:
                    middle.step(t, dh)
        by_name: dict[str, Tensor] = middle.gradients() if middle else {}
        for index, (xs, (da, dgates, dproposal, dgain)) in enumerate(zip(inputs, results, strict=True)):
            dweight, dbias = xs.reshape(-1, n).t() @ da.view(-1, 3 * n), (dgates, dproposal)
            if self.biases[index] == "state":
                dbias = da.split((2 * n, n), -1)
            for side, total, gain, bias in zip(
                ("gates", "proposal"), dweight.split((2 * n, n), 1), dgain.sum(0).split((2 * n, n)), dbias, strict=True
            ):
                by_name[f"gru{index}/state_to_{side}"] = total
                by_name[f"gru{index}/{side}_state_norm/scale"] = gain.to(h0.dtype)
                if self.biases[index] != "none":
                    by_name[f"gru{index}/{side}_bias"] = bias.sum((0, 1))
        of_others = middle.of_others() if middle else ()
        return [*results[0][1:3], dh, None, *of_others, *(by_name[name] for name in self.names)]

    def _ends(self, chain: Tensor) -> tuple[Tensor, Tensor]:
        """The states before and after each step."""
        return (chain[1:], chain[:-1]) if self.reverse else (chain[:-1], chain[1:])

    def _parts(self, p: Mapping[str, Tensor], h0: Tensor) -> list[_Part]:
        n, parts = h0.shape[1], []
        for index, bias in enumerate(self.biases):
            names = f"gru{index}/gates", f"gru{index}/proposal"
            matrix = torch.cat([p[name.replace("/", "/state_to_")] for name in names], 1)
            gains = [p[f"{name}_state_norm/scale"] for name in names if self.norm.counted[0]]
            own = [p[f"{name}_bias"].contiguous() for name in names if bias != "none"]
            zeros = [h0.new_zeros(2 * n), h0.new_zeros(n)]
            parts.append(_Part(
                matrix, torch.cat(gains) if gains else h0.new_ones(3 * n), torch.cat(own) if bias == "state" else None,
                None if index == 0 else own if bias == "outside" else zeros,
            ))  # fmt: skip
        return parts


class LSTM(NamedTuple):
    """An LSTM, as lstm_step of recurrent.py.

    Tensors: what the input and the bias add to the gates, the first state and cell, the mask, the matrix and, with a
    norm, the gains. Results: states and cells.
    """

    norm: Norm

    def forward(self, tensors: Sequence[Any], *, keeps: bool) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
        below, h0, c0, mask, matrix, *gains = tensors
        (rows, n), length = h0.shape, len(below)
        new, room = maker(h0), length if keeps else min(length, 1)
        chain, cells = new(length + 1, rows, n), new(length + 1, rows, n)  # the first ones, and those after each step
        chain[0], cells[0] = h0, c0
        a, saved, inverse = new(room, rows, 4 * n), new(room, rows, 5 * n), new(room, rows, 2, dtype=torch.float64)
        job = Job(
            "lstm_forward", h0, 4 * n, self.norm, a=a, saved=saved, inverse=inverse, kept=int(keeps),
            gain=self._gain(gains, h0), below=below.contiguous(), before=chain, states=chain[1:], cells_before=cells,
            cells=cells[1:], mask=_contiguous(mask),
        )  # fmt: skip
        products = a.unbind() if keeps else a.unbind() * length
        for t, (h, product) in enumerate(zip(chain[:-1].unbind(), products, strict=True)):
            torch.mm(h, matrix, out=product)
            job.run(t)
        results = chain[1:], cells[1:]
        return (results[0].clone(), results[1].clone()) if keeps else results, [chain, cells, a, saved, inverse]

    def backward(
        self, tensors: Sequence[Any], kept: Sequence[Tensor], dstates: Tensor, dcells: Tensor
    ) -> list[Tensor | None]:
        _, h0, _, mask, matrix, *gains = tensors
        chain, cells, a, saved, inverse = kept
        length, rows, n = dstates.shape
        new = maker(h0)
        dh, dc, da, dbelow = new(rows, n).zero_(), new(rows, n).zero_(), torch.empty_like(a), torch.empty_like(a)
        dgain = sums(rows, 5 * n)
        job = Job(
            "lstm_backward", h0, 4 * n, self.norm, a=a, saved=saved, inverse=inverse, gain=self._gain(gains, h0),
            cells_before=cells, cells=cells[1:], mask=_contiguous(mask), dstates=dstates,
            dcells=dcells, dh=dh, dc=dc, da=da, dbelow=dbelow, dgain=dgain,
        )  # fmt: skip
        transposed, das = matrix.t(), da.unbind()
        for t in reversed(range(length)):
            job.run(t)
            dh.addmm_(das[t], transposed)
        dmatrix = chain[:-1].reshape(-1, n).t() @ da.view(-1, 4 * n)
        dgains = dgain.sum(0).to(h0.dtype).split((4 * n, n)) if gains else ()
        return [dbelow, dh, dc, None, dmatrix, *dgains]

    def _gain(self, gains: Sequence[Tensor], h0: Tensor) -> Tensor:
        return torch.cat(list(gains)) if gains else h0.new_ones(5 * h0.shape[1])


class _Part(NamedTuple):
    """A GRU: matrices side by side, gains, the bias inside of the norm, and what is added outside of it."""

    matrix: Tensor
    gain: Tensor
    inside: Tensor | None
    outside: Sequence[Tensor] | None


class Job:
    """A kernel of cpu/recurrent.py on tensors, which it keeps alive; rows of so many numbers in ``a``."""

    def __init__(self, kernel: str, like: Tensor, width: int, norm: Norm, **arguments: Tensor | int | None) -> None:
        from rmsnorm.cpu import launch, steps

        words = {
            name: value.data_ptr() if isinstance(value, Tensor) else value or 0 for name, value in arguments.items()
        }
        shape = like.shape[0], like.shape[1], width
        self.words = steps.job(kernel, dtype_name(like.dtype), shape, *norm, openmp_threads(), words)
        self.arguments = arguments
        self.run = partial(steps.run(), launch.address(self.words))


def _contiguous(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous()


def maker(like: Tensor) -> Callable[..., Tensor]:
    """What makes tensors on the CPU, also if the default device is another one."""

    def new(*shape: int, dtype: torch.dtype = like.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=_CPU)

    return new


def sums(rows: int, width: int) -> Tensor:
    """Zeros for the sums of the gains' gradients, for all parts of the rows."""
    from rmsnorm.cpu import steps

    return torch.zeros(steps.parts(rows, width), width, dtype=torch.float64, device=_CPU)
