"""Common layers are recognised without a hint: their names, axes and other arguments, and their defects."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math

import numpy as np
import pytest
from plain_layers import Plain

from rmsnorm import Variant
from rmsnorm.identify import Identity, identify

torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
HF = "transformers.models.{0}.modeling_{0}:{1}"


class AllInT(Plain):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Zhang(torch.nn.Module):
    """The authors' rmsnorm_torch.py."""

    def __init__(self, d: int, p: float = 0.25, eps: float = 1e-8, bias: bool = True) -> None:
        super().__init__()
        self.d, self.p, self.eps = d, p, eps
        self.scale = torch.nn.Parameter(torch.ones(d))
        self.offset = torch.nn.Parameter(torch.zeros(d))

    def forward(self, x):
        k = int(self.d * self.p)
        rms = x[..., :k].norm(2, dim=-1, keepdim=True) * k ** (-0.5)
        return self.scale * (x / (rms + self.eps)) + self.offset


class Ceil(Plain):
    def norm(self, x):
        k = math.ceil(x.shape[-1] * 0.0625)
        return x * torch.rsqrt(x[..., :k].pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight.float()


class Clamp(Plain):
    """x-transformers."""

    def forward(self, x):
        return torch.nn.functional.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * self.weight


class Gated(Plain):
    """bzhangGo/zero, gated_rms_norm."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.gate = torch.nn.Parameter(torch.ones(dim))

    def norm(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-8)
        return y * self.weight.float() * torch.sigmoid(self.gate.float() * x)


class MiniMind(Plain):
    """minimind #301: the square before the cast."""

    def forward(self, x):
        square = x.pow(2).float().mean(-1, keepdim=True)
        return (self.weight * (x.float() * torch.rsqrt(square + 1e-5))).type_as(x)


class CoreML(Plain):
    """coremltools #2821: x / max|x| without rescaling eps."""

    def norm(self, x):
        x = x / x.abs().amax(-1, keepdim=True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight.float()


class Grouped(Plain):
    def norm(self, x):
        groups = x.unflatten(-1, (-1, 16))
        return (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + 1e-6)).flatten(-2) * self.weight.float()


class OffsetRounded(Plain):
    """1 + gain in the dtype of the gain, where Gemma casts first."""

    def norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight).float()


class NoGainGradient(Plain):
    """unsloth: the gain gets no gradient."""

    def norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight.float().detach()


class Constant(Plain):
    """1 / rho is taken for a constant."""

    def norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6).detach() * self.weight.float()


# target, preset, and findings that the report must have
KNOWN = [
    ("torch.nn:RMSNorm", "torch", {"eps": "machine epsilon", "overflow": "right in f16; 0 in bf16, f32, f64"}),
    ("keras.layers:RMSNormalization", "keras", {"eps": 1e-6}),
    ("flax.nnx:RMSNorm", "flax", {"eps": 1e-6, "empty_row": "NaN", "nan_under_mask": "reaches the gradient"}),
    ("flax.linen:RMSNorm", "flax", {"eps": 1e-6}),
    ("equinox.nn:RMSNorm", "equinox", {"eps": 1e-5, "bias": True}),
    (HF.format("llama", "LlamaRMSNorm"), "llama", {"float64": "down-cast to float32"}),
    (HF.format("gemma", "GemmaRMSNorm"), "gemma", {"scale_offset": 1.0}),
    (HF.format("t5", "T5LayerNorm"), "t5", {"float64": "statistic in float32"}),
    (HF.format("gemma3n", "Gemma3nRMSNorm"), "gemma4", {}),
    (HF.format("gemma4", "Gemma4RMSNorm"), "gemma4", {}),
    (HF.format("olmo2", "Olmo2RMSNorm"), "olmo2", {}),
    ("rmsnorm.torch_impl:RMSNorm", "torch", {"overflow": "right", "empty_row": "0", "nan_under_mask": "kept out"}),
    ("rmsnorm.tf_impl:RMSNormalization", "keras", {"overflow": "right"}),
    ("rmsnorm.numpy_impl:rms_norm", "standard", {"returned_sum": "rounded", "residual_rounding": "before"}),
]


NEEDS = {"keras.layers:RMSNormalization": pytest.mark.needs("keras>=3.9", "the layer is of 3.9")}


