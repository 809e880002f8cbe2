"""LayerNorm into RMSNorm in models of PyTorch: what is converted is equal, what is left has a reason."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from conversions import IDS, ROUNDING, SINGLE, shown

torch = pytest.importorskip("torch")
convert = importlib.import_module("rmsnorm.conversion.layer_norm.convert")
from layer_norms_torch import assert_equal, net, randomised, sample, tensors  # noqa: E402
from torch import nn  # noqa: E402

from rmsnorm.conversion.layer_norm import to_rms_norm  # noqa: E402
from rmsnorm.conversion.layer_norm.result import difference  # noqa: E402
from rmsnorm.specification.errors import InputError  # noqa: E402


def test_an_embedding_of_two_readers_that_are_both_centred_stays_tied():

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Embedding(11, 4), nn.Embedding(11, 4)
            self.two.weight = self.one.weight
            self.norm = nn.LayerNorm(4)

        def forward(self, ids):
            return self.norm(self.one(ids) + 2 * self.two(ids.flip(1)))

    model = randomised(Pair())
    result = to_rms_norm(model, torch.tensor(IDS))
    assert result.model.one.weight is result.model.two.weight
    assert result.notes == ()
    assert_equal(model, result, torch.tensor(IDS))


def modules() -> dict[str, tuple[Any, Any]]:
    """Models whose every LayerNorm is converted, and what they take."""

    def in_place(m, p, x):
        h = m.a(x)
        h += m.b(x)
        return m.norm(h)

    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False)
    return {
        "mlp": (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2, bias=False),
                              nn.LayerNorm(2, bias=False)), sample(2, 3)),
        "no parameters": (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, elementwise_affine=False)), sample(2, 3)),
        "conv": (net(lambda m, p, x: m.norm(m.conv(x).permute(0, 2, 3, 1)), conv=nn.Conv2d(3, 4, 3),
                     norm=nn.LayerNorm(4)), sample(2, 3, 8, 8)),
        "transposed conv": (net(lambda m, p, x: m.norm(m.conv(x).flatten(2).mT), conv=nn.ConvTranspose2d(3, 4, 3),
                                norm=nn.LayerNorm(4)), sample(2, 3, 4, 4)),
        "features over two axes": (net(lambda m, p, x: m.norm(m.a(x).view(2, 3, 4)), a=nn.Linear(5, 12),
                                       norm=nn.LayerNorm((3, 4))), sample(2, 5)),
        "features shuffled": (net(lambda m, p, x: m.norm(m.a(x).flip(-1)), a=nn.Linear(5, 6),
                                  norm=nn.LayerNorm(6)), sample(2, 5)),
        "embedding sum": (net(lambda m, p, x: m.norm(m.a(x) * 2 + p.row[:5] - m.b(x) / 3), a=nn.Embedding(11, 8),
                              b=nn.Embedding(11, 8), row=torch.zeros(7, 8), norm=nn.LayerNorm(8)), sample()),
        "embedding bag": (nn.Sequential(nn.EmbeddingBag(11, 8), nn.LayerNorm(8)), sample()),
        "masked": (net(lambda m, p, x: m.norm(m.a(x).masked_fill((x[..., :1] > 1), 0.0) * (x[..., 1:] > -1)),
                       a=nn.Linear(2, 4), norm=nn.LayerNorm(4)), sample(2, 3, 2)),
        "pooled": (net(lambda m, p, x: m.norm(m.a(x).mean(1)), a=nn.Linear(2, 4), norm=nn.LayerNorm(4)),
                   sample(2, 3, 2)),
        "written in place": (net(in_place, a=nn.Linear(3, 4), b=nn.Linear(3, 4), norm=nn.LayerNorm(4)), sample(2, 3)),
        "einsum": (net(lambda m, p, x: m.norm(torch.einsum("bi,ji->bj", x, p.w)), w=torch.zeros(4, 3),
                       norm=nn.LayerNorm(4)), sample(2, 3)),
        "one norm of two streams": (net(lambda m, p, x: m.norm(m.a(x)) + m.norm(m.b(x)), a=nn.Linear(3, 4),
                                        b=nn.Linear(3, 4), norm=nn.LayerNorm(4)), sample(2, 3)),
        "norm after norm": (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, elementwise_affine=False),
                                          nn.LayerNorm(4)), sample(2, 3)),
        "TransformerEncoder": (nn.Sequential(nn.Embedding(11, 8), encoder, nn.Linear(8, 3)), sample()),
    }  # fmt: skip


@pytest.mark.parametrize("name", modules())
def test_converted(name):
    model, x = modules()[name]
    randomised(model)
    result = to_rms_norm(model, x)
    assert result.layers
    assert set(shown(result).values()) == {""}
    assert result.exact <= ROUNDING
    assert_equal(model, result, x)


def test_the_offset_of_a_layer_norm_with_equal_gains():
    """It is the only mean of what that LayerNorm writes, and centred for the next one; not where others read it."""
    for readers, left in ((lambda m, h: m.after(h), 0), (lambda m, h: m.after(h) + h, 1)):
        parts = {"a": nn.Linear(3, 4), "first": nn.LayerNorm(4), "after": nn.LayerNorm(4)}
        model = randomised(net(lambda m, p, x, readers=readers: readers(m, m.first(m.a(x))), **parts))
        with torch.no_grad():
            model.m.first.weight.fill_(1.5)
        result = to_rms_norm(model, sample(2, 3))
        assert sum(not layer.converted for layer in result.layers) == left
        assert ("m.first.bias" in result.centred) == (left == 0)
        assert_equal(model, result, sample(2, 3))


def refusals() -> dict[str, tuple[Any, Any, str, str]]:
    """Models in which a LayerNorm is left, what they take, which one, and why."""
    a, b, norm = nn.Linear(3, 4), nn.Linear(4, 4), nn.LayerNorm(4)
    x = sample(2, 3)

    class Own(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x) + 1

    class Composed(nn.Module):
        def forward(self, x):
            return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)

    class Buffers(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm = nn.Linear(3, 4), nn.LayerNorm(4)
            self.register_buffer("shift", torch.arange(4.0), persistent=False)

        def forward(self, x):
            return self.norm(self.a(x) + self.shift)

    class Int8(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.register_buffer("weight", torch.arange(12).reshape(4, 3).to(torch.int8))

        def forward(self, x):
            return self.norm(nn.functional.linear(x, self.weight.to(x.dtype) * 0.1))

    class Tied(nn.Module):
        def __init__(self, use):
            super().__init__()
            self.one, self.two, self.norm, self.use = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False), norm, use
            self.two.weight = self.one.weight

        def forward(self, ids):
            return self.norm(self.one(ids)) @ self.use(self).T

    def overwritten(m, p, x):
        h = m.a(x)
        h.view(-1)[0] = 1.0
        return m.norm(h)

    constant = torch.arange(4.0)
    return {
        "relu": (nn.Sequential(a, nn.ReLU(), norm), x, "2", "keeps a mean of"),
        "the input": (nn.Sequential(norm), sample(2, 4), "0", "keeps a mean of"),
        "residual of the input": (net(lambda m, p, x: m.norm(x + m.b(x)), b=b, norm=norm), sample(2, 4), "m.norm",
                                  "keeps a mean of"),
        "another reader": (net(lambda m, p, x: m.norm(h := m.a(x)) + m.b(h), a=a, b=b, norm=norm), x, "m.norm",
                           "keeps a mean of"),
        "a reader that is not linear": (net(lambda m, p, x: m.norm(h := m.a(x)) + h.exp(), a=a, norm=norm), x,
                                        "m.norm", "keeps a mean of"),
        "a decision": (net(lambda m, p, x: m.norm(h := m.a(x)) * (h > 0), a=a, norm=norm), x, "m.norm",
                       "keeps a mean of"),
        "an output": (net(lambda m, p, x: (m.norm(h := m.a(x)), h), a=a, norm=norm), x, "m.norm",
                      "keeps a mean of"),
        "a weight used twice": (net(lambda m, p, x: m.norm(m.a(x)) @ m.a.weight, a=a, norm=norm), x, "m.norm",
                                "keeps a mean of"),
        "a layer used twice": (net(lambda m, p, x: m.norm(m.a(x)) + m.a(x).relu(), a=a, norm=norm), x, "m.norm",
                               "keeps a mean of"),
        "a scale for each feature": (net(lambda m, p, x: m.norm(m.a(x) * p.g), a=a, g=torch.ones(4), norm=norm), x,
                                     "m.norm", "keeps a mean of"),
        "a quotient": (net(lambda m, p, x: m.norm(1 / m.a(x)), a=a, norm=norm), x, "m.norm", "keeps a mean of"),
        "a constant": (net(lambda m, p, x: m.norm(m.a(x) + constant), a=a, norm=norm), x, "m.norm",
                       "keeps a mean of"),
        "the same for every feature": (net(lambda m, p, x: m.norm(m.a(x) + 0.5), a=a, norm=norm), x, "m.norm",
                                       "keeps a mean of"),
        "made from nothing": (net(lambda m, p, x: m.norm(m.a(x) + torch.arange(4.0)), a=a, norm=norm), x, "m.norm",
                              "keeps a mean of"),
        "grouped conv": (net(lambda m, p, x: m.norm(m.c(x).flatten(2).mT), c=nn.Conv1d(4, 4, 3, groups=2), norm=norm),
                         sample(2, 4, 5), "m.norm", "keeps a mean of"),
        "heads": (net(lambda m, p, x: m.norm(m.a(x).view(2, 2, 4)), a=nn.Linear(3, 8), norm=norm), x, "m.norm",
                  "keeps a mean of"),
        "features of two": (net(lambda m, p, x: m.norm(torch.cat([m.a(x), m.c(x)], -1)), a=nn.Linear(3, 2),
                                c=nn.Linear(3, 2), norm=norm), x, "m.norm", "keeps a mean of"),
        "other axes": (net(lambda m, p, x: m.norm(h := m.a(x)) + m.wide(h), a=a, norm=norm, wide=nn.LayerNorm((2, 4))),
                       x, "m.norm", "keeps a mean of"),
        "through a view": (net(overwritten, a=a, norm=norm), x, "m.norm", "keeps a mean of"),
        "one stream of two": (net(lambda m, p, x: m.norm(m.a(x)) + m.norm(m.a(x).relu()), a=a, norm=norm), x, "m.norm",
                              "keeps a mean of"),
        "one feature": (nn.Sequential(nn.Linear(3, 1), nn.LayerNorm(1)), x, "1", "normalises a single feature"),
        "not reached": (net(lambda m, p, x: m.a(x), a=a, norm=norm), x, "m.norm", "sample inputs do not reach it"),
        "a subclass": (nn.Sequential(a, Own(4)), x, "1", "it does not compute LayerNorm over the last axis"),
        "a buffer not saved": (Buffers(), x, "norm", "keeps a mean of"),
        "int8": (Int8(), x, "norm", "keeps a mean of"),
        "detached": (
            net(lambda m, p, x: m.norm(m.a(x)) @ m.a.weight.data, a=a, norm=norm),
            x,
            "m.norm",
            "keeps a mean of",
        ),
        "one weight, used twice": (Tied(lambda self: self.one.weight), sample(), "norm", "keeps a mean of"),
    }  # fmt: skip


@pytest.mark.parametrize("name", refusals())
def test_left(name):
    """With the reason, and the outputs bit for bit."""
    model, x, layer, why = refusals()[name]
    randomised(model)
    result = to_rms_norm(model, x)
    assert why in shown(result)[layer]
    assert not any(entry.converted for entry in result.layers)
    assert result.centred == ()
    for before, after in zip(tensors(model(x)), tensors(result.model(x)), strict=True):
        assert torch.equal(before, after)


def test_what_stays_of_a_module():
    """Modes, frozen parameters, hooks and the switch of the fused paths; a note names dropout where it matters."""
    model = randomised(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.LayerNorm(4), nn.Dropout(0.5))).train()
    model[0].weight.requires_grad_(False)
    calls = []
    model[2].register_forward_hook(lambda *_: calls.append(1))
    fast = torch.backends.mha.get_fastpath_enabled()
    result = to_rms_norm(model, sample(2, 3))
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert all(module.training for one in (model, result.model) for module in one.modules())
    assert not result.model[0].weight.requires_grad
    assert result.model[0].bias.requires_grad
    assert result.model[0].weight.mean(0).abs().max() < 1e-7 < model[0].weight.mean(0).abs().min()
    calls.clear()
    result.model(sample(2, 3))
    assert calls == [1]
    assert result.notes == ("dropout in 1: its output is not centred; the models agree only in evaluation",)
    words = str(result)
    assert "2 (LayerNorm): now RMSNorm; eps 1e-05\n" in words
    assert "centred 0.bias, 0.weight\n" in words
    assert result.notes[0] in words


def test_bfloat16():
    """The plan is exact; the weights are rounded anew, 2^-9 of each, which moves outputs; a note says so."""
    model = randomised(nn.Sequential(nn.Linear(3, 64), nn.LayerNorm(64))).bfloat16()
    result = to_rms_norm(model, sample(2, 3).bfloat16())
    assert {parameter.dtype for parameter in result.model.parameters()} == {torch.bfloat16}
    assert result.exact <= ROUNDING
    assert 0 < result.error < 0.02
    assert result.notes == ("0.bias, 0.weight: rounded to bfloat16 once more",)


def test_a_wrong_choice_is_not_given_out(monkeypatch):
    """Where everything passes for a weight without a reader, the outputs in float64 stop the result."""
    model, x, _, _ = refusals()["another reader"]
    monkeypatch.setattr(
        convert, "shifts_of", lambda gradients, sizes, bound: [("m.a.weight", (0,)), ("m.a.bias", (0,))]
    )
    assert not to_rms_norm(randomised(model), x).centred  # by halves
    monkeypatch.setattr(convert, "by_halves", lambda shifts, fit: shifts)
    with pytest.raises(InputError, match=r"the outputs differ by .* of the greatest element, expected at most"):
        to_rms_norm(model, x)


def test_what_the_sample_does_not_reach_is_listed_and_stays():
    def branch(m, p, x):
        return m.norm(m.a(x) if x.sum() > -1e9 else m.b(x))

    model = randomised(net(branch, a=nn.Linear(3, 4), b=nn.Linear(3, 4), norm=nn.LayerNorm(4)))
    result = to_rms_norm(model, sample(2, 3))
    assert result.unreached == ("m.b.weight", "m.b.bias")
    assert torch.equal(result.model.m.b.weight, model.m.b.weight)
    assert "m.b.weight, m.b.bias: not reached by the sample, so not changed" in str(result)


def test_a_value_behind_a_stopped_gradient_is_found_by_halves():
    """The weight must stay, as it is seen; the bias of the same layer would be centred, but for no norm."""

    def stopped(m, p, x):
        return m.norm(m.a(x)) @ m.a.weight.detach() + m.last(m.b(x))[..., :3]

    parts = {"a": nn.Linear(3, 4), "b": nn.Linear(3, 4), "norm": nn.LayerNorm(4), "last": nn.LayerNorm(4)}
    result = to_rms_norm(randomised(net(stopped, **parts)), sample(2, 3))
    assert result.centred == ("m.b.bias", "m.b.weight")
    assert {layer.name: layer.converted for layer in result.layers} == {"m.norm": False, "m.last": True}


def test_a_parameter_that_is_read_without_a_gradient():
    """As Pegasus reads its positions: it is centred if no output changes when its mean does."""

    def positions(m, p, x):
        with torch.no_grad():
            rows = m.b(torch.arange(2))
        return m.norm(m.a(x) + rows)

    parts = {"a": nn.Linear(3, 4), "b": nn.Embedding(2, 4), "norm": nn.LayerNorm(4)}
    result = to_rms_norm(randomised(net(positions, **parts)), sample(2, 3))
    assert result.layers[0].converted
    assert result.centred == ("m.a.bias", "m.a.weight", "m.b.weight")
    assert result.unreached == ()


def test_a_sample_whose_mean_is_0_decides_nothing():
    x = sample(2, 4)
    model = randomised(nn.Sequential(nn.LayerNorm(4)))
    assert not to_rms_norm(model, x - x.mean(-1, keepdim=True)).layers[0].converted


def test_without_room_for_float64(monkeypatch):
    monkeypatch.setattr(convert, "_memory", lambda: 0)
    model = randomised(nn.Sequential(nn.Linear(3, 64), nn.LayerNorm(64), nn.ReLU(), nn.LayerNorm(64)))
    result = to_rms_norm(model, sample(2, 3))
    assert [layer.converted for layer in result.layers] == [True, False]
    assert result.dtype == "float32"
    assert result.exact <= SINGLE
    assert "in float32 by" in str(result)


def test_differences():
    """Relative to the greatest element; NaN and infinities where they were, integers the same."""
    one = np.array([1.0, -4.0, np.inf, np.nan])
    assert difference([one], [one + np.array([0, 1, 0, 0])]) == 0.25
    assert difference([one], [np.array([1.0, -4.0, 2.0, np.nan])]) == np.inf
    assert difference([one], [one.astype(np.float32)]) == np.inf
    assert difference([np.array([1, 2])], [np.array([1, 3])]) == np.inf
    assert difference([np.zeros(2)], [np.array([0, 1e-3])]) == 1e-3


def test_what_is_no_model():
    with pytest.raises(TypeError, match=r"to_rms_norm: model is 3 \(int\), expected torch.nn.Module, keras.Model or"):
        to_rms_norm(3)


def test_where_nothing_was_replaced_nothing_was_compared():
    result = to_rms_norm(nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4))
    assert (result.exact, result.error) == (None, None)
    assert str(result) == "nothing was replaced, and so no outputs were compared"


def test_a_model_that_differs_from_run_to_run_is_refused():
    calls = iter(range(99))

    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.arange(4) * next(calls)

    with pytest.raises(InputError, match="to_rms_norm: two runs on the same inputs differ"):
        to_rms_norm(nn.Sequential(Noise(), nn.Linear(4, 4), nn.LayerNorm(4)), torch.ones(2, 4))
