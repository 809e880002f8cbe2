"""LayerNorm into RMSNorm in models of transformers and in classes that are no LayerNorm of PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
from conversions import IDS, ROUNDING, SINGLE, distance, shown

torch = pytest.importorskip("torch")
from layer_norms_torch import assert_equal, randomised, run, sample  # noqa: E402
from torch import nn  # noqa: E402

from rmsnorm.conversion.layer_norm import to_rms_norm  # noqa: E402

TOKENS = {"vocab_size": 11, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 16}


# configuration, model, its options, layers that are converted, and layers that are left
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], int, int]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 16}, 5, 0),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {**SIZES, "num_key_value_heads": 2}, 5, 0),
    "neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", SIZES, 5, 0),
    "bert": ("BertConfig", "BertModel", {**SIZES, "max_position_embeddings": 16}, 1, 4),
    "t5": ("T5Config", "T5EncoderModel", {"num_layers": 1, "num_heads": 2, "d_model": 8, "d_ff": 16, "d_kv": 4}, 0, 3),
    "cohere": ("CohereConfig", "CohereForCausalLM", {**SIZES, "num_key_value_heads": 2}, 3, 0),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", {**SIZES, "num_key_value_heads": 2}, 5, 0),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", {**SIZES, "num_key_value_heads": 2, "head_dim": 4}, 5, 0),
    "rwkv": ("RwkvConfig", "RwkvForCausalLM", {"num_hidden_layers": 2, "hidden_size": 8, "context_length": 16}, 1, 5),
    "vit": ("ViTConfig", "ViTModel", {**SIZES, "image_size": 8, "patch_size": 4}, 5, 0),
}  # fmt: skip


def transformer(name: str) -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers")
    config, cls, options, _, _ = TRANSFORMERS[name]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**({} if name == "vit" else TOKENS), **options))
    x = torch.linspace(-1, 2, 384).square().reshape(2, 3, 8, 8) if name == "vit" else torch.tensor(IDS)
    return randomised(model), x


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name):
    """Pre-norm ones entirely; of BERT the norm of the embeddings, as others read LayerNorms with gains; T5 has none."""
    model, x = transformer(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    result = to_rms_norm(model, x)
    converted = [layer for layer in result.layers if layer.converted]
    assert (len(converted), len(result.layers) - len(converted)) == TRANSFORMERS[name][3:]
    for layer in result.layers:
        kind = type(result.model.get_submodule(layer.name)).__name__
        assert kind == ("RMSNorm" if layer.converted and layer.kind == "LayerNorm" else layer.kind)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert_equal(model, result, x, bound=SINGLE if name in ("cohere", "olmo") else ROUNDING)
    if name == "bert":
        assert "keeps a mean of" in shown(result)["encoder.layer.1.output.LayerNorm"]


def test_bert_as_it_is_made():
    """Gains that are all one write no mean, so that every norm of a BERT that is not trained can be converted."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**TOKENS, **TRANSFORMERS["bert"][2])).eval()
    result = to_rms_norm(model, torch.tensor(IDS))
    assert [layer.converted for layer in result.layers] == [True] * 5
    assert_equal(model, result, torch.tensor(IDS))


def test_a_tied_embedding(tmp_path):
    """GPT-2's logits are made with the embedding as it was; the stream is written with one of its own."""
    model, x = transformer("gpt2")
    result = to_rms_norm(model, x)
    wte, head = result.model.transformer.wte.weight, result.model.lm_head.weight
    assert torch.equal(head, model.lm_head.weight)
    assert wte is not head
    assert wte.mean(-1).abs().max() < 1e-7 < head.mean(-1).abs().min()
    assert "transformer.wte.weight: no longer tied to lm_head.weight, which does not change" in result.notes
    assert model.config.tie_word_embeddings
    assert not result.model.config.tie_word_embeddings
    written = [model.generate(x, max_new_tokens=6, do_sample=False) for model in (model, result.model)]
    assert torch.equal(*written)
    # The weights are those of the original architecture, too, whose LayerNorm takes away a mean of nothing.
    result.model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert distance(run(result.model, x)[0], run(loaded, x)[0]) <= SINGLE


def test_a_class_is_known_by_what_it_computes():
    """As timm's and diffusers' classes: LayerNorm with a forward of its own."""
    from rmsnorm.torch_impl import RMSNorm

    class Own(nn.LayerNorm):
        def forward(self, x):
            return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    class Channels(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.transpose(1, -1)).transpose(1, -1)

    model = nn.Sequential(nn.Linear(3, 4), Own(4), nn.ReLU(), nn.Linear(4, 4), Channels(4))
    result = to_rms_norm(model, sample(2, 3))
    assert [layer.converted for layer in result.layers] == [True, False]
    assert type(result.model[1]) is RMSNorm
    assert result.layers[1].why == "it does not compute LayerNorm over the last axis"


def test_a_class_that_is_no_layer_norm_of_the_framework_is_known_by_what_it_computes():
    """By its formula in float64: its own gain, offset, bias and eps stay. One call is by name, one has more than x."""

    class Own(nn.Module):
        """As in x-transformers, with the gain less 1; a buffer as bias, as in the repositories of lucidrains."""

        def __init__(self, eps=1e-6):
            super().__init__()
            self.gamma = nn.Parameter(torch.linspace(-0.5, 0.5, 4))
            self.register_buffer("beta", torch.zeros(4))
            self.eps = eps

        def forward(self, h, divisor=0):
            c = h - h.mean(-1, keepdim=True)
            root = (c.pow(2).sum(-1, keepdim=True) / (4 - divisor) + self.eps).sqrt()
            return c / root * (self.gamma + 1) + self.beta

    class Unbiased(Own):
        def forward(self, h):
            return super().forward(h, 1)

    class Narrow(Own):
        """As Cohere's, in float32 whatever x is."""

        def forward(self, h):
            return (nn.functional.layer_norm(h.float(), (4,), eps=1e-6) * (self.gamma + 1).float()).to(h.dtype)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm, self.same, self.other = nn.Linear(3, 4), Own(0.1), nn.Linear(4, 4), Own()
            self.unbiased, self.narrow = Unbiased(), nn.Sequential(Narrow())

        def forward(self, x):
            y = self.narrow(self.unbiased(self.same(self.norm(h=self.linear(x)))))
            return y, self.other(self.same(x @ x.mT @ x @ x.mT), 0)

    model = Net()
    result = to_rms_norm(model, sample(4, 3))
    assert {layer.name: (layer.converted, layer.why) for layer in result.layers} == {
        "norm": (True, "eps 0.1"),
        "other": (False, "it is called with more than x"),
        "narrow.0": (False, result.layers[-1].why),
    }
    assert "keeps a mean of" in result.layers[-1].why
    assert isinstance(result.model.norm, Own)
    assert result.model.state_dict().keys() == model.state_dict().keys()
    assert result.exact < ROUNDING
    shifted = sample(2, 4) + 3  # no mean is subtracted from what is not centred
    assert not torch.allclose(result.model.norm(shifted), model.norm(shifted))


def test_a_layer_that_cannot_be_opened_is_left_with_the_reason():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return nn.functional.layer_norm(x, (4,), self.weight)

        def __deepcopy__(self, memo):
            if not memo:  # of itself, and not of a model
                raise RuntimeError("it makes no copies")
            copied = type(self)()
            memo[id(self)] = copied
            return copied

    result = to_rms_norm(nn.Sequential(nn.Linear(3, 4), Own()), sample(2, 3))
    assert "cannot be asked what it computes (RuntimeError: it makes no copies)" in result.layers[0].why
