"""replace: modules of PyTorch one by one: gates, groups, layouts, what stays and why, and what is kept."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch_arrays import LAYOUTS, randn  # noqa: E402
from torch_layers import LlamaRMSNorm, OddGate, randomised, ulp_bound  # noqa: E402

import rmsnorm  # noqa: E402
from rmsnorm.conversion import replace, to_rms_norm  # noqa: E402
from rmsnorm.torch_impl import RMSNorm  # noqa: E402

module = importlib.import_module("rmsnorm.conversion.replacement.proof")
Replaced = importlib.import_module("rmsnorm.conversion.replacement.change").Replaced


GATED = {
    "mamba2.MambaRMSNormGated": ((64, 16), "llama", "silu gate before the norm, in groups of 16"),  # dgate cancels
    "qwen3_next.Qwen3NextRMSNormGated": ((16,), "apex", "silu gate after the norm"),
    "kimi_linear.KimiLinearRMSNormGated": ((16,), "standard", "sigmoid gate after the norm"),
    "falcon_h1.FalconH1RMSNormGated": ((32, 1e-5, 4, False), "standard", "silu gate before the norm, in groups of 8"),
}


@pytest.mark.parametrize("name", GATED)
def test_gates_and_groups(name: str) -> None:
    """The gate keeps its place and name; without one, or with one of another shape, the module runs its own code."""
    model, kind = name.split(".")
    arguments, variant, form = GATED[name]
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    old = randomised(getattr(module, kind)(*arguments))
    new = copy.deepcopy(old)
    (entry,) = replace(new)
    assert (entry.variant.name, entry.why) == (variant, f"recognised, with a {form}")
    assert type(new) is not type(old)
    x, gate = randn(3, 2, arguments[0]), randn(3, 2, arguments[0])
    results = []
    for layer in (old, new):
        leaves = [x.clone().requires_grad_(), gate.clone().requires_grad_(), layer.weight]
        y = layer(leaves[0], gate=leaves[1])
        results.append([y, *torch.autograd.grad((y * y.detach().cos()).sum(), leaves)])
    for want, got in zip(*results, strict=True):
        assert ((got - want).abs() <= ulp_bound(64, torch.float32) * want.abs().max()).all()
    assert not torch.equal(results[0][0], results[1][0]), "it is the same code"
    assert torch.equal(new(x, gate), results[1][0])
    assert torch.equal(new(x, gate.flip(0)), new(hidden_states=x, gate=gate.flip(0)))
    if model in ("mamba2", "falcon_h1"):
        assert torch.equal(new(x), old(x))
    assert torch.equal(new(x, gate[:, :1]), old(x, gate[:, :1]))
    half = [layer.bfloat16()(x.bfloat16(), gate.bfloat16()) for layer in (old, new)]
    assert torch.equal(*half)
    assert torch.equal(pickle.loads(pickle.dumps(new))(x.bfloat16(), gate.bfloat16()), half[0])


class GroupedNorm(nn.Module):
    """Of so many features, or so many groups."""

    def __init__(self, size: int = -1, count: int = -1, width: int | None = 32) -> None:
        super().__init__()
        self.sizes = (count, size)
        self.weight = None if width is None else nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.unflatten(-1, self.sizes)
        y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).flatten(-2)
        return y if self.weight is None else y * self.weight


@pytest.mark.parametrize("old", [GroupedNorm(size=8), GroupedNorm(count=2), GroupedNorm(count=2, width=None)])
def test_groups_without_a_gate(old: GroupedNorm) -> None:
    """A module without a gain may have a number of groups: at another width it runs its own code."""
    new = copy.deepcopy(old)
    (entry,) = replace(new)
    size = 32 if old.weight is None else 16 if old.sizes[0] == 2 else 8
    assert (entry.why, entry.variant.eps) == (f"recognised, in groups of {size}", pytest.approx(1e-6, rel=1e-3))
    for width in (2 * size, 4 * size) if old.weight is None else (32,):
        results = []
        for layer in (old, new):
            x = randn(3, 2, width).requires_grad_()
            y = layer(x)
            leaves = [x, *layer.parameters()]
            results.append([y, *torch.autograd.grad((y * y.detach().cos()).sum(), leaves)])
        for want, got in zip(*results, strict=True):
            assert ((got - want).abs() <= ulp_bound(64, torch.float32) * want.abs().max()).all()
        assert torch.equal(results[0][0], results[1][0]) == (old.weight is None and width == 4 * size)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.RMSNorm(8, 1e-3),
        lambda: nn.RMSNorm((3, 8)),
        lambda: nn.RMSNorm(8, elementwise_affine=False),
        lambda: nn.RMSNorm(8, dtype=torch.float64),
        lambda: nn.RMSNorm(8, dtype=torch.bfloat16),
        lambda: LlamaRMSNorm(8),
    ],
)
def test_a_layer_alone(make: Any) -> None:
    """The model may be the layer itself; what it gives is nearer to the truth than a rounding of the original is."""
    layer = randomised(make())
    dtype = next((p.dtype for p in layer.parameters()), torch.float32)
    x = randn(5, 3, 8, dtype=dtype)
    want, representation = layer(x), repr(layer)
    (entry,) = replace(layer)
    assert isinstance(layer, (RMSNorm, Replaced))
    assert (entry.name, entry.why) == ("", "recognised")
    assert str(entry).startswith("the model (")
    assert ((layer(x) - want).abs() <= ulp_bound(24, dtype) * want.abs()).all()
    assert repr(layer) == f"{representation[:-1]}{', ' * ('=' in representation)}computed by rmsnorm)"
    if entry.kind != "RMSNorm":
        return
    made = RMSNorm(layer.normalized_shape, layer.eps, layer.elementwise_affine, variant=layer.variant, dtype=dtype)
    made.load_state_dict(layer.state_dict())
    assert torch.equal(made(x), layer(x))
    assert vars(made).keys() <= vars(layer).keys()


class FusedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Any) -> Any:
        return nn.functional.rms_norm(x, (8,), self.weight, 1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inside the compiler
@pytest.mark.parametrize("make", [FusedNorm, lambda: nn.RMSNorm(8)])
def test_results_lie_as_those_of_the_built_in(make: Any) -> None:
    """They are contiguous, whatever the order of x: what a model views may be of either."""
    model = nn.Sequential(make())
    old = copy.deepcopy(model)
    (line,) = replace(model)
    assert line.variant is not None
    for layout in LAYOUTS.values():
        x = layout(randn(2, 3, 5, 8)).requires_grad_()
        for each in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
            assert each(x).stride() == old(x).stride()
        torch._dynamo.reset()
    gradients = [torch.autograd.grad(m(x).square().sum(), x)[0] for m in (model, old)]
    torch.testing.assert_close(*gradients)


def test_identity_hooks_and_devices_are_kept() -> None:
    norm, other = LlamaRMSNorm(8), nn.RMSNorm(8, device="meta")
    model = nn.Sequential(norm, nn.Linear(8, 8), norm, other).eval()
    norm.weight.requires_grad_(False)
    norm.note = "kept"
    calls: list[str] = []
    norm.register_forward_hook(lambda *_: calls.append("after"))
    norm.register_forward_pre_hook(lambda *_: calls.append("before"))
    norm.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    report = replace(model)
    assert [(entry.name, entry.variant.name) for entry in report] == [("0", "llama"), ("3", "torch")]
    assert calls == []
    assert model[0] is model[2] is norm
    assert not norm.training
    assert not norm.weight.requires_grad
    assert norm.note == "kept"
    model[:3](randn(2, 8))
    norm.load_state_dict(norm.state_dict())
    assert calls == ["before", "after"] * 2 + ["loaded"]
    assert other.weight.device.type == "meta"
    assert list(model.state_dict()) == ["0.weight", "1.weight", "1.bias", "2.weight", "3.weight"]
    assert copy.deepcopy(model)[0](randn(2, 8)).shape == (2, 8)


def test_a_small_call_again_is_that_of_our_layer() -> None:
    """What it keeps of a call is of that shape and of this process, and sees the weight of now."""
    layer, ours = LlamaRMSNorm(8), RMSNorm(8, variant="llama")
    replace(layer)
    with torch.no_grad():
        for shape in ((2, 8), (2, 8), (3, 2, 8), (2, 8)):
            layer.weight.add_(0.5)
            ours.weight.copy_(layer.weight)
            x = randn(*shape)
            assert torch.equal(layer(x), ours(x))
            assert len(vars(layer).get("_kept", ())) == len(ours._kept)
        again = pickle.loads(pickle.dumps(layer))
    assert "_kept" not in vars(again) | vars(copy.deepcopy(layer))
    assert torch.equal(again(x), ours(x))
    layer(x).sum().backward()
    assert layer.weight.grad is not None


class FixedGain(nn.Module):
    """With a gain that does not learn."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.register_buffer("weight", torch.full((8,), gain))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, (8,), eps=1e-6) * self.weight


