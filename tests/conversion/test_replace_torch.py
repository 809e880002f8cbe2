"""replace: modules of PyTorch one by one: layouts, compilers, what is kept, and the models of transformers."""

from __future__ import annotations

import copy
import importlib
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from adapters import FRAMEWORKS  # noqa: E402
from torch import nn  # noqa: E402
from torch_arrays import LAYOUTS, randn  # noqa: E402
from torch_layers import LlamaRMSNorm, randomised, ulp_bound  # noqa: E402

import rmsnorm  # noqa: E402
from rmsnorm.conversion import replace  # noqa: E402
from rmsnorm.torch_impl import RMSNorm  # noqa: E402

few = pytest.mark.usefixtures("few_circumstances")  # where the question is not what the proof asks


class OwnNorm(nn.Module):
    """A norm with its own name of the gain, which may be a buffer, or none."""

    def __init__(self, gain="parameter"):
        super().__init__()
        if gain == "buffer":
            self.register_buffer("g", torch.ones(8), persistent=False)
        elif gain:
            self.g = nn.Parameter(torch.linspace(0.5, 2, 8))

    def forward(self, hidden):
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-5) * getattr(self, "g", 1.0)


LAYERS = {
    "an eps": lambda: nn.RMSNorm(8, 1e-3),
    "two axes": lambda: nn.RMSNorm((3, 8)),
    "no gain": lambda: nn.RMSNorm(8, elementwise_affine=False),
    "bfloat16": lambda: nn.RMSNorm(8, dtype=torch.bfloat16),
    "llama": lambda: LlamaRMSNorm(8),
    "a buffer": lambda: OwnNorm("buffer"),
    "own without a gain": lambda: OwnNorm(""),
}


@few
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_alone(name):
    """The model may be the layer itself; what it gives is nearer to the truth than a rounding of the original is."""
    layer = randomised(LAYERS[name]())
    dtype = next((p.dtype for p in layer.parameters()), torch.float32)
    x, state = randn(5, 3, 8, dtype=dtype), list(layer.state_dict())
    want, representation = layer(x), repr(layer)
    (entry,) = replace(layer)
    assert (entry.name, entry.why, list(layer.state_dict())) == ("", "recognised", state)
    assert str(entry).startswith("the model (")
    assert ((layer(x) - want).abs() <= ulp_bound(24, dtype) * want.abs()).all()
    assert repr(layer) == f"{representation[:-1]}{', ' * ('=' in representation)}computed by rmsnorm)"
    if entry.kind == "RMSNorm":
        made = RMSNorm(layer.normalized_shape, layer.eps, layer.elementwise_affine, variant=layer.variant, dtype=dtype)
        made.load_state_dict(layer.state_dict())
        assert torch.equal(made(x), layer(x))
        assert vars(made).keys() <= vars(layer).keys()


@few
def test_variants():
    """One that is no preset, and another variant for all."""

    class CentredL2(OwnNorm):
        def forward(self, x):
            return nn.functional.normalize(x, dim=-1) * 8**0.5 * (self.g + 1)

    (entry,) = replace(CentredL2())
    assert str(entry).startswith("the model (CentredL2): now RMSNorm, variant x_transformers but scale_offset is 1.0, ")
    model = nn.Sequential(LlamaRMSNorm(8, 1e-5), nn.LayerNorm(8), nn.RMSNorm(8, 1e-6))
    first, left, last = replace(model, "llama")
    assert (first.variant, left.variant, last.variant) == (rmsnorm.Variant.get("llama"), None, first.variant)
    assert first.why == "eps is 1e-05, llama has 1e-06"
    assert "rounding is 'after_scale', llama has 'before_scale'" in last.why
    own = rmsnorm.Variant.get("gemma").replace(name="mine", eps=0.1)
    (entry,) = replace(nn.RMSNorm(8), own)
    assert entry.variant is own
    with pytest.raises(ValueError, match=r"replace: variant is 'lama', .* did you mean 'llama'"):
        replace(nn.RMSNorm(8), "lama")


# What is kept of a layer.


@few
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inside the compiler
@pytest.mark.parametrize("make", [LlamaRMSNorm, nn.RMSNorm])
def test_results_lie_as_those_of_the_built_in(make):
    """Compiled in one graph, too, whatever the order of x: a model may view them."""
    model = nn.Sequential(make(8))
    old = copy.deepcopy(model)
    replace(model)
    for layout in LAYOUTS.values():
        x = layout(randn(2, 3, 5, 8)).requires_grad_()
        for each in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
            assert each(x).stride() == nn.RMSNorm(8)(x).stride()
            torch.testing.assert_close(each(x), old(x))
        torch._dynamo.reset()


@few
def test_identity_hooks_and_devices_are_kept():
    norm, other = LlamaRMSNorm(8), nn.RMSNorm(8, device="meta")
    model = nn.Sequential(norm, nn.Linear(8, 8), norm, other).eval()
    norm.weight.requires_grad_(False)
    norm.note = "kept"
    calls = []
    norm.register_forward_hook(lambda *_: calls.append("after"))
    norm.register_forward_pre_hook(lambda *_: calls.append("before"))
    norm.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    report = replace(model)
    assert [(entry.name, entry.variant.name) for entry in report] == [("0", "llama"), ("3", "torch")]
    assert calls == []
    assert model[0] is model[2] is norm
    assert (norm.training, norm.weight.requires_grad, norm.note) == (False, False, "kept")
    model[:3](randn(2, 8))
    norm.load_state_dict(norm.state_dict())
    assert calls == ["before", "after"] * 2 + ["loaded"]
    assert other.weight.device.type == "meta"
    assert list(model.state_dict()) == ["0.weight", "1.weight", "1.bias", "2.weight", "3.weight"]


