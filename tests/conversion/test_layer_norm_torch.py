"""LayerNorm into RMSNorm in PyTorch: buffers, stopped gradients, what is refused, and the models of transformers."""

from __future__ import annotations

import importlib

import pytest
from adapters import FRAMEWORKS
from test_layer_norm import ROUNDING, SAMPLES, SEEN, SINGLE, X, distance, left, randomised

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn.utils import prune  # noqa: E402

from rmsnorm.conversion import to_rms_norm  # noqa: E402
from rmsnorm.specification.errors import InputError  # noqa: E402

TORCH = FRAMEWORKS["torch"]()
ROWS, IDS = torch.from_numpy(SAMPLES[X]), torch.from_numpy(SAMPLES["ids"])


def net(forward, buffer=None, **parts):
    """A module with these modules and parameters, a linear layer ``a``, a norm ``n``, and perhaps a buffer ``s``."""
    model = TORCH.net(lambda m, ops, x: forward(m, x), {"a": ("linear", 3, 4), "n": ("norm", 4)})
    for name, part in parts.items():
        setattr(model, name, part)
    model.register_buffer("s", buffer)
    return model.eval()


def in_place(m, x):
    h = m.a(x)
    h += m.b(x)
    return m.n(h)


def without_gradient(m, x):
    """As Pegasus reads its positions."""
    with torch.no_grad():
        rows = m.e(torch.arange(2))
    return m.n(m.a(x) + rows)


# what is computed, with which parts; what is centred, where all norms are converted
MODELS = {
    "in place": (in_place, {"b": nn.Linear(3, 4)}, "a.bias a.weight b.bias b.weight"),
    "without a gradient": (without_gradient, {"e": nn.Embedding(2, 4)}, "a.bias a.weight e.weight"),
    "two axes": (lambda m, x: m.n(m.a(x).view(2, 3, 4)), {"a": nn.Linear(3, 12), "n": nn.LayerNorm((3, 4))},
                 "a.bias a.weight"),
    "a buffer": (lambda m, x: m.n(m.a(x) + m.s), {"buffer": torch.arange(4.0)}, "a.bias a.weight s"),
    "a branch": (lambda m, x: m.n((m.a if x.sum() > -1e9 else m.b)(x)), {"b": nn.Linear(3, 4)}, "a.bias a.weight"),
    "read without a gradient": (lambda m, x: m.n(m.a(x)) @ m.a.weight.data, {}, ""),
    "int8": (lambda m, x: m.n(x @ m.s.to(x.dtype)), {"buffer": torch.arange(12).reshape(3, 4).to(torch.int8)}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    forward, parts, centred = MODELS[name]
    model = randomised(TORCH, net(forward, **parts))
    result = to_rms_norm(model, ROWS)
    assert result.centred == tuple(centred.split())
    if not centred:
        assert left(result).keys() == {"n"}
        assert left(result)["n"].startswith(SEEN)
        assert torch.equal(model(ROWS), result.model(ROWS))
        return
    assert not left(result)
    assert result.exact <= ROUNDING
    assert distance(model(ROWS).detach(), result.model(ROWS).detach()) <= SINGLE
    assert ("b.weight" in result.unreached) == (name == "a branch")


def test_what_stays_of_a_module():
    """Modes, frozen parameters and hooks."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.LayerNorm(4), nn.Dropout(0.0)).train()
    model[0].weight.requires_grad_(False)
    calls = []
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
        to_rms_norm(net(lambda m, x: m.n(m.a(x) + next(calls) * torch.arange(4.0))), ROWS)
    search = importlib.import_module("rmsnorm.conversion.layer_norm.search")
    monkeypatch.setattr(search, "by_halves", lambda some, fit: list(some))
    with pytest.raises(InputError, match="the outputs differ in float64 by more than 1e-10"):
        to_rms_norm(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4)), ROWS)


def test_subclasses():
    class Same(nn.LayerNorm):
        def forward(self, x):
            return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    class MoreLayerNorm(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x) + 1

    result = to_rms_norm(nn.Sequential(nn.Linear(3, 4), Same(4), nn.Linear(4, 4), MoreLayerNorm(4)), ROWS)
    assert [layer.kind for layer in result.layers if layer.variant] == ["Same"]
    assert left(result) == {"3": "it does not compute LayerNorm over the last axis"}
    assert result.exact <= ROUNDING


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_of_pytorch(norm_first):
    """Its fused path knows LayerNorm alone, and asks no norm."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False)
    model = randomised(TORCH, nn.Sequential(nn.Embedding(11, 8), encoder, nn.Linear(8, 3)).eval())
    result = to_rms_norm(model, IDS)
    assert (len(result.layers), len(left(result))) == (5, 0 if norm_first else 5)
    assert distance(model(IDS).detach(), result.model(IDS).detach()) <= SINGLE


TOKENS = {"vocab_size": 11, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}
SIZES = {**LAYERS, "intermediate_size": 16, "num_key_value_heads": 2}
POSITIONS = {"max_position_embeddings": 16}
OF_GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 16}
# configuration, model, its options, the norms that are converted and those that stay
TRANSFORMERS = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", OF_GPT2, 5, 0),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", SIZES, 5, 0),
    "neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", SIZES, 5, 0),
    "bert": ("BertConfig", "BertModel", {**SIZES, **POSITIONS}, 1, 4),
    "cohere": ("CohereConfig", "CohereForCausalLM", SIZES, 3, 0),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", SIZES, 5, 0),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", {**SIZES, "head_dim": 4}, 5, 0),
    "vit": ("ViTConfig", "ViTModel", {**SIZES, "image_size": 8, "patch_size": 4}, 5, 0),
    "opt": ("OPTConfig", "OPTForCausalLM", {**LAYERS, **POSITIONS, "ffn_dim": 16, "word_embed_proj_dim": 8}, 5, 0),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"n_layer": 2, "n_head": 2, "hidden_size": 8}, 1, 5),
    "phi": ("PhiConfig", "PhiForCausalLM", {**SIZES, **POSITIONS}, 3, 0),
}


def outputs(model, x):
    with torch.no_grad():
        return [y for y in model(x).to_tuple() if isinstance(y, torch.Tensor)]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name, tmp_path):
    """What is saved has LayerNorms when it is loaded again, and the same outputs. Tied embeddings are untied."""
    transformers = pytest.importorskip("transformers")
    config, cls, options, *counts = TRANSFORMERS[name]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**({} if name == "vit" else TOKENS), **options))
    model = randomised(TORCH, model.eval())
    x = torch.linspace(-1, 2, 384).square().reshape(2, 3, 8, 8) if name == "vit" else IDS
    result = to_rms_norm(model, x)
    assert [len(result.layers) - len(left(result)), len(left(result))] == counts
    assert result.exact <= ROUNDING
    assert "from_pretrained makes LayerNorms again, which compute the same with these weights" in result.notes
    result.model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    for before, after, again in zip(*(outputs(each, x) for each in (model, result.model, loaded)), strict=True):
        assert distance(before, after) <= SINGLE
        assert distance(after, again) <= 2 * SINGLE  # each rounds in its own way
    if name == "gpt2":
        wte, head = result.model.transformer.wte.weight, result.model.lm_head.weight
        assert torch.equal(head, model.lm_head.weight)
        assert wte.mean(-1).abs().max() < 1e-7 < head.mean(-1).abs().min()
        assert "transformer.wte.weight: no longer tied to lm_head.weight" in result.notes
        assert (model.config.tie_word_embeddings, result.model.config.tie_word_embeddings) == (True, False)