def test_equal_modules_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    identify = module.identify_opened

    def record(layer: Any, **options: Any) -> Any:
        asked.append(layer)
        return identify(layer, **options)

    monkeypatch.setattr(module, "identify_opened", record)
    layers = [LlamaRMSNorm(8, eps) for eps in (1e-6, 1e-5) for _ in range(8)]
    fixed = [FixedGain(gain) for gain in (1.0, 1.0, 2.0)]
    others = [*(nn.RMSNorm(8) for _ in range(8)), LlamaRMSNorm(6), LlamaRMSNorm(8).half(), *fixed]
    report = replace(nn.ModuleList([*layers, *others]))
    assert len(report) == 29
    assert len(asked) == 7
    assert [entry.variant.eps for entry in report] == [1e-6] * 8 + [1e-5] * 8 + [None] * 8 + [1e-6] * 5


class OddRows(LlamaRMSNorm):
    def __init__(self, change: Any) -> None:
        super().__init__(8)
        self.change, self.losses = change, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self, x, super().forward(x))


ODD_ROWS = {
    "NaN": (lambda _, x, y: y.nan_to_num(), r".* each with 'NaN in a row': .* f32 y: .* got 0, want nan.*"),
    "infinity": (
        lambda _, x, y: torch.where(x.isinf(), 1.0, y).to(y.dtype),
        r".*; zeros and infinity in rows; training' f32 y: .* got 1, want nan.*",
    ),
    "zeros": (
        lambda _, x, y: torch.where(x.eq(0).all(-1, keepdim=True), 1.0, y).to(y.dtype),
        r"with a row of zeros, y of row 0 is another one",
    ),
    "zeros in one row": (
        lambda _, x, y: torch.where(x.eq(0).all(-1, keepdim=True) & x.any(), 1.0, y).to(y.dtype),
        r"with a row of zeros, y of row 0 is another one",
    ),
    "zeros alone": (lambda _, x, y: y if x.any() else y + 1, r".* each with 'zeros': .* f32 y: .* got 1, want -?0.*"),
    "a loss": (lambda self, x, y: self.losses.append(y.detach().mean()) or y, r"a call changes its losses"),
    "a loss of now": (lambda self, x, y: setattr(self, "loss", y.detach().mean()) or y, r"a call changes its loss"),
}


