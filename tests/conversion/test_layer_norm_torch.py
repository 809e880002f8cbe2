"""LayerNorm into RMSNorm in PyTorch: ties, buffers, stopped gradients, and the models of transformers."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from layer_norm_models import SAMPLES, Torch, X, randomised
from test_layer_norm import ROUNDING, SEEN, SINGLE, distance, left

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn.utils import prune  # noqa: E402

from rmsnorm.conversion import to_rms_norm  # noqa: E402
from rmsnorm.specification.errors import InputError  # noqa: E402

ROWS, IDS = torch.from_numpy(SAMPLES[X]), torch.from_numpy(SAMPLES["ids"])


def net(forward: Any, **parts: Any) -> Any:
    """A module with these modules, parameters and buffers."""

    class Net(nn.Module):
        def forward(self, x: Any) -> Any:
            return forward(self, x)

    model = Net()
    for name, part in parts.items():
        is_buffer = isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter)
        (model.register_buffer if is_buffer else lambda name, part: setattr(model, name, part))(name, part)
    return model


def in_place(m: Any, x: Any) -> Any:
    h = m.a(x)
    h += m.b(x)
    return m.n(h)


def without_gradient(m: Any, x: Any) -> Any:
    """As Pegasus reads its positions."""
    with torch.no_grad():
        rows = m.e(torch.arange(2))
    return m.n(m.a(x) + rows)


def encoder(*, norm_first: bool) -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    return nn.Sequential(nn.Embedding(11, 8), nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), False), nn.Linear(8, 3))


# what is computed, with which parts; what is centred, where all norms are converted
MODELS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "in place": (in_place, {"b": nn.Linear(3, 4)}, ("a.bias", "a.weight", "b.bias", "b.weight")),
    "without a gradient": (without_gradient, {"e": nn.Embedding(2, 4)}, ("a.bias", "a.weight", "e.weight")),
    "two axes": (lambda m, x: m.n2(m.c(x).view(2, 3, 4)), {"c": nn.Linear(3, 12), "n2": nn.LayerNorm((3, 4))},
                 ("c.bias", "c.weight")),
    "a buffer": (lambda m, x: m.n(m.a(x) + m.s), {"s": torch.arange(4.0)}, ("a.bias", "a.weight", "s")),
    "a branch": (lambda m, x: m.n((m.a if x.sum() > -1e9 else m.b)(x)), {"b": nn.Linear(3, 4)}, ("a.bias", "a.weight")),
    "a mean that softmax takes": (lambda m, x: m.h(m.n(m.a(x))).log_softmax(-1), {"h": nn.Linear(4, 5)},
                                  ("a.bias", "a.weight")),
    "read elsewhere": (lambda m, x: m.n(m.a(x)) @ m.a.weight, {}, ()),
    "read without a gradient": (lambda m, x: m.n(m.a(x)) @ m.a.weight.data, {}, ()),
    "written through a view": (lambda m, x: m.n(torch.cat([m.a(x).flatten()[:7], torch.ones(1)]).view(2, 4)), {}, ()),
    "a gain of features": (lambda m, x: m.n(m.a(x) * m.g), {"g": nn.Parameter(torch.ones(4))}, ()),
    "int8": (lambda m, x: m.n(x @ m.w.to(x.dtype)), {"w": torch.arange(12).reshape(3, 4).to(torch.int8)}, ()),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    forward, parts, centred = MODELS[name]
    model = randomised(Torch(), net(forward, a=nn.Linear(3, 4), n=nn.LayerNorm(4), **parts).eval())
    result = to_rms_norm(model, ROWS)
    assert result.centred == centred
    if not centred:
        assert left(result).keys() == {"n"}
        assert left(result)["n"].startswith(SEEN)
        assert torch.equal(model(ROWS), result.model(ROWS))
        return
    assert left(result).keys() <= ({"n"} if name == "two axes" else set())
    assert result.exact <= ROUNDING
    assert distance(model(ROWS).detach(), result.model(ROWS).detach()) <= SINGLE
    assert ("b.weight" in result.unreached) == (name == "a branch")


def test_a_tied_buffer_stays_a_buffer_and_a_tied_parameter_a_parameter():
    """Where one reader needs it as it was, and the norm needs it centred."""

    def both(m: Any, x: Any) -> Any:
        return m.n(x + m.s + m.p[:2]), m.other.s * m.other.p.sum()

    other = net(lambda m, x: x, s=torch.arange(4.0), p=nn.Parameter(torch.eye(3, 4)))
    model = nn.Sequential(nn.Linear(3, 4), net(both, s=other.s, p=other.p, other=other, n=nn.LayerNorm(4)))
    result = to_rms_norm(randomised(Torch(), model.eval()), ROWS)
    new = result.model[1]
    assert not left(result)
    assert {"1.s", "1.p"} <= {*result.centred}
    assert (isinstance(new.p, nn.Parameter), "s" in new._buffers) == (True, True)
    assert (new.p is new.other.p, new.s is new.other.s) == (False, False)
    assert "1.s: no longer tied to 1.other.s" in result.notes


def test_what_stays_of_a_module():
    """Modes, frozen parameters and hooks."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.LayerNorm(4), nn.Dropout(0.0)).train()
    model[0].weight.requires_grad_(False)
    calls: list[int] = []
    model[2].register_forward_hook(lambda *_: calls.append(1))
    result = to_rms_norm(model, ROWS)
    assert all(module.training for one in (model, result.model) for module in one.modules())
    assert [p.requires_grad for p in result.model.parameters()] == [False, True, True, True]
    calls.clear()
    result.model(ROWS)
    assert calls == [1]
    assert result.notes == ("dropout in 1: in a stream it lets the models agree only in evaluation",)
    assert "2 (LayerNorm): now RMSNorm, variant torch, eps 1e-05; what it reads has no mean\n" in str(result)
    assert "centred 0.bias, 0.weight\n" in str(result)