@pytest.mark.parametrize(
    ("name", "preset", "findings"),
    [pytest.param(*known, id=known[0], marks=NEEDS.get(known[0], ())) for known in KNOWN],
)
@pytest.mark.sample(2)
def test_it_is_recognised_with_no_hint(name, preset, findings):
    package = {"rmsnorm.tf_impl:RMSNormalization": "keras"}.get(name, name.split(".")[0])
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    identity = identify(name)
    assert identity.recognised, identity.text
    assert identity.plain
    assert {finding: identity[finding] for finding in findings} == findings
    variant = Variant.get(preset).replace(bias=identity.variant.bias)
    assert not identity.differences(variant), identity.text
    near = dict(identity.nearest)
    assert near[preset] <= min(near.values()), identity.nearest


@pytest.mark.parametrize(
    ("module", "fields"),
    [
        (AllInT, {"rounding": "input_dtype", "eps": 1e-5}),
        (Zhang, {"eps_position": "outside", "eps": 1e-8, "partial": 0.25, "partial_rounding": "floor", "bias": True}),
        (Ceil, {"partial": 0.0625, "partial_rounding": "ceil", "eps": 1e-6}),
        (Clamp, {"eps_position": "clamp", "eps": 1e-12, "rounding": "input_dtype"}),
        (Gated, {"gate": "sigmoid of gate * x, after", "eps": 1e-8, "rounding": "after_scale"}),
        (Grouped, {"group_size": 16, "axes": "last, in groups of 16", "rounding": "after_scale"}),
        (
            HF.format("mamba2", "MambaRMSNormGated"),
            {"gate": "silu, before", "group_size": 16, "rounding": "before_scale"},
        ),
        (HF.format("qwen3_next", "Qwen3NextRMSNormGated"), {"gate": "silu, after", "rounding": "before_scale"}),
        (HF.format("kimi_linear", "KimiLinearRMSNormGated"), {"gate": "sigmoid, after", "rounding": "after_scale"}),
    ],
    ids=str,
)
def test_what_no_preset_has_is_solved(module, fields):
    if isinstance(module, str) and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    identity = identify(module)
    assert identity.recognised, identity.text
    assert {name: identity[name] for name in fields} == fields
    assert identity["gradients"] == "agree"


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (MiniMind, "for bfloat16 x, the squares are rounded to bfloat16, before the cast to float32"),
        (CoreML, "eps is not rescaled with x / max|x|: it acts as 1e-05 max|x|^2"),
        (OffsetRounded, "1 + gain is rounded to the dtype of the gain"),
        (NoGainGradient, "there is no gradient for the gain"),
        (Constant, "the gradient for x takes 1 / rho for a constant"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_defect_is_named(module, words):
    identity = identify(module)
    assert words in identity.defects, identity.text
    assert identity.kind == "rmsnorm"
    assert not identity.recognised
    assert identify(Plain).recognised, "the same without the defect"


def test_what_dtypes_have_in_common_is_said_once():
    def norm(x, weight):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype)

    identity = identify(norm, gradients=False)
    assert identity["overflow"].startswith("right in f16; 0 in bf16, f32")
    assert identity["underflow"] == "right"


class Jointly(Plain):
    """All of x, with a gain along the last of two axes that may have one size."""

    def norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean() + 1e-6) * self.weight.float()


@pytest.mark.parametrize("width", [16, 24])
def test_a_gain_runs_along_the_last_axis_of_its_size(width):
    identity = identify(Jointly, width=width)
    assert "is RMSNorm over axis 0, 1 of 2" in identity.headline


class Learned(Plain):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.factor = torch.nn.Parameter(torch.tensor(0.5))

    def norm(self, x):
        return super().norm(x) * self.factor.float()


