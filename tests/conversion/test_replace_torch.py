"""replace: modules of PyTorch one by one: gates, groups, layouts, compilers, what is kept, and all or nothing."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch_arrays import LAYOUTS, randn  # noqa: E402
from torch_layers import LlamaRMSNorm, randomised, ulp_bound  # noqa: E402

import rmsnorm  # noqa: E402
from rmsnorm.conversion import replace  # noqa: E402
from rmsnorm.torch_impl import RMSNorm  # noqa: E402

Replaced = importlib.import_module("rmsnorm.conversion.replacement.change").Replaced
few = pytest.mark.usefixtures("few_circumstances")  # where the question is not what the proof asks


class OwnNorm(nn.Module):
    """A norm with its own name and shape of the gain, along its own axis; without a gain where the shape is None."""

    def __init__(self, shape: Any = (8,), axis: int = -1, buffer: bool = False) -> None:
        super().__init__()
        self.axis = axis
        if buffer:
            self.register_buffer("g", torch.ones(shape), persistent=False)
        elif shape is not None:
            self.g = nn.Parameter(torch.linspace(0.5, 2, shape[-1]).expand(shape).clone())

    def forward(self, hidden: Any) -> Any:
        return hidden * torch.rsqrt(hidden.square().mean(self.axis, keepdim=True) + 1e-5) * getattr(self, "g", 1.0)


def derivatives(layer: Any, *inputs: Any) -> list[Any]:
    leaves = [each.clone().requires_grad_() for each in inputs]
    y = layer(*leaves)
    return [y, *torch.autograd.grad((y * y.detach().cos()).sum(), [*leaves, *layer.parameters()])]


def agree(got: list[Any], want: list[Any]) -> bool:
    bound = ulp_bound(64, torch.float32)
    return all(((a - b).abs() <= bound * b.abs().max()).all() for a, b in zip(got, want, strict=True))


# What is replaced.

GATED = {
    "mamba2.MambaRMSNormGated": ((64, 16), "llama", "silu gate before the norm, in groups of 16"),  # dgate cancels
    "qwen3_next.Qwen3NextRMSNormGated": ((16,), "apex", "silu gate after the norm"),
    "kimi_linear.KimiLinearRMSNormGated": ((16,), "standard", "sigmoid gate after the norm"),
    "falcon_h1.FalconH1RMSNormGated": ((32, 1e-5, 4, False), "standard", "silu gate before the norm, in groups of 8"),
}


@pytest.mark.parametrize("name", GATED)
def test_gates_and_groups_of_transformers(name: str) -> None:
    """The gate keeps its place and name; without one, or with one of another shape, the module runs its own code."""
    model, kind = name.split(".")
    arguments, variant, form = GATED[name]
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    old = randomised(getattr(module, kind)(*arguments))
    new = copy.deepcopy(old)
    (entry,) = replace(new)
    assert (entry.variant.name, entry.why) == (variant, f"recognised, with a {form}")
    x, gate = randn(3, 2, arguments[0]), randn(3, 2, arguments[0], seed=1)
    want, got = derivatives(old, x, gate), derivatives(new, x, gate)
    assert agree(got, want)
    assert not torch.equal(want[0], got[0]), "it is the same code"
    assert torch.equal(new(x, gate.flip(0)), new(hidden_states=x, gate=gate.flip(0)))
    if model in ("mamba2", "falcon_h1"):
        assert torch.equal(new(x), old(x))
    assert torch.equal(new(x, gate[:, :1]), old(x, gate[:, :1]))
    half = [layer.bfloat16()(x.bfloat16(), gate.bfloat16()) for layer in (old, new)]
    assert torch.equal(*half)
    assert torch.equal(pickle.loads(pickle.dumps(new))(x.bfloat16(), gate.bfloat16()), half[0])


class TwoGroupsNorm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.unflatten(-1, (2, -1))
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).flatten(-2)


@few
def test_a_number_of_groups_without_a_gain() -> None:
    """At another width it runs its own code."""
    old, new = TwoGroupsNorm(), TwoGroupsNorm()
    (entry,) = replace(new)
    assert entry.why == "recognised, in groups of 32"
    for width in (64, 128):
        want, got = (derivatives(layer, randn(3, 2, width)) for layer in (old, new))
        assert agree(got, want)
        assert torch.equal(want[0], got[0]) == (width == 128)


@pytest.mark.parametrize("make", [
    lambda: nn.RMSNorm(8, 1e-3), lambda: nn.RMSNorm((3, 8)), lambda: nn.RMSNorm(8, elementwise_affine=False),
    lambda: nn.RMSNorm(8, dtype=torch.bfloat16), lambda: LlamaRMSNorm(8),
])  # fmt: skip
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
    if entry.kind == "RMSNorm":
        made = RMSNorm(layer.normalized_shape, layer.eps, layer.elementwise_affine, variant=layer.variant, dtype=dtype)
        made.load_state_dict(layer.state_dict())
        assert torch.equal(made(x), layer(x))
        assert vars(made).keys() <= vars(layer).keys()


class WithResidual(LlamaRMSNorm):
    def forward(self, hidden_states: Any, residual: Any = None, *, factor: float = 1.0) -> Any:
        if residual is None:
            return factor * super().forward(hidden_states)
        return super().forward(hidden_states + residual), hidden_states + residual

    @property
    def largest(self) -> Any:
        return self.weight.abs().max()


@few
def test_a_buffer_no_gain_and_other_calls() -> None:
    """The same outputs and the same state, by any call."""
    x = randn(2, 3, 8)
    for make in (lambda: OwnNorm(buffer=True), lambda: OwnNorm(None), lambda: WithResidual(8)):
        layer = make()
        mine = copy.deepcopy(layer)
        (entry,) = replace(mine)
        assert isinstance(mine, Replaced), entry
        assert list(mine.state_dict()) == list(layer.state_dict())
        assert agree(derivatives(mine, x), derivatives(layer, x))
        if isinstance(layer, WithResidual):
            assert entry.why == "recognised; with residual, factor it runs its own code"
            assert mine.largest == layer.largest
            assert torch.equal(mine(x, x)[0], layer(x, x)[0])
            assert torch.equal(mine(x, factor=2.0), layer(x, factor=2.0))
            torch.testing.assert_close(mine(hidden_states=x), layer(x), rtol=1e-5, atol=1e-5)


@few
def test_variants() -> None:
    """One that is no preset, and another variant for all."""

    class CentredL2(OwnNorm):
        def forward(self, x: Any) -> Any:
            return nn.functional.normalize(x, dim=-1) * 8**0.5 * (self.g + 1)

    (entry,) = replace(CentredL2())
    assert str(entry).startswith("the model (CentredL2): now RMSNorm, variant x_transformers but scale_offset is 1.0, ")
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


# What is kept of a layer.


@few
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inside the compiler
@pytest.mark.parametrize("make", [LlamaRMSNorm, nn.RMSNorm])
def test_results_lie_as_those_of_the_original(make: Any) -> None:
    """Compiled in one graph, too. They are contiguous, whatever the order of x: a model may view them."""
    model = nn.Sequential(make(8))
    old = copy.deepcopy(model)
    replace(model)
    for layout in LAYOUTS.values():
        x = layout(randn(2, 3, 5, 8)).requires_grad_()
        for each in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
            assert make is LlamaRMSNorm or each(x).stride() == old(x).stride()
            torch.testing.assert_close(each(x), old(x))
        torch._dynamo.reset()
    gradients = [torch.autograd.grad(m(x).square().sum(), x)[0] for m in (model, old)]
    torch.testing.assert_close(*gradients)


@few
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
    assert (norm.training, norm.weight.requires_grad, norm.note) == (False, False, "kept")
    model[:3](randn(2, 8))
    norm.load_state_dict(norm.state_dict())
    assert calls == ["before", "after"] * 2 + ["loaded"]
    assert other.weight.device.type == "meta"
    assert list(model.state_dict()) == ["0.weight", "1.weight", "1.bias", "2.weight", "3.weight"]
    assert copy.deepcopy(model)[0](randn(2, 8)).shape == (2, 8)


@few
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
        again = pickle.loads(pickle.dumps(layer))
    assert torch.equal(again(x), ours(x))
    layer(x).sum().backward()
    assert layer.weight.grad is not None


@few
def test_equal_modules_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    proof, asked = importlib.import_module("rmsnorm.conversion.replacement.proof"), []
    identify = proof.identify_opened

    def record(layer: Any, **options: Any) -> Any:
        asked.append(layer)
        return identify(layer, **options)

    monkeypatch.setattr(proof, "identify_opened", record)
    fixed = [OwnNorm(buffer=True) for _ in range(3)]
    fixed[2].g.mul_(2)
    layers = [LlamaRMSNorm(8, eps) for eps in (1e-6, 1e-5) for _ in range(8)]
    others = [*(nn.RMSNorm(8) for _ in range(8)), LlamaRMSNorm(6), LlamaRMSNorm(8).half(), *fixed]
    report = replace(nn.ModuleList([*layers, *others]))
    assert (len(report), len(asked)) == (29, 7)
    assert [entry.variant.eps for entry in report[:26]] == [1e-6] * 8 + [1e-5] * 8 + [None] * 8 + [1e-6] * 2
    apart = nn.ModuleList([LlamaRMSNorm(8, np.float32(eps)) for eps in (0.25, 0.5)])  # type: ignore[arg-type]
    assert [entry.variant.eps for entry in replace(apart)] == [0.25, 0.5]


@few
def test_encoders_call_the_norms_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would compute LayerNorm with the parameters, or fail without a bias."""
    encoder: Any = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
    encoder.norm1, encoder.norm2 = nn.RMSNorm(8, eps=1e-5), nn.RMSNorm(8, eps=1e-5)
    model = nn.Sequential(encoder).eval()
    replace(model)
    assert type(encoder.norm1) is RMSNorm
    calls, forward = [], RMSNorm.forward
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: calls.append(self) or forward(self, x))
    with torch.no_grad():
        model(randn(1, 3, 8))
    assert calls == [encoder.norm1, encoder.norm2]


@few
@pytest.mark.parametrize("step", ["become", "finish"])
def test_all_or_nothing(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of what changes in place: a torch.nn.RMSNorm that becomes ours gets a bias and, in an encoder, a hook."""
    backend = importlib.import_module("rmsnorm.conversion.replacement.torch").BACKEND
    encoder = nn.TransformerEncoderLayer(8, 2, 16)
    encoder.norm1, encoder.norm2 = nn.RMSNorm(8), nn.RMSNorm(8)
    layers = [LlamaRMSNorm(8), encoder.norm1, encoder.norm2, OwnNorm()]
    own, model = getattr(backend, step), nn.Sequential(layers[0], encoder, layers[3])

    def everything() -> list[Any]:
        return [(type(each), {n: dict(v) if isinstance(v, dict) else v for n, v in vars(each).items()})
                for each in layers]  # fmt: skip

    before = everything()

    def fails(changed: Any, *norm: Any) -> None:
        own(changed, *norm)
        if changed in (layers[3], model):
            raise RuntimeError("out of luck")

    monkeypatch.setattr(backend, step, fails)
    with pytest.raises(RuntimeError, match="out of luck"):
        replace(model)
    assert everything() == before