def test_bfloat16():
    """The search is exact; the weights are rounded once more, by 2^-9 of each, which moves outputs."""
    model = nn.Sequential(nn.Linear(3, 64), nn.LayerNorm(64)).bfloat16()
    result = to_rms_norm(model, ROWS.bfloat16())
    assert {parameter.dtype for parameter in result.model.parameters()} == {torch.bfloat16}
    assert result.exact <= ROUNDING < result.error < 0.05


def test_what_is_refused(monkeypatch):
    """A pruned weight, a model that is random, and a choice that changes outputs."""
    pruned = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    prune.random_unstructured(pruned[0], "weight", 0.3)
    with pytest.raises(InputError, match=r"0.weight is 'made of other tensors'.*prune.*call its remove first"):
        to_rms_norm(pruned, ROWS)
    prune.remove(pruned[0], "weight")
    assert not left(to_rms_norm(pruned, ROWS))
    calls = iter(range(99))
    with pytest.raises(InputError, match="two runs on the same inputs differ"):
        to_rms_norm(
            net(lambda m, x: m.n(m.a(x) + next(calls) * torch.arange(4.0)), a=nn.Linear(3, 4), n=nn.LayerNorm(4)), ROWS
        )
    search = importlib.import_module("rmsnorm.conversion.layer_norm.search")
    monkeypatch.setattr(search, "by_halves", lambda some, fit: list(some))
    with pytest.raises(InputError, match="the outputs differ in float64 by more than 1e-10"):
        to_rms_norm(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4)), ROWS)


def test_subclasses():
    class Same(nn.LayerNorm):
        def forward(self, x: Any) -> Any:
            return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    class Narrow(nn.Module):
        """As Cohere's, in float32 whatever x is, with a buffer as bias."""

        def __init__(self) -> None:
            super().__init__()
            self.gamma, self.eps = nn.Parameter(torch.ones(4)), 1e-6
            self.register_buffer("beta", torch.zeros(4))

        def forward(self, h: Any) -> Any:
            return (nn.functional.layer_norm(h.float(), (4,), eps=1e-6) * self.gamma.float()).to(h.dtype) + self.beta

    class MoreLayerNorm(nn.LayerNorm):
        def forward(self, x: Any) -> Any:
            return super().forward(x) + 1

    pairs = [layer for norm in (Same(4), Narrow(), MoreLayerNorm(4)) for layer in (nn.Linear(4, 4), norm)]
    result = to_rms_norm(nn.Sequential(nn.Linear(3, 4), *pairs), ROWS)
    assert [layer.kind for layer in result.layers if layer.variant] == ["Same", "Narrow"]
    assert left(result)["6"] == "it does not compute LayerNorm over the last axis"
    assert type(result.model[2]).__name__ == "RMSNorm"
    assert result.exact <= ROUNDING