@few
def test_a_small_call_again_is_that_of_our_layer():
    """What it keeps of a call is of that shape and of this process, and sees the weight of now."""
    layer, ours = LlamaRMSNorm(8), RMSNorm(8, variant="llama")
    replace(layer)
    with torch.no_grad():
        for shape in ((2, 8), (2, 8), (3, 2, 8), (2, 8)):
            layer.weight.add_(0.5)
            ours.weight.copy_(layer.weight)
            x = randn(*shape)
            assert torch.equal(layer(x), ours(x))
        again = pickle.loads(pickle.dumps(layer))
    assert torch.equal(again(x), ours(x))
    layer(x).sum().backward()
    assert layer.weight.grad is not None


@few
def test_equal_modules_are_asked_once(monkeypatch):
    proof, asked = importlib.import_module("rmsnorm.conversion.replacement.proof"), []
    identify = proof.identify_opened
    monkeypatch.setattr(
        proof, "identify_opened", lambda layer, **options: asked.append(layer) or identify(layer, **options)
    )
    fixed = [OwnNorm("buffer") for _ in range(3)]
    fixed[2].g.mul_(2)
    layers = [LlamaRMSNorm(8, eps) for eps in (1e-6, 1e-5) for _ in range(8)]
    report = replace(nn.ModuleList([*layers, nn.RMSNorm(8), LlamaRMSNorm(6), LlamaRMSNorm(8).half(), *fixed]))
    assert (len(report), len(asked)) == (22, 7)
    assert [entry.variant.eps for entry in report[:19]] == [1e-6] * 8 + [1e-5] * 8 + [None] + [1e-6] * 2
    apart = nn.ModuleList([LlamaRMSNorm(8, np.float32(eps)) for eps in (0.25, 0.5)])
    assert [entry.variant.eps for entry in replace(apart)] == [0.25, 0.5]


@few
def test_encoders_call_the_norms_in_evaluation(monkeypatch):
    """They would compute LayerNorm with the parameters, or fail without a bias."""
    encoder = FRAMEWORKS["torch"]().layer("encoder", 8, 2, 16)
    model = nn.Sequential(encoder).eval()
    replace(model)
    assert type(encoder.norm1) is RMSNorm
    calls, forward = [], RMSNorm.forward
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: calls.append(self) or forward(self, x))
    with torch.no_grad():
        model(randn(1, 3, 8))
    assert calls == [encoder.norm1, encoder.norm2]


# Models of transformers.

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
# configuration, model, its arguments, and its norms: variant and number
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**SIZES, "rms_norm_eps": 1e-5}, "llama", 5),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", SIZES, "gemma", 5),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", SIZES, "llama", 9),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {**SIZES, "eos_token_id": 1}, "standard", 9),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5, "t5", 12),
}


def outputs(model, seed):
    ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(seed))
    more = {"decoder_input_ids": ids.roll(1, 1)} if hasattr(model, "encoder") else {}
    return model(input_ids=ids, labels=ids, **more)


def learned(model):
    """Logits, losses of four steps on the same few sentences, and the logits after them."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.03), []
    before = outputs(model, 0).logits.detach()
    for _ in range(4):
        losses.append(outputs(model, 1).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return before, torch.stack(losses).detach(), outputs(model, 0).logits.detach()


def moved(model, seed):
    """A copy, every norm of which is off by the bound on its own rounding."""
    model, generator, bound = copy.deepcopy(model), torch.Generator().manual_seed(seed), ulp_bound(32, torch.float32)
    for norm in model.modules():
        if "Norm" in type(norm).__name__:
            norm.register_forward_hook(
                lambda _, __, y: y + y * bound * (torch.rand(y.shape, generator=generator) - 0.5).sign()
            )
    return model


@few
@pytest.mark.parametrize("name", MODELS)
def test_a_model_says_and_learns_the_same(name):
    """Ours is off by less than an ulp: by four times what errors of that size in other places move, as they add up."""
    transformers = pytest.importorskip("transformers")
    config, cls, options, variant, count = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**options)).train()
    for i, parameter in enumerate(model.parameters()):
        if parameter.ndim == 1:
            parameter.data.add_(0.3 * randn(*parameter.shape, seed=i))
    mine, wrong = copy.deepcopy(model), copy.deepcopy(model)
    parameters, keys = dict(mine.named_parameters()), list(mine.state_dict())
    assert [entry.variant.name for entry in replace(mine) if entry.variant] == [variant] * count
    assert list(mine.state_dict()) == keys
    assert all(parameter is parameters[key] for key, parameter in mine.named_parameters())
    replace(wrong, rmsnorm.Variant.get(variant).replace(eps=1e-3))
    mine.load_state_dict(model.state_dict(), strict=True)
    others = [learned(moved(model, seed)) for seed in range(2)]
    found = [learned(each) for each in (model, mine, wrong)]
    assert (found[1][1].diff() < 0).all(), "its losses fall"
    for still, got, far, *near in zip(*found, *others, strict=True):
        tolerance = 4 * max((each - still).abs().max() for each in near)
        assert (got - still).abs().max() <= tolerance < 4e-2
        assert (far - still).abs().max() > tolerance, "the tolerance tells one eps from another"
