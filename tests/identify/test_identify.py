"""Common layers are recognised without a hint: their names, axes and other arguments, and their defects."""

from __future__ import annotations

import importlib
import importlib.util
import json

import numpy_zoo
import pytest
import torch_zoo
from torch_zoo import torch

from rmsnorm import Variant
from rmsnorm.identify import Identity, identify

HF = "transformers.models.{0}.modeling_{0}:{1}"


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


@pytest.mark.parametrize("width", [16, 24])
def test_a_gain_runs_along_the_last_axis_of_its_size(width):
    identity = identify(torch_zoo.Jointly, width=width)
    assert "is RMSNorm over axis 0, 1 of 2" in identity.headline


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


def test_the_first_of_several_names_is_said_and_then_the_others():
    identity = identify(numpy_zoo.only_float32, framework="numpy")
    others = "(or onnx, apex, transformer_engine, theano, the same in what was asked)"
    assert identity.headline.endswith(f"is RMSNorm: the variant mlx {others}")
    assert not any(row.name == "also known as" for row in identity.rows)


def test_presets_with_the_same_numbers_are_one_with_several_names():
    identity = identify(numpy_zoo.standard, framework="numpy")
    assert identity.headline.endswith("is RMSNorm: the variant standard")
    assert [row.word for row in identity.rows if row.name == "also known as"] == ["gemma4, olmo2, keras"]
    assert "also known as" in identity.text


def test_shape_axis_and_other_arguments_are_as_asked():
    with pytest.raises(ValueError, match="requires 'condition', whose value cannot be guessed"):
        identify(torch_zoo.channels)
    identity = identify(
        torch_zoo.channels, framework="torch", shape=(4, 64, 3, 2), axis=1, args={"condition": ((4,), 0.0)}
    )
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
    identity = identify(torch_zoo.AllInT)
    again = Identity.from_json(json.loads(json.dumps(identity.json)))
    assert again.variant == identity.variant
    assert again.text == identity.text
    assert again.nearest == identity.nearest


@pytest.mark.parametrize(
    ("framework", "power", "words"),
    [
        ("torch", 1, "x is multiplied by the root of its mean square, not divided by it, as by x / rsqrt(q + eps)"),
        ("numpy", 1, "x is multiplied by the root of its mean square, not divided by it, as by x / rsqrt(q + eps)"),
        ("numpy", -2, "x is divided by its mean square, not by the root of it"),
        ("numpy", 2, "x is multiplied by its mean square, not divided by the root of it"),
        ("torch", -0.5, "x is divided by the fourth root of its mean square, not by the square root"),
    ],
)
def test_another_power_of_the_root_is_named(framework, power, words):
    def norm(x, weight):
        mean = (x * x).mean(-1)[..., None]
        return x * (mean + 1e-6) ** (power / 2) * weight

    identity = identify(norm, framework=framework)
    assert identity.headline.endswith(f"is not recognised: {words}")
    mends = identity.mends(Variant.get("llama"))
    assert mends[0] == "divide x by sqrt(q + eps), or multiply it by rsqrt(q + eps)"


def test_a_power_of_the_standard_deviation_is_named():
    def norm(x, weight):
        return x * (x.var(-1, unbiased=False)[..., None] + 1e-6).sqrt() * weight

    assert "multiplied by the root of its variance, not divided by it" in identify(norm, framework="torch").headline
