"""replace: the RMSNorm modules of real models become ours; the models say the same, and learn the same."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402
from torch_arrays import randn  # noqa: E402
from torch_layers import LlamaRMSNorm, ulp_bound  # noqa: E402

import rmsnorm  # noqa: E402
from rmsnorm.conversion import replace  # noqa: E402

module = importlib.import_module("rmsnorm.conversion.replacement.proof")
Replaced = importlib.import_module("rmsnorm.conversion.replacement.change").Replaced

ROOT = Path(__file__).parents[2]
WIDTH = 32
SIZES = {
    "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
# configuration, model, its arguments, and its norms: variant and number
MODELS: dict[str, tuple[str, str, dict[str, Any], str, int]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"rms_norm_eps": 1e-5}, "llama", 5),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {}, "gemma", 5),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}, "llama", 9),  # 64 norms in 4 groups are like 9 in 2
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {"eos_token_id": 1}, "standard", 9),
    "t5": ("T5Config", "T5ForConditionalGeneration",
           {"vocab_size": 64, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
            "dropout_rate": 0.0}, "t5", 12),
}  # fmt: skip


def build(name: str) -> Any:
    """A tiny model from its configuration, with gains and other weights that show."""
    transformers = pytest.importorskip("transformers")
    config, cls, options, _, _ = MODELS[name]
    sizes = {} if name == "t5" else SIZES
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**{**sizes, **options}))
    for i, parameter in enumerate(model.parameters()):
        if parameter.ndim == 1:
            parameter.data.add_(0.3 * randn(*parameter.shape, seed=i))
    return model.train()


def tokens(seed: int = 0) -> Any:
    return torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(seed))


def outputs(model: Any, ids: Any) -> Any:
    more = {"decoder_input_ids": ids.roll(1, 1)} if hasattr(model, "encoder") else {}
    return model(input_ids=ids, labels=ids, **more)


def norms_of(model: Any) -> list[Any]:
    return [layer for layer in model.modules() if "Norm" in type(layer).__name__]


def as_far_as_rounding_goes(model: Any, measure: Callable[[Any], Any]) -> Any:
    """How far a measure of a model moves when every output of a norm is off by the bound on the original's own
    rounding. Ours is off by less than an ulp, and errors of the same size in other places move it about as far; four
    times the farther of two allows for those that add up.
    """
    bound, still, farthest = ulp_bound(WIDTH, torch.float32), measure(copy.deepcopy(model)), 0.0
    for seed in range(2):
        moved = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(seed)
        for norm in norms_of(moved):
            norm.register_forward_hook(
                lambda _, __, y, g=generator: y * (1 + bound * (2 * torch.rand(y.shape, generator=g) - 1).sign())
            )
        farthest = max(farthest, (measure(moved) - still).abs().max().item())
    assert 0 < farthest < 1e-2
    return 4 * farthest


def logits(model: Any) -> Any:
    return outputs(model, tokens()).logits.detach()


def learned(model: Any) -> Any:
    """Losses of four steps on the same few sentences, and the logits after them."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.03), []
    for _ in range(4):
        loss = outputs(model, tokens(1)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.cat([torch.stack(losses), logits(model).flatten()])


@pytest.mark.parametrize("name", MODELS)
def test_a_model_says_and_learns_the_same(name: str) -> None:
    model = build(name)
    mine = copy.deepcopy(model)
    parameters, norms = dict(mine.named_parameters()), norms_of(mine)
    kinds = [type(norm) for norm in norms]
    keys = list(mine.state_dict())
    report = replace(mine)
    _, _, _, variant, count = MODELS[name]
    assert [entry.variant.name for entry in report if entry.variant] == [variant] * count
    assert [entry.name for entry in report] == [n for n, layer in mine.named_modules() if isinstance(layer, Replaced)]
    assert all(isinstance(norm, kind) and norm.training for norm, kind in zip(norms, kinds, strict=True))
    assert list(mine.state_dict()) == keys
    assert all(parameter is parameters[key] for key, parameter in mine.named_parameters())
    (again,) = replace(mine)
    assert str(again) == f"the model ({type(mine).__name__}): left; its {count} RMSNorm are replaced already"

    wrong = copy.deepcopy(model)  # the tolerance can tell one eps from another
    replace(wrong, rmsnorm.Variant.get(variant).replace(eps=1e-3))
    for measure in (logits, learned):
        want, got = measure(copy.deepcopy(model)), measure(copy.deepcopy(mine))
        tolerance = as_far_as_rounding_goes(model, measure)
        assert (got - want).abs().max() <= tolerance
        assert (measure(wrong) - want).abs().max() > tolerance
    assert got[3] < got[2] < got[1] < 0.99 * got[0]
    mine.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(mine.state_dict(), strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "deepseek_v2", "deepseek_v3", "deepseek_v4", "gemma3_text", "gemma3n_text", "gemma4_text", "glm_moe_dsa",
    "kimi_linear", "llama4_text", "minimax", "minimax_m2", "nemotron_h", "olmo2", "qwen3_5_text", "qwen3_next",
])  # fmt: skip
def test_the_table_of_families_is_what_small_models_have_and_they_say_the_same(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    path = Path(rmsnorm.__file__).parent / "specification" / "families.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    spec = importlib.util.spec_from_file_location("families_program", ROOT / "docs" / "families.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    rows = document["families"][name]
    if document["transformers"] == transformers.__version__:
        assert program.ask(name) == rows
    model = program.build(name).eval()
    mine = copy.deepcopy(model)
    left = {entry.kind for entry in replace(mine) if entry.variant is None}
    assert left - {"LayerNorm"} == {row["class"] for row in rows if row["variant"] is None}
    assert (logits(mine) - logits(model)).abs().max() <= as_far_as_rounding_goes(model, logits)


def test_half_models_are_recognised_as_they_are() -> None:
    """In bf16 what a class rounds correctly is the same bits; a model generates the same tokens."""
    model = build("llama").bfloat16().eval()
    mine = copy.deepcopy(model)
    report = replace(mine)
    assert {entry.variant.name for entry in report} == {"llama"}
    x = randn(256, WIDTH, dtype=torch.bfloat16)
    for theirs, ours in zip(norms_of(model), norms_of(mine), strict=True):
        same = theirs(x) == ours(x)
        assert same.double().mean() >= 0.999  # float32 inside hardly ever shows in 8 bits
        assert ((theirs(x) - ours(x)).abs() <= 2 * 2.0**-8 * theirs(x).abs()).all()
    ids = tokens()[:, :4]
    produce = {"max_new_tokens": 8, "do_sample": False}
    with torch.no_grad():
        assert torch.equal(mine.generate(ids, **produce), model.generate(ids, **produce))


class OwnNorm(nn.Module):
    """A norm with its own name and shape of the gain, along its own axis; without a gain where the shape is None."""

    def __init__(self, shape: Any, axis: int = -1, name: str = "g", buffer: bool = False) -> None:
        super().__init__()
        self.axis, self.name, self.bias = axis, name, None
        if buffer:
            self.register_buffer(name, torch.ones(shape), persistent=False)
        elif shape is not None:
            setattr(self, name, nn.Parameter(torch.ones(shape)))

    def forward(self, hidden: Any) -> Any:
        y = hidden * torch.rsqrt(hidden.square().mean(self.axis, keepdim=True) + 1e-5)
        return y * getattr(self, self.name, 1.0)


class FixedFactorNorm(nn.Module):
    """As in x-transformers: nothing but the factor shows the width, and another width has the same factor."""

    def __init__(self, width: int, gains: int = 0) -> None:
        super().__init__()
        self.factor = width**0.5
        self.g = nn.Parameter(torch.ones(gains)) if gains else None

    def forward(self, x: Any) -> Any:
        y = nn.functional.normalize(x, dim=-1) * self.factor
        return y if self.g is None else y * self.g


class SquaredNorm(FixedFactorNorm):
    def forward(self, x: Any) -> Any:
        return nn.functional.normalize(x, dim=-1) * self.factor * (self.g - 2).square()


class Channels(OwnNorm):
    def forward(self, hidden: Any) -> Any:
        y = hidden * torch.rsqrt(hidden.square().mean(1, keepdim=True) + 1e-5)
        return y * self.g.reshape(-1, *(1 for _ in hidden.shape[2:]))


class WithResidual(LlamaRMSNorm):
    def forward(self, hidden_states: Any, residual: Any = None, *, factor: float = 1.0) -> Any:
        if residual is None:
            return factor * super().forward(hidden_states)
        return super().forward(hidden_states + residual), hidden_states + residual

    @property
    def largest(self) -> Any:
        return self.weight.abs().max()


class Random(LlamaRMSNorm):
    def forward(self, x: Any) -> Any:
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


class Counting(LlamaRMSNorm):
    calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return super().forward(x)


class PairNorm(LlamaRMSNorm):
    def forward(self, x: Any) -> Any:
        return super().forward(x), None


class Training(LlamaRMSNorm):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * (1.05 if self.training else 1.0)


class Detached(nn.RMSNorm):
    def forward(self, x: Any) -> Any:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt().detach() * self.weight


class Doubled(LlamaRMSNorm):
    def forward(self, x: Any) -> Any:
        return 2 * super().forward(x)


def parametrized() -> Any:
    layer = nn.RMSNorm(8)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    return layer


def patched() -> Any:
    layer = nn.RMSNorm(8)
    layer.forward = layer.forward
    return layer


class MaskNorm(OwnNorm):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override, unused-ignore]
        return super().forward(x) * mask


