"""Compiled steps of recurrent cells in PyTorch: when they are used, and what a small case of test_cells.py leaves out.

That states and gradients are the golden's, with every norm, place of the biases, mask and direction, is in
test_cells.py, where compiled steps are used: the first test of this file.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from nematus_cells import BATCH, BIASES, LENGTH, STATE, nematus_weights, sequence, theano_weights
from nematus_models import batch, config_of, random_parameters

torch = pytest.importorskip("torch")
pytest.importorskip("numba")

if os.environ.get("RMSNORM_CPU_KERNELS") == "0":
    pytest.skip("RMSNORM_CPU_KERNELS=0 switches the kernels off", allow_module_level=True)

from rmsnorm import cpu  # noqa: E402
from rmsnorm.nematus.cells import gru_shapes, lstm_shapes  # noqa: E402
from rmsnorm.nematus.numpy import recurrent as golden  # noqa: E402
from rmsnorm.nematus.torch import RNNSearch, compiled, gru, lstm, nematus_gru  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # forward_ad's own

NORMS = ("none", "rms", "prms")
EXACT = {torch.float64: 1e-12, torch.float32: 2e-5}  # as in test_cells.py


@pytest.fixture
def results() -> list[Any]:
    """What they computed."""
    return []


@pytest.fixture
def uses(monkeypatch: pytest.MonkeyPatch, results: list[Any]) -> list[str]:
    """The names of the cells that were computed by compiled steps."""
    names: list[str] = []
    computed = compiled.computed

    def record(cell: Any, *arguments: Any) -> Any:
        names.append(type(cell).__name__)
        results.append(computed(cell, *arguments))
        return results[-1]

    monkeypatch.setattr(compiled, "computed", record)
    return names


def tensors(values: Any, dtype: Any = torch.float64, requires_grad: bool = True) -> Any:
    if isinstance(values, dict):
        return {name: tensors(value, dtype, requires_grad) for name, value in values.items()}
    return torch.tensor(values, dtype=dtype, requires_grad=requires_grad)


def cells(norm: str, dtype: Any = torch.float64) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Functions of lists of tensors, such lists, and the arguments of the golden: a GRU in two parts and an LSTM."""
    x, h0, mask = sequence()
    biases, masking = BIASES[3]
    for cell, weights in ((nematus_gru, nematus_weights(norm, biases)), (lstm, theano_weights("lstm", norm))):
        states = (h0,) if cell is nematus_gru else (h0, h0[::-1] / 2)
        options: dict[str, Any] = {"mask": mask, "norm": norm, "partial": 0.4}
        options |= {"biases": biases, **masking} if cell is nematus_gru else {}

        def call(*leaves: Any, cell: Any = cell, names: Any = tuple(weights), options: Any = options) -> Any:
            first, count = leaves[0], len(leaves) - len(names)
            parameters = dict(zip(names, leaves[count:], strict=True))
            own = {**options, "mask": tensors(mask, first.dtype, False)}
            return cell(*leaves[:count], parameters, **own)

        yield call, [tensors(value, dtype) for value in (x, *states, *weights.values())], options


def gradients(outputs: Any, leaves: Any, **options: Any) -> Any:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(y.shape, dtype=torch.float64, generator=generator).to(y.dtype) for y in outputs]
    return torch.autograd.grad(outputs, leaves, cotangents, **options)


def plainly(monkeypatch: pytest.MonkeyPatch, function: Any) -> Any:
    """The result without compiled steps."""
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "is_used", lambda *_: False)
        return function()


def close(results: Any, wanted: Any) -> None:
    """Within EXACT of the largest."""
    for one, other in zip(results, wanted, strict=True):
        largest = max(1.0, other.detach().abs().max().item()) if other.numel() else 1.0
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=EXACT[one.dtype] * largest)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", EXACT)
def test_they_are_used(uses: list[str], norm: str, dtype: Any) -> None:
    """In training and without a graph, which keeps nothing: the same bits."""
    for call, leaves, _ in cells(norm, dtype):
        with_graph = call(*leaves)
        with torch.no_grad():
            without = call(*leaves)
        for one, other in zip(with_graph, without, strict=True):
            assert torch.equal(one, other)
    assert uses == ["GRU"] * 2 + ["LSTM"] * 2