class NoGain(torch.nn.Module):
    """Llama 4's norm of queries and keys: float64 is rounded to float32 first."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x):
        h = x.float()
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


@pytest.mark.parametrize("eps", [1e-5, 3e-6])
def test_without_a_gain_it_is_recognised_whatever_preset_has_its_eps(eps):
    """Those with 1e-5 differ in what they round, which nothing shows here."""
    identity = identify(NoGain(eps))
    assert identity.recognised, identity.text
    assert (identity.variant.eps, identity["float64"]) == (eps, "down-cast to float32")


def test_a_number_that_it_learns_is_a_defect():
    identity = identify(Learned)
    assert identity.defects == (
        "it has a parameter of one number beside the gain, factor, which no RMSNorm has",
        "y is 0.5 times what it must be",
    )
    assert identity["confirmed"]
    assert not identity.recognised


def test_mlx():
    """Its layers, and functions of its arrays, which it differentiates."""
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed; pip install 'mlx[cpu]'")
    nn = importlib.import_module("mlx.nn")

    def llama(x, weight):
        wide = x.astype(mx.float32)
        return weight * (wide * mx.rsqrt(mx.mean(mx.square(wide), -1, keepdims=True) + 1e-6)).astype(x.dtype)

    for target, preset in ((nn.RMSNorm, "mlx"), (nn.RMSNorm(24), "mlx"), (llama, "llama")):
        identity = identify(target)
        assert identity.framework == "mlx"
        assert identity.recognised, identity.text
        assert not identity.differences(preset)
        assert identity["gradients"] == "agree"
    assert identify(nn.LayerNorm).kind == "layernorm"


def numpy32(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-5)) * weight


class Apart(Plain):
    eps, wide = 1e-5, True

    def forward(self, x):
        h = x.float() if self.wide else x
        y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * y.type_as(x)) if self.wide else y * self.weight


class Keras5(Apart):
    eps, wide = 1e-6, False


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (Apart, "the variant llama with eps 1e-05"),
        (Keras5, "the variant llama but rounding is 'input_dtype'"),
        (torch.nn.RMSNorm, "the variant torch"),
    ],
)
def test_the_nearest_name_is_of_a_family(module, name):
    assert identify(module, gradients=False).headline.endswith(f"is RMSNorm: {name}")


def only_float32(x, weight):
    if x.dtype != np.float32:
        raise TypeError("float32, please")
    return numpy32(x, weight)


def test_the_first_of_several_names_is_said_and_then_the_others():
    identity = identify(only_float32, framework="numpy")
    others = "(or onnx, apex, transformer_engine, theano, the same in what was asked)"
    assert identity.headline.endswith(f"is RMSNorm: the variant mlx {others}")
    assert not any(row.name == "also known as" for row in identity.rows)


def test_presets_with_the_same_numbers_are_one_with_several_names():
    def norm(x, weight):
        y = x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
        return (y * weight.astype(np.float64)).astype(x.dtype)

    identity = identify(norm, framework="numpy")
    assert identity.headline.endswith("is RMSNorm: the variant standard")
    assert [row.word for row in identity.rows if row.name == "also known as"] == ["gemma4, olmo2, keras"]
    assert "also known as" in identity.text


class Image(torch.nn.Module):
    """As in denoising-diffusion-pytorch: the gain says the number of axes, the factor says which one is normalised."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.g = torch.nn.Parameter(torch.ones(1, dim, 1, 1))

    def forward(self, x):
        return torch.nn.functional.normalize(x, dim=1) * self.g * self.g.shape[1] ** 0.5


def test_a_gain_with_an_axis_for_examples_says_the_number_of_axes():
    identity = identify(Image, gradients=False)
    assert identity.headline.endswith("is RMSNorm over axis 1 of 4 (not the last): the variant x_transformers")
    assert not identity.defects


def channels(x: torch.Tensor, weight, condition):
    h = x.float()
    y = h * torch.rsqrt(h.square().mean(1, keepdim=True) + 1e-6) * (1 + condition[:, None, None, None])
    return (y * weight.float()[:, None, None]).type_as(x)


def test_shape_axis_and_other_arguments_are_as_asked():
    with pytest.raises(ValueError, match="requires 'condition', whose value cannot be guessed"):
        identify(channels)
    identity = identify(channels, framework="torch", shape=(4, 64, 3, 2), axis=1, args={"condition": ((4,), 0.0)})
    assert "is RMSNorm over axis 1 of 4 (not the last): the variant standard" in identity.headline
    assert identity.recognised
    assert [identity.is_over(axis) for axis in (None, 1, -3, (1,), 2, (1, 2))] == [
        False,
        True,
        True,
        True,
        False,
        False,
    ]
    assert identity["assumed"] == "condition=0 of shape (4,) was passed"


def test_an_instance_of_its_own_width_and_axes():
    identity = identify(torch.nn.RMSNorm((4, 6), eps=1e-3))
    assert identity.recognised, identity.text
    assert (identity["axes"], identity["eps"]) == ("last 2", 1e-3)
    assert identify(torch.nn.RMSNorm, init={"normalized_shape": 24, "eps": 0.5})["eps"] == 0.5


def test_without_gradients_none_are_asked_for():
    asked = []

    def norm(x, weight):
        asked.append(x.requires_grad)
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight)

    assert identify(norm, gradients=False).recognised
    assert not any(asked)
    assert identify(norm)["gradients"] == "agree"
    assert any(asked)


def test_an_identity_survives_json():
    identity = identify(AllInT)
    again = Identity.from_json(json.loads(json.dumps(identity.json)))
    assert again.variant == identity.variant
    assert again.text == identity.text
    assert again.nearest == identity.nearest
