"""Common layers are recognised without a hint, and a target that misbehaves gets a sentence."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from rmsnorm import Variant
from rmsnorm.identify import Identity, NoTarget, identify, open_target

torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'rmsnorm[torch]'")
HF = "transformers.models.{0}.modeling_{0}:{1}"


class Plain(torch.nn.Module):
    """RMSNorm with a gain; the tests replace ``norm``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.norm(x.float()).type_as(x)

    def norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight.float()


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
    ("rmsnorm.numpy_impl:rms_norm", "standard", {"overflow": "right", "residual": "added"}),
]


@pytest.mark.parametrize(("name", "preset", "findings"), KNOWN, ids=[name for name, *_ in KNOWN])
def test_it_is_recognised_with_no_hint(name, preset, findings):
    package = name.split(".")[0]
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


def rms_scaling():
    keras = pytest.importorskip("keras")
    return keras.layers.LayerNormalization(rms_scaling=True)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: torch.nn.LayerNorm, "layernorm", "is LayerNorm, not RMSNorm"),
        (rms_scaling, "rms_scaling", "is not RMSNorm: x is divided by the root of its variance"),
        (lambda: torch.tanh, "none", "no element of x changes another one's y: nothing is normalised"),
        (lambda: lambda x: torch.softmax(x, -1), "none", "is not recognised"),
    ],
    ids=["LayerNorm", "rms_scaling", "tanh", "softmax"],
)
@pytest.mark.filterwarnings("ignore:You passed `rms_scaling=True`")
def test_what_is_no_rmsnorm_is_not_recognised(make, kind, words):
    identity = identify(make(), framework="torch" if kind == "none" else None)
    assert identity.kind == kind, identity.text
    assert words in identity.headline
    assert not identity.recognised


def raises(x):
    raise RuntimeError("no kernel image\nwith a long story")


def needs_a_gpu(x: torch.Tensor):
    return torch.nn.functional.rms_norm(x, x.shape[-1:]) + torch.zeros(1, device="cuda")


def narrow(x):
    return torch.mean(x, -1, keepdim=True)


def writes(x, weight):
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-6)
    x.zero_()
    return y


def slow(x):
    time.sleep(0.2)
    return torch.nn.functional.rms_norm(x, x.shape[-1:])


def hangs(x):
    print("what a target prints is not part of the report")
    time.sleep(1000)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (raises, "raises raised on x f32[4, 64]: RuntimeError: no kernel image"),
        (needs_a_gpu, "needs_a_gpu needs a GPU, expected one that runs here"),
        (narrow, "narrow returned f32[4, 1] for x f32[4, 64], expected the shape of x"),
        (writes, "it writes to its arguments: x"),
        (slow, "slow took more than its limit of 1 s"),
    ],
    ids=["raises", "GPU", "shape", "writes", "slow"],
)
def test_a_target_that_misbehaves_gets_a_sentence(function, sentence):
    identity = identify(function, framework="torch", time_limit=1.0)
    assert any(sentence in defect for defect in identity.defects), identity.text
    assert not identity.recognised


@pytest.mark.parametrize(
    ("target", "init", "words"),
    [
        ("torch.nn:RMSNor", None, "torch.nn has no 'RMSNor'"),
        ("torhc.nn:RMSNorm", None, "torhc.nn cannot be imported"),
        ("RMSNorm", None, "expected module:attribute such as torch.nn:RMSNorm"),
        ("no/such.onnx", None, "there is no file no/such.onnx"),
        (torch.nn.Bilinear, None, "requires 'in1_features', whose value cannot be guessed; pass it in init"),
        (torch.nn.RMSNorm, {"dmi": 4}, "takes no argument 'dmi'"),
        (3, None, "is of type int, expected a function, a layer or a class of layers"),
    ],
    ids=str,
)
def test_no_target_is_bad_usage(target, init, words):
    with pytest.raises(NoTarget, match=words.replace("(", r"\(")):
        identify(target, init=init)


@pytest.mark.parametrize(
    ("name", "reported"), [("pytorch", "torch"), ("torch", "torch"), ("np", "numpy"), ("onnx", "onnx")]
)
def test_a_framework_has_several_names(name, reported):
    target = open_target(lambda x: x / 2, framework=name)
    assert target.framework == reported
    assert target.forward(np.ones((2, 4), "float32"))[0, 0] == 0.5
    with pytest.raises(NoTarget, match="framework is 'caffe', expected 'numpy', 'torch', 'tf' or 'flax'"):
        open_target(lambda x: x, framework="caffe")


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