@pytest.mark.parametrize("name", ODD_ROWS)
def test_rows_that_are_special_and_what_a_call_leaves(name: str) -> None:
    change, reason = ODD_ROWS[name]
    (entry,) = replace(OddRows(change))
    assert entry.variant is None
    assert re.fullmatch(rf"{reason}.*", entry.why)


class EpsOfTheSumNorm(nn.Module):
    """Without a gain, so that it takes rows of every width; the eps of the mean is 1e-3 over their width."""

    def __init__(self, axis: int = -1, gains: int = 0) -> None:
        super().__init__()
        self.axis, self.gain = axis, nn.Parameter(torch.ones(gains, 1)) if gains else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.square().sum(self.axis, keepdim=True) + 1e-3
        return x * torch.rsqrt(mean) * x.shape[self.axis] ** 0.5 * self.gain


@pytest.mark.parametrize("options", [(), (-1, 1), (-1, 4)])
def test_an_eps_that_depends_on_the_width_is_no_constant(options: Any) -> None:
    (entry,) = replace(nn.ModuleDict({"norm": EpsOfTheSumNorm(*options)}))
    assert entry.variant is None
    assert entry.why == "eps is 0.001 / n: it is added to the sum of squares, not to their mean"


def test_a_norm_that_differs_for_some_axes_only_stays() -> None:
    (entry,) = replace(OddGate(lambda y, gate: 1.1 * y if y.ndim == 3 else y))
    assert entry.variant is None
    assert "3 axes" in entry.why