class DriverNorm(OwnNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("0 active drivers")


LEFT = {
    "driver": (lambda: DriverNorm((8,)), "RuntimeError: 0 active drivers"),
    "mask": (lambda: MaskNorm((8,)), "its call needs mask, expected x alone, or x and a gate"),
    "layer norm": (lambda: nn.LayerNorm(8), "it computes LayerNorm"),
    "batch norm": (lambda: nn.BatchNorm1d(8), "it holds weight, bias, running_mean"),
    "group norm": (lambda: nn.GroupNorm(2, 8), "it computes something else"),
    "dropout": (lambda: Random(8), "in training, y is another one than in evaluation"),
    "counter": (lambda: Counting(8), "a call changes its calls"),
    "tuple": (lambda: PairNorm(8), "it returns a tuple of 2"),
    "in training": (lambda: Training(8), "in training, y is another one than in evaluation"),
    "gradient": (lambda: Detached(8), "2 of 2 circumstances: '1 row of 8, 1 axis; training' f32 dx: "),
    "factor": (lambda: Doubled(8), "y is 2 times too large"),
    "modules": (parametrized, "it has modules of its own"),
    "method": (patched, "its forward is not that of its class"),
    "number": (lambda: SquaredNorm(8, 1), "y is not linear in the gain"),
    "channels": (lambda: Channels((8,), 1), "it normalises axis 1 of 3; only norms along the last axes are replaced"),
    "(C, 1, 1)": (lambda: OwnNorm((8, 1, 1), -3), "; only norms along the last axes are replaced"),
    "(heads, 1, d)": (lambda: OwnNorm((3, 1, 8)), "y is another one: at ("),
    "one number": (lambda: OwnNorm((1,)), "its gain has the shape (1,), expected one number for each element of a row"),
    "factor of one width": (lambda: FixedFactorNorm(32), "y is 0.707107 (1 / sqrt(n)) times what it must be"),
}


# module, shape of x
OWN = {
    "g": (lambda: OwnNorm((8,)), (2, 3, 8)),
    "buffer": (lambda: OwnNorm((8,), name="scale", buffer=True), (2, 3, 8)),
    "no gain": (lambda: OwnNorm(None), (2, 3, 24)),
    "residual": (lambda: WithResidual(8), (2, 3, 8)),
}


@pytest.mark.parametrize("name", OWN)
def test_other_names_axes_and_calls(name: str) -> None:
    """The same outputs and gradients by any call, the same state, and the class that it had."""
    make, shape = OWN[name]
    torch.manual_seed(0)
    layer = make()
    for tensor in (*layer.parameters(), *layer.buffers()):
        tensor.data += 0.3 * torch.randn(tensor.shape)
    mine, kind, x = copy.deepcopy(layer), type(layer), randn(*shape)
    representation, keys = repr(mine), list(mine.state_dict())
    (dry,) = replace(mine, dry_run=True)
    assert type(mine) is kind
    (entry,) = replace(mine)
    assert entry == dry
    assert (": would be RMSNorm" in str(dry), ": now RMSNorm" in str(entry)) == (True, True)
    assert entry.variant is not None, entry.why
    assert isinstance(mine, Replaced)
    assert isinstance(mine, kind)
    assert repr(mine) == f"{representation[:-1]}computed by rmsnorm)"
    assert list(mine.state_dict()) == keys
    again = pickle.loads(pickle.dumps(mine))
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((x,), {}), ((), {entry_name(layer): x})]
    if name == "residual":
        calls += [((x, x), {}), ((x,), {"factor": 2.0})]
        assert entry.why == "recognised; with residual, factor it runs its own code"
        assert mine.largest == layer.largest
    for inputs, named in calls:
        results = []
        for module in (layer, mine, again):
            x.grad = None
            y = module(*(entry.requires_grad_() for entry in inputs), **named)
            y = y[0] if isinstance(y, tuple) else y
            results.append([y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])])
        for want, got, third in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            assert torch.equal(third, got)