def test_a_target_takes_numpy_and_gives_numpy():
    target = open_target(torch.nn.RMSNorm, width=8)
    x = np.random.default_rng(0).normal(size=(3, 8)).astype("bfloat16")
    y = target.forward(x, np.ones(8, "bfloat16"))
    dx, dscale, dbias = target.gradients(x, np.ones(8, "bfloat16"), None, x)
    assert [array.dtype.name for array in (y, dx, dscale)] == ["bfloat16"] * 3
    assert (dx.shape, dscale.shape, dbias) == ((3, 8), (8,), None)


def test_an_onnx_model(tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    gain = onnx.numpy_helper.from_array(np.linspace(0.5, 2, 32, dtype="float32"), "onnx::Mul_7")
    node = helper.make_node("RMSNormalization", ["x", "onnx::Mul_7"], ["y"], epsilon=3e-4)
    shapes = [helper.make_tensor_value_info(name, floats, ["n", 32]) for name in "xy"]
    graph = helper.make_graph([node], "norm", shapes[:1], shapes[1:], [gain])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.save(model, tmp_path / "norm.onnx")
    identity = identify(str(tmp_path / "norm.onnx"))
    assert identity.recognised, identity.text
    assert (identity["eps"], identity["eps_position"], identity["scale_offset"]) == (3e-4, "inside", 0.0)
    assert identity["rounding"] is None, "it takes float32 only"


def run(*arguments):
    code = "import typer; from rmsnorm.cli.identify import identify; typer.run(identify)"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120,
        env={**os.environ, "COLUMNS": "200", "PYTHONPATH": os.path.dirname(__file__)},
    )  # fmt: skip


def test_the_command_reports_and_exits():
    shown = run("torch.nn:RMSNorm")
    assert shown.returncode == 0, shown.stderr
    assert "torch.nn:RMSNorm is RMSNorm: the variant torch" in shown.stdout
    shown = run("torch.nn:LayerNorm", "--json")
    assert shown.returncode == 1
    assert json.loads(shown.stdout)["kind"] == "layernorm"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["torch.nn:RMSNor"], "torch.nn has no 'RMSNor'"),
        (["torch.nn:RMSNorm", "--init", "{"], "init is '{', expected a JSON object"),
        ([], "expected a TARGET such as torch.nn:RMSNorm, or --sweep PACKAGE"),
        (["--sweep", "no_such_package"], "package 'no_such_package' is not installed"),
        (["x:y", "--framework", "caffe"], "framework is 'caffe', expected 'numpy'"),
    ],
    ids=str,
)
def test_bad_usage_exits_with_2(arguments, words):
    shown = run(*arguments)
    assert shown.returncode == 2
    assert words in " ".join(shown.stderr.split())


def test_a_target_that_hangs_is_ended():
    shown = run(f"{__file__}:hangs", "--time-limit", "2", "--framework", "torch")
    assert shown.returncode == 1, shown.stderr
    assert "took more than its limit of 2 s, and was ended" in " ".join(shown.stdout.split())


def test_a_sweep_counts_by_what_is_computed(tmp_path):
    package = tmp_path / "zoo"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "norms.py").write_text(
        "import torch\n"
        "class ARMSNorm(torch.nn.RMSNorm):\n    def forward(self, x): return super().forward(x)\n"
        "class BRMSNorm(ARMSNorm):\n    def forward(self, x): return super().forward(x)\n"
        "class OtherLayerNorm(torch.nn.Module):\n    def forward(self, x): return x * x.pow(2).mean(-1, True).rsqrt()\n"
        "class TrueLayerNorm(torch.nn.LayerNorm):\n    def forward(self, x): return super().forward(x) * 1**-0.5\n"
        "class OddRMSNorm(torch.nn.Module):\n    def __init__(self, secret): super().__init__()\n"
        "    def forward(self, x): return x\n"
    )
    code = (
        f"import sys, os, json; sys.path.insert(0, {str(tmp_path)!r}); os.environ['PYTHONPATH'] = {str(tmp_path)!r}\n"
        "from rmsnorm.identify.sweep import sweep\nprint(json.dumps(sweep('zoo', time_limit=30).json))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    result = json.loads(shown.stdout)
    assert [(part["count"], part["computes"]) for part in result["clusters"]] == [
        (2, "the variant torch"), (1, "the variant paper but rounding is 'input_dtype', without a gain"),
    ]  # fmt: skip
    assert [entry["class"] for entry in result["refused"]] == ["zoo.norms:OddRMSNorm"]
    assert "requires 'secret'" in result["refused"][0]["why"]
    assert result["others"] == 1


def test_no_framework_is_loaded():
    code = "import sys, rmsnorm.identify; print(*{'torch', 'tensorflow', 'jax', 'keras', 'flax'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not shown.stdout.strip()