def test_a_replaced_module_is_compiled_in_one_graph() -> None:
    mamba = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    x = randn(2, 3, 16)
    for layer, inputs in ((LlamaRMSNorm(16), (x,)), (mamba.MambaRMSNormGated(16, 8), (x, x))):
        replace(layer)
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        assert torch.equal(compiled(*inputs), layer(*inputs))


class T5XNorm(nn.Module):
    """As T5X, MaxText and EasyLM compute it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return y * self.weight.to(x.dtype)


def test_a_gain_that_is_cast_to_the_dtype_of_x() -> None:
    old = randomised(T5XNorm())
    new = copy.deepcopy(old)
    (entry,) = replace(new)
    assert (entry.variant, entry.why) == (rmsnorm.Variant.get("t5x"), "recognised")
    for dtype in (torch.float16, torch.bfloat16):
        x, dy = randn(5, 16).to(dtype), randn(5, 16).to(dtype)
        y = new(x)
        assert torch.equal(y, old(x))
        (dweight,) = torch.autograd.grad(y, [new.weight], dy)
        assert torch.equal(dweight, rmsnorm.torch_impl.rms_norm_vjp(dy, x, new.weight.detach(), variant="t5x")[1])


class CentredL2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(x, dim=-1) * 4 * (self.gamma + 1)


def test_a_variant_that_is_no_preset_is_named_by_the_nearest() -> None:
    (entry,) = replace(CentredL2())
    assert str(entry).startswith("the model (CentredL2): now RMSNorm, variant x_transformers but scale_offset is 1.0, ")


def test_another_variant_for_all() -> None:
    model = nn.Sequential(LlamaRMSNorm(8, 1e-5), nn.LayerNorm(8), nn.RMSNorm(8, 1e-6))
    first, left, last = replace(model, "llama")
    assert (first.variant, left.variant, last.variant) == (rmsnorm.Variant.get("llama"), None, first.variant)
    assert first.why == "eps is 1e-05, llama has 1e-06"
    assert "rounding is 'after_scale', llama has 'before_scale'" in last.why
    x = randn(4, 8)
    assert torch.equal(model[0](x), rmsnorm.torch_impl.rms_norm(x, model[0].weight, variant="llama"))
    own = rmsnorm.Variant.get("gemma").replace(name="mine", eps=0.1)
    (entry,) = replace(nn.RMSNorm(8), own)
    assert entry.variant is own
    with pytest.raises(ValueError, match=r"replace: variant is 'lama', .* did you mean 'llama'"):
        replace(nn.RMSNorm(8), "lama")


@pytest.mark.parametrize("change", [replace, to_rms_norm])
def test_encoders_call_the_norms_in_evaluation(change: Any, monkeypatch: Any) -> None:
    """They would compute LayerNorm with the parameters, or fail without a bias."""
    encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
    if change is replace:
        encoder.norm1, encoder.norm2 = nn.RMSNorm(8, eps=1e-5), nn.RMSNorm(8, eps=1e-5)
    model: Any = nn.Sequential(nn.Embedding(11, 8), encoder, nn.LayerNorm(8), nn.Linear(8, 3)).eval()
    tokens = torch.tensor([[1, 5, 2]])
    if change is replace:
        replace(model)
    else:
        model = to_rms_norm(model, tokens).model
    encoder = model[1]
    assert type(encoder.norm1) is RMSNorm
    calls, forward = [], RMSNorm.forward
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: calls.append(self) or forward(self, x))
    with torch.no_grad():
        model(tokens)
    assert calls[:2] == [encoder.norm1, encoder.norm2]