def entry_name(layer: Any) -> str:
    return next(iter(inspect.signature(layer.forward).parameters))


@pytest.mark.parametrize("step", ["become", "finish"])
def test_all_or_nothing(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of what changes in place: a torch.nn.RMSNorm that becomes ours gets a bias and, in an encoder, a hook."""
    backend = importlib.import_module("rmsnorm.conversion.replacement.torch").BACKEND
    encoder = nn.TransformerEncoderLayer(8, 2, 16)
    encoder.norm1, encoder.norm2 = nn.RMSNorm(8), nn.RMSNorm(8)
    layers = [LlamaRMSNorm(8), encoder.norm1, encoder.norm2, OwnNorm((8,))]
    own, model = getattr(backend, step), nn.Sequential(layers[0], encoder, layers[3])

    def everything() -> list[Any]:
        return [
            (
                type(layer),
                {name: dict(entry) if isinstance(entry, dict) else entry for name, entry in vars(layer).items()},
            )
            for layer in layers
        ]

    before = everything()

    def fails(changed: Any, *norm: Any) -> None:
        own(changed, *norm)
        if changed in (layers[3], model):
            raise RuntimeError("out of luck")

    monkeypatch.setattr(backend, step, fails)
    with pytest.raises(RuntimeError, match="out of luck"):
        replace(model)
    assert everything() == before


def test_what_is_no_model() -> None:
    with pytest.raises(
        TypeError, match=r"model is None \(NoneType\), expected a torch.nn.Module, keras.Model or .*; pass"
    ):
        replace(None)
    with pytest.raises(TypeError, match=r"flax.nnx.Module; make an object of it first"):
        replace(nn.Linear)
    (entry,) = replace(nn.Linear(8, 8))
    why = 'no class of its modules has "norm" in its name, and none with a gain or a bias alone is RMSNorm'
    assert str(entry) == f"the model (Linear): left; {why}"


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone_and_why(name: str) -> None:
    make, why = LEFT[name]
    layer = make()
    kind, state = type(layer), dict(vars(layer))
    (entry,) = replace(nn.Sequential(nn.Linear(8, 8), layer, nn.Dropout(0.1)))
    assert (entry.name, entry.kind, entry.variant) == ("1", kind.__name__, None)
    assert why in entry.why
    assert str(entry) == f"1 ({kind.__name__}): left; {entry.why}"
    assert type(layer) is kind
    assert vars(layer) == state