TOKENS = {"vocab_size": 11, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 16}
HEADS = {**SIZES, "num_key_value_heads": 2}
OPT = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "ffn_dim": 16, "word_embed_proj_dim": 8}
# configuration, model, its options, the norms that are converted and those that stay
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], int, int]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 16}, 5, 0),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", HEADS, 5, 0),
    "neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", SIZES, 5, 0),
    "bert": ("BertConfig", "BertModel", {**SIZES, "max_position_embeddings": 16}, 1, 4),
    "t5": ("T5Config", "T5EncoderModel", {"num_layers": 1, "num_heads": 2, "d_model": 8, "d_ff": 16, "d_kv": 4}, 0, 3),
    "cohere": ("CohereConfig", "CohereForCausalLM", HEADS, 3, 0),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", HEADS, 5, 0),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", {**HEADS, "head_dim": 4}, 5, 0),
    "rwkv": ("RwkvConfig", "RwkvForCausalLM", {"num_hidden_layers": 2, "hidden_size": 8, "context_length": 16}, 1, 5),
    "vit": ("ViTConfig", "ViTModel", {**SIZES, "image_size": 8, "patch_size": 4}, 5, 0),
    "opt": ("OPTConfig", "OPTForCausalLM", {**OPT, "max_position_embeddings": 16}, 5, 0),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"n_layer": 2, "n_head": 2, "hidden_size": 8}, 1, 5),
    "phi": ("PhiConfig", "PhiForCausalLM", {**HEADS, "max_position_embeddings": 16}, 3, 0),
}  # fmt: skip


def outputs(model: Any, x: Any) -> list[Any]:
    with torch.no_grad():
        return [y for y in model(x).to_tuple() if isinstance(y, torch.Tensor)]


def transformer(name: str, *, as_made: bool = False) -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers")
    config, cls, options, _, _ = TRANSFORMERS[name]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**({} if name == "vit" else TOKENS), **options))
    x = torch.linspace(-1, 2, 384).square().reshape(2, 3, 8, 8) if name == "vit" else IDS
    return model.eval() if as_made else randomised(Torch(), model.eval()), x


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name, tmp_path):
    """What is saved has LayerNorms when it is loaded again, and the same outputs."""
    model, x = transformer(name)
    result = to_rms_norm(model, x)
    assert (len(result.layers) - len(left(result)), len(left(result))) == TRANSFORMERS[name][3:]
    for before, after in zip(outputs(model, x), outputs(result.model, x), strict=True):
        assert distance(before, after) <= SINGLE
    if result.centred:
        assert result.exact <= ROUNDING
        assert "from_pretrained makes LayerNorms again, which compute the same with these weights" in result.notes
        result.model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path).eval()
        for new, again in zip(outputs(result.model, x), outputs(loaded, x), strict=True):
            assert distance(new, again) <= 2 * SINGLE  # each rounds in its own way


def test_bert_as_it_is_made():
    """Gains that are all one write no mean, so that every norm of a BERT that is not trained can be converted."""
    model, x = transformer("bert", as_made=True)
    assert not left(to_rms_norm(model, x))


def test_a_tied_embedding():
    """GPT-2's logits are made with the embedding as it was; the stream is written with one of its own."""
    model, x = transformer("gpt2")
    result = to_rms_norm(model, x)
    wte, head = result.model.transformer.wte.weight, result.model.lm_head.weight
    assert torch.equal(head, model.lm_head.weight)
    assert wte.mean(-1).abs().max() < 1e-7 < head.mean(-1).abs().min()
    assert "transformer.wte.weight: no longer tied to lm_head.weight" in result.notes
    assert (model.config.tie_word_embeddings, result.model.config.tie_word_embeddings) == (True, False)
    assert torch.equal(*(one.generate(x, max_new_tokens=6, do_sample=False) for one in (model, result.model)))


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_of_pytorch(norm_first):
    """Its fused path knows LayerNorm alone, and asks no norm."""
    model = randomised(Torch(), encoder(norm_first=norm_first).eval())
    result = to_rms_norm(model, IDS)
    assert (len(result.layers), len(left(result))) == (5, 0 if norm_first else 5)
    assert distance(model(IDS).detach(), result.model(IDS).detach()) <= SINGLE