class _Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def _forward_mode(call: Any, leaves: Any) -> Any:
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(leaf, torch.ones_like(leaf)) for leaf in leaves]
        outputs = call(*duals)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return [torch.autograd.forward_ad.unpack_dual(output).tangent for output in outputs]


def _in_mode(call: Any, leaves: Any) -> Any:
    with _Mode():
        return call(*leaves)


def _in_autocast(call: Any, leaves: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return call(*leaves)


def _traced(call: Any, leaves: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trace has the length of this sequence
        # the check of the trace would call the function itself
        traced = torch.jit.trace(call, tuple(leaf.detach() for leaf in leaves), check_trace=False)
    return traced(*(leaf / 2 for leaf in leaves))


WATCHED = {
    "trace": _traced,
    "torch.func": lambda call, leaves: torch.func.grad(
        lambda *a: sum(y.sum() for y in call(*a)), tuple(range(len(leaves)))
    )(*leaves),
    "vmap": lambda call, leaves: torch.vmap(call)(*(torch.stack([leaf, leaf / 2]) for leaf in leaves)),
    "forward mode": _forward_mode,
    "mode": _in_mode,
    "autocast": _in_autocast,
    "16 bits": lambda call, leaves: call(*(leaf.bfloat16() for leaf in leaves)),
    "numbers of the other sign": lambda call, leaves: call(leaves[0], torch._neg_view(leaves[1]), *leaves[2:]),
}


@pytest.mark.parametrize("way", WATCHED)
def test_where_something_looks_on_they_are_not_used(monkeypatch: pytest.MonkeyPatch, uses: list[str], way: str) -> None:
    """Nor for tensors that they cannot read."""
    for call, leaves, _ in cells("rms", torch.float32):
        results = WATCHED[way](call, leaves)
        wanted = plainly(monkeypatch, lambda call=call, leaves=leaves: WATCHED[way](call, leaves))
        for one, other in zip(results, wanted, strict=True):
            assert torch.equal(one, other)
    assert not uses


def test_what_they_cannot_compute(monkeypatch: pytest.MonkeyPatch, uses: list[str]) -> None:
    """LayerNorm, an offset of a norm, a gradient of the mask, no numba, a state for all rows, no rows."""
    x, h0, mask = (tensors(value, requires_grad=False) for value in sequence())
    weights = tensors(nematus_weights("rms", ("input",)), requires_grad=False)
    nematus_gru(x, h0, tensors(nematus_weights("layer", ("input",)), requires_grad=False), norm="layer")
    offset = {"gru0/gates_state_norm/offset": torch.ones(2 * STATE, dtype=torch.float64)}
    moved = nematus_gru(x, h0, weights | offset, norm="rms")
    nematus_gru(x, h0, weights, mask=mask.clone().requires_grad_(), norm="rms")
    one_state = nematus_gru(x, h0[:1], weights, norm="rms")
    assert nematus_gru(x[:, :0], h0[:0], weights, norm="rms").shape == (LENGTH, 0, STATE)
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "is_available", lambda: False)
        without = nematus_gru(x, h0, weights, norm="rms")
    assert not uses
    with_kernels = nematus_gru(x, h0, weights, norm="rms")
    assert uses == ["GRU"]
    close([without], [with_kernels])
    assert not torch.equal(moved, with_kernels)
    close([one_state], [nematus_gru(x, h0[:1].expand(BATCH, STATE), weights, norm="rms")])


def test_dropout_of_the_state_is_not_lost(uses: list[str]) -> None:
    """Its rate of 0 drops nothing."""
    for rate in (0.3, 0.0):
        config = config_of("rms").replace(rnn_dropout_hidden=rate)
        model = RNNSearch(config, random_parameters(config)).train()
        model.loss(*batch(config))
        assert uses == ([] if rate else ["GRU"] * 3), rate  # two encoders and the decoder


def test_a_bias_outside_of_the_norms_of_the_first_gru(uses: list[str]) -> None:
    """No model has it; the golden of the function does."""
    (x, h0, mask), biases = sequence(), ("outside", "state")
    weights = nematus_weights("rms", biases)
    dh = np.random.default_rng(0).standard_normal((LENGTH, BATCH, STATE))
    options: Any = {"biases": biases, "norm": "rms"}
    dx, dh0, gradients = golden.nematus_gru_vjp(dh, x, h0, weights, mask=mask, **options)
    leaves = [tensors(x), tensors(h0), *tensors(weights).values()]
    y = nematus_gru(*leaves[:2], dict(zip(weights, leaves[2:], strict=True)), mask=tensors(mask).detach(), **options)
    assert uses == ["GRU"]
    wanted = [dx, dh0, *(gradients[name] for name in weights)]
    close(torch.autograd.grad(y, leaves, torch.tensor(dh)), [torch.tensor(value) for value in wanted])


@pytest.mark.parametrize("norm", NORMS)
def test_derivatives(monkeypatch: pytest.MonkeyPatch, norm: str) -> None:
    """Against differences; of the gradients, in batches, again from the same graph, and from a checkpoint."""
    for call, leaves, _ in cells(norm):
        assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
        outputs = call(*leaves)
        once = gradients(outputs, leaves, retain_graph=True)
        for one, other in zip(gradients(outputs, leaves), once, strict=True):
            assert torch.equal(one, other)

        def second(call: Any = call, leaves: Any = leaves) -> Any:
            return gradients(gradients(call(*leaves), leaves, create_graph=True), leaves)

        close(second(), plainly(monkeypatch, second))

        def batched(call: Any = call, leaves: Any = leaves) -> Any:
            outputs = call(*leaves)
            y = outputs[0] if isinstance(outputs, tuple) else outputs
            several = torch.stack([torch.ones_like(y), y.detach()])
            return torch.autograd.grad(y, leaves, several, is_grads_batched=True, materialize_grads=True)

        close(batched(), plainly(monkeypatch, batched))
        saved = torch.utils.checkpoint.checkpoint(call, *leaves, use_reentrant=False)
        for one, other in zip(gradients(saved, leaves), once, strict=True):
            assert torch.equal(one, other)


def test_memory_of_every_layout_is_read_as_it_is_and_never_written() -> None:
    for call, leaves, _ in cells("rms"):
        wanted = gradients(call(*leaves), leaves)
        spread = []
        for leaf in leaves:
            wide = torch.full((*leaf.shape[:-1], 2 * leaf.shape[-1]), torch.nan, dtype=leaf.dtype)
            wide[..., ::2] = leaf.detach()
            spread.append(wide[..., ::2].mT.contiguous().mT if leaf.ndim == 2 else wide[..., ::2])
        own = [leaf.requires_grad_() for leaf in spread]
        before = [leaf.detach().clone() for leaf in own]
        close(gradients(call(*own), own), wanted)
        assert all(torch.equal(leaf, copy) for leaf, copy in zip(own, before, strict=True))
        for index in (0, len(leaves) - 1):  # only one of them has a gradient
            frozen = [leaf.detach() for leaf in leaves]
            frozen[index].requires_grad_()
            close(gradients(call(*frozen), frozen[index]), [wanted[index]])
        outputs = call(*leaves)
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        one = torch.ones((), dtype=first.dtype).expand_as(first)  # one number in memory
        close(
            torch.autograd.grad(first, leaves, one, retain_graph=True, materialize_grads=True),
            torch.autograd.grad(first, leaves, one.contiguous(), retain_graph=True, materialize_grads=True),
        )
        wanted = torch.autograd.grad(first, leaves, one, retain_graph=True, materialize_grads=True)
        first.mul_(2)  # as the result of any operation of PyTorch
        close(torch.autograd.grad(first, leaves, one / 2, materialize_grads=True), wanted)


@pytest.mark.parametrize("length", [0, 1])
def test_short_sequences(uses: list[str], length: int) -> None:
    x, h0, mask = sequence()
    weights, cell = nematus_weights("rms", ("input", "outside")), theano_weights("lstm", "rms")
    for function, states, own, options in (
        ("nematus_gru", (h0,), weights, {"biases": ("input", "outside"), "masking": "carry"}),
        ("lstm", (h0, 2 * h0), cell, {}),
    ):
        arguments = (x[:length], *states, own)
        wide = {"nematus_gru": nematus_gru, "lstm": lstm}[function]
        leaves = [tensors(value) for value in arguments]
        results = wide(*leaves, mask=tensors(mask[:length], requires_grad=False), norm="rms", **options)
        wanted: Any = np.empty((0, BATCH, STATE)) if length == 0 else None
        if length:
            wanted = getattr(golden, function)(*arguments, mask=mask[:length], norm="rms", **options)
        several = results if isinstance(results, tuple) else (results,)
        for one, other in zip(several, wanted if isinstance(wanted, tuple) else [wanted] * len(several), strict=True):
            np.testing.assert_allclose(one.detach().numpy(), other, rtol=0, atol=1e-12)
        sum(y.sum() for y in several).backward()
        assert leaves[1].grad is not None
        assert bool(leaves[1].grad.abs().sum()) == bool(length)
    assert uses == ["GRU", "LSTM"]


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_on_several_threads(uses: list[str], cell: str, dtype: Any) -> None:
    """More numbers in a step than one thread computes: the golden's states and gradients, and always the same bits."""
    length, rows, size, n, rng = 2, 30, 3, 400, np.random.default_rng(0)
    shapes = {"gru": gru_shapes, "lstm": lstm_shapes}[cell](size, n, "rms")
    weights = {
        name: rng.standard_normal(shape) / np.sqrt(shape[0]) if len(shape) > 1 else rng.uniform(0.5, 1.5, shape)
        for name, shape in shapes.items()
    }
    x, mask = rng.standard_normal((length, rows, size)), rng.uniform(0.1, 0.9, (length, rows))
    count = 1 if cell == "gru" else 2
    states, dh = rng.standard_normal((count, rows, n)), rng.standard_normal((count, length, rows, n))
    arguments, options = (x, *states, weights), {"mask": mask, "norm": "rms"}
    wanted: Any = getattr(golden, cell)(*arguments, **options)
    *others, own = getattr(golden, f"{cell}_vjp")(*dh, *arguments, **options)
    wanted = [*(wanted if count > 1 else [wanted]), *others, *(own[name] for name in weights)]

    def run() -> Any:
        leaves = [tensors(value, dtype) for value in (x, *states, *weights.values())]
        parameters = dict(zip(weights, leaves[1 + count :], strict=True))
        function = {"gru": gru, "lstm": lstm}[cell]
        y = function(*leaves[: 1 + count], parameters, mask=tensors(mask, dtype, False), norm="rms")
        y = y if count > 1 else (y,)
        return [*(part.detach() for part in y), *torch.autograd.grad(y, leaves, list(tensors(dh, dtype, False)))]

    results = run()
    close(results, [tensors(value, dtype, False) for value in wanted])
    for one, other in zip(run(), results, strict=True):
        assert torch.equal(one, other)
    assert uses == [cell.upper()] * 2


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize(("norm", "size", "rows"), [("none", 5, 3), ("rms", 400, 30), ("prms", 40, 3)])
def test_the_decoder(
    monkeypatch: pytest.MonkeyPatch, uses: list[str], results: list[Any], norm: str, size: int, rows: int, dtype: Any
) -> None:
    """Also on several threads: loss and gradients of the plain operations, whose golden is in test_models.py."""
    config = config_of("rms").replace(norm=norm, state_size=size, rnn_dec_base_transition_depth=3)
    name = str(dtype).removeprefix("torch.")
    model = RNNSearch(config, random_parameters(config, name)).train()
    rng = np.random.default_rng(0)
    words = rng.integers(1, 8, (1, 3, rows)), rng.integers(1, 8, (2, rows))
    mask = np.ones((3, rows)) * (np.arange(3)[:, None] < rng.integers(1, 4, rows))

    def run() -> Any:
        loss = model.loss(words[0], mask, words[1], np.ones((2, rows)))
        return [loss.detach(), *torch.autograd.grad(loss.sum(), list(model.parameters()))]

    by_steps = run()
    assert uses == ["GRU"] * 3
    close(by_steps, plainly(monkeypatch, run))
    if size < 40 and dtype is torch.float64:

        def second() -> Any:
            own = list(model.parameters())
            once = torch.autograd.grad(
                model(words[0], mask, words[1], np.ones((2, rows))).sum(), own, create_graph=True
            )
            return torch.autograd.grad(sum(part.square().sum() for part in once), own)

        close(second(), plainly(monkeypatch, second))
        model.loss(words[0], mask, words[1], np.ones((2, rows)))
        ones = [torch.ones_like(part) for part in results[-1]]
        torch.autograd.grad(results[-1], list(model.parameters()), ones, allow_unused=True)
        assert all(bool((part == 1).all()) for part in ones), "what autograd passes is not written to"


def test_gates_over_the_whole_range() -> None:
    """h' = u for h = 1 and no proposal, h' = tanh(proposal) for u = 0: each to 4 units in the last place."""
    some = np.concatenate([np.logspace(-300, 2.8, 150), -np.logspace(-300, 2.8, 150), [0.0]])[None]
    n = some.shape[1]
    zeros = torch.zeros(n, n, dtype=torch.float64)
    weights = (torch.cat((zeros, zeros), 1), zeros)
    names = tuple(compiled.gru_shapes(n, ("none",), "none"))
    cell = compiled.GRU(names, ("none",), compiled.Norm((0, 0), 1e-5))
    for dtype in EXACT:
        v, bits = torch.tensor(some, dtype=dtype), torch.finfo(dtype).eps
        own = [weight.to(dtype) for weight in weights]
        r, h0 = torch.zeros_like(v), torch.ones_like(v)

        def states(gates: Any, proposal: Any, h0: Any, own: Any = own, r: Any = r) -> Any:
            parts = [part.expand(1, 2, -1) for part in (torch.cat((r, gates), 1), proposal)]  # two rows that are one
            one, other = compiled.computed(cell, None, *parts, h0.expand(2, -1), None, *own)[0]
            assert torch.equal(one, other)
            return one[None]

        u, c = states(v, r, h0), states(r - 800, v, 0 * h0)
        wide = v.double().numpy()
        with np.errstate(over="ignore"):
            wanted = 1 / (1 + np.exp(-wide))
        np.testing.assert_allclose(u.double(), wanted, rtol=4 * bits, atol=torch.finfo(dtype).tiny)
        np.testing.assert_allclose(c.double(), np.tanh(wide), rtol=4 * bits, atol=torch.finfo(dtype).tiny)


def test_numbers_that_are_large_or_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The square of a product overflows, but not its norm; NaN stays in its row."""
    x, h0, _ = sequence()
    weights = nematus_weights("rms", ("state",))
    leaves = [tensors(x), tensors(h0 * [[1.0], [1e200], [1.0]]), *tensors(weights).values()]

    def run() -> Any:
        parameters = dict(zip(weights, leaves[2:], strict=True))
        y = nematus_gru(leaves[0], leaves[1], parameters, biases=("state",), norm="rms")
        return [y / leaves[1].detach(), *torch.autograd.grad((y / leaves[1].detach()).sum(), leaves)]

    close(run(), plainly(monkeypatch, run))
    broken = h0.copy()
    broken[1, 0] = np.nan
    y = nematus_gru(tensors(x), tensors(broken), tensors(weights), biases=("state",), norm="rms")
    assert torch.equal(y.isnan(), torch.tensor([False, True, False])[None, :, None].expand_as(y))
