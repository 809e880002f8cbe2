"""One table of norms, right and wrong: what `check` says of each, and what `identify` says."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import zoo
import zoo_torch as layers
from zoo_torch import torch

from rmsnorm import Variant
from rmsnorm.identify import Identity, Target, identify
from rmsnorm.numpy_impl import fast
from rmsnorm.parity import check
from rmsnorm.parity.design import levels_of
from rmsnorm.parity.first import first_parameters
from rmsnorm.parity.report import Report
from rmsnorm.targets.bridges import NumPy

NOTHING: Mapping[str, Any] = MappingProxyType({})
F32 = {"dtypes": "float32"}


class Row(NamedTuple):
    """A norm and what is said of it. What is None is not asked."""

    norm: Any
    asked: Any = None  # what check compares it with
    differ: str | None = ""  # the quantities in which it differs from that
    says: Sequence[str] = ()  # words of the report of check, or of identify where this is asked
    recognised: bool | None = None  # and so that identify is asked at all
    finds: Mapping[str, Any] = NOTHING  # answers of identify
    defects: Sequence[str] | None = ()  # words of each of its sentences
    only: Collection[str] = ()  # levels and options that every call has in which it fails, of all pairs of levels
    mend: str = ""  # the first advice of identify
    how: Mapping[str, Any] = NOTHING  # options of check, or of identify where no check is asked
    framework: str | None = "torch"

    def hold(self) -> None:
        identity = None
        if self.asked is not None:
            options = {"framework": self.framework, "dtypes": ("float32", "bfloat16"), **self.how}
            found = check(self.norm, self.asked, **options)
            self._hold_report(found)
            identity = found.run.identity
            if self.differ and "y" not in self.differ.split():
                assert check(self.norm, self.asked, **options, gradients=False).passed
        if self.recognised is not None:
            how = {} if self.asked else self.how
            self._hold_identity(identity or identify(self.norm, framework=self.framework, **how))

    def _hold_report(self, found: Report) -> None:
        failures = found.run.failures
        if self.differ is not None:
            assert {record.quantity for record in failures} == set(self.differ.split()), found.text
        assert found.passed == (self.differ == ""), found.text
        assert found.passed == (found.run.identity is None and not found.run.message)
        for record in failures:
            assert {*self.only} <= {*levels_of(record.case), *zoo.options_of(record.case)}, found.text
        for words in self.says if self.recognised is None else ():
            assert words in found.text or words in " ".join(found.text.split()), found.text
        for sentence in self.defects or () if found.run.identity else ():
            assert sentence in found.details, found.details
        if failures and self.framework == "numpy":
            self._hold_lines(found)

    def _hold_lines(self, found: Report) -> None:
        """A wrong return type is one comparison and not one for each case, and a report has a dozen lines."""
        assert "parity ratio inf" not in found.text
        said = re.sub(r"(?m)^(edge|not compared): .*(\n    .*)*\n", "", found.text)
        assert len(said.splitlines()) <= 12
        assert len(found.run.records) <= 2 or "returns" not in found.text or self.only
        assert len(found.details.splitlines()) > len(found.run.failures)

    def _hold_identity(self, identity: Identity) -> None:
        text = " ".join(identity.text.split())
        finds = {"kind": "rmsnorm", **self.finds}
        assert {finding: identity[finding] for finding in finds} == finds, identity.text
        assert identity.recognised == self.recognised, identity.text
        if self.defects is not None:
            assert len(identity.defects) == len(self.defects), identity.text
            assert all(words in said for said, words in zip(identity.defects, self.defects, strict=True)), identity.text
        for words in self.says:
            assert words in text, identity.text
        if self.mend:
            assert identity.mends(Variant.get("keras"))[0] == self.mend


def variant(name: str, **fields: Any) -> Variant:
    return Variant.get(name).replace(**fields)


def of_numpy(norm: Any, *says: str, **more: Any) -> Row:
    """That differs from the standard in y."""
    how = {} if "only" in more else F32
    return Row(norm, says=says, **{"asked": "standard", "differ": "y", "framework": "numpy", "how": how, **more})


def known(norm: Any, name: str, **finds: Any) -> Row:
    """A layer of a package, which has this name for identify, or is also known as that."""
    return Row(norm, says=[f" {name}"], finds=finds, framework=None)


def of_transformers(name: str, gate: str, rounding: str, **finds: Any) -> Row:
    module, _, kind = name.partition(":")
    finds |= {"gate": gate, "rounding": rounding, "gradients": "agree"}
    return Row(HF.format(module, kind), finds=finds)


def none(norm: Any, words: str, differ: str = "", framework: str | None = "torch", **more: Any) -> Row:
    """What is no RMSNorm."""
    finds = {"kind": more.pop("kind", "none")}
    return Row(norm, "standard" if differ else None, differ, [words], False, finds, None, framework=framework, **more)


def seen(norm: Any, *defects: str, says: Sequence[str] = (), how: Any = NOTHING, **finds: Any) -> Row:
    """A function of NumPy for identify alone, which is right where nothing is wrong."""
    is_right = not defects and not says
    return Row(norm, None, "", says, is_right, finds, None if says else defects, how=how, framework="numpy")


def wide(function: Any, *defects: str, **finds: Any) -> Row:
    """A function of x in float64."""
    return seen(lambda x: zoo.like(function(zoo.wide(x)), x), *defects, **finds)


def of_dx(second: float, factor: float, width: int, words: str) -> Row:
    return Row(layers.with_gradient(second, factor), None, "", (), False, {}, [words], how={"width": width})


def total(x: Any) -> Any:
    return (x * x).sum(-1)[..., None]


def squares_before_the_cast(x: Any) -> Any:
    h = x.astype(np.promote_types(x.dtype, np.float32))
    return (h / np.sqrt((x * x).astype(h.dtype).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def in_two_axes(x: Any, weight: Any) -> Any:
    assert x.ndim == 2
    return zoo.standard(x, weight)


class OfWidth48(layers.Plain):
    """A layer of one width: it is right there, and both readings are offered."""

    def forward(self, x: Any) -> Any:
        h = zoo.wide(x)
        return zoo.like(48**0.5 * h * (total(h) + 1e-6).rsqrt() * self.weight, x)


HF = "transformers.models.{0}.modeling_{0}:{1}"
ALL = "y dx dscale"
TWO = "it returns a tuple of 2"
AGREE = {"gradients": "agree"}
NEAR = {"eps": pytest.approx(1e-6, rel=1e-3), "confirmed": True}
GATE = variant("standard", gate_function="sigmoid", gate_position="after", rounding="input_dtype",
               result_dtype="promote")  # fmt: skip
CAST = "for {0} x, the squares are rounded to {0}, before the cast to float32"
CASTS = [CAST.format("float16"), CAST.format("bfloat16")]
BEFORE, APEX = variant("llama", gate_position="before"), variant("apex", eps=1e-6)
ON_THE_SUM = "eps is 1e-06 / n: it is added to the sum of squares, not to their mean"
UNKNOWN = "the gate acts in no known way"
# fmt: off
OF_CHECK = {
    "a bias": of_numpy(lambda x, weight, bias: fast.rms_norm(x, weight, bias), differ=""),
    "Llama's of NumPy": of_numpy(zoo.llama, "zoo:llama is llama: all ", asked="llama", differ=""),
    "every option": of_numpy(zoo.options, differ=""),
    "1 + gain in float16": of_numpy(
        lambda x, weight: zoo.standard(x, 1 + zoo.wide(weight)), "scale_offset is 1.0, standard has 0.0", "mend: ",
        how={"dtypes": "float16"}),
    "only wide": of_numpy(
        zoo.where(lambda x: x.shape[-1] > 5000, lambda y: 2 * y),
        " is not standard: it agrees on the rows that identify tries, and not in "),
    "in parts": of_numpy(zoo.halves, "it agrees on the rows that identify tries, in groups of 32, and not in "),
    "mask ignored beside both": of_numpy(zoo.forgets("mask", "gate", "residual"), only={"gate", "mask", "residual"}),
    "no answer without a gate": of_numpy(
        lambda x, weight, gate=None: zoo.options(x, weight, gate=gate)[..., : 1 if gate is None else None]),
    "a sum of another dtype": of_numpy(
        zoo.another_sum(lambda x, h: h.astype("float64")), "the second result is another float64 of shape"),
    "no sum": of_numpy(
        zoo.another_sum(lambda x, h: None), f"{TWO} whose second entry is None, expected numpy.ndarray"),
    "tuple": of_numpy(lambda x, weight: (zoo.llama(x, weight), None), f"{TWO}, expected numpy.ndarray"),
    "another array": of_numpy(lambda x, weight: memoryview(x), "it returns a memoryview"),
    "shape": of_numpy(lambda x, weight: x[..., 1:], ", expected the shape of x"),
    "input": of_numpy(zoo.in_place, "inputs written to: x"),
    "dtype": of_numpy(lambda x, weight: zoo.standard(x, weight).astype(np.float64), "got f64["),
    **{f"a layer that exists, {layer.__name__}": Row(layer(64), name)
       for layer, name in ((layers.Zero, "standard"), (layers.Twice, "gemma"), (layers.Drawn, "standard"))},
    "Llama's computes in float32": Row(
        HF.format("llama", "LlamaRMSNorm"), "llama", None, defects=None, how={"dtypes": "float64"}),
    "another one in training": Row(layers.InTraining(24).eval(), "standard", None, ["; training"], defects=None),
    "sums in 16 bits": Row(
        layers.narrow_sums, "standard", "dscale", ["bf16 dscale: at ("], defects=None, how={"dtypes": "bfloat16"}),
    "wrong dx beside sums in 16 bits": Row(
        lambda x, weight: layers.narrow_sums(layers.hooked(x, lambda dx: 2 * dx), weight), "standard", "dx dscale",
        [" dx: at ("], defects=None),
    "no gradient for the residual": Row(
        lambda x, weight, residual: (zoo.standard(x + residual.detach(), weight), x + residual.detach()), "standard",
        "dresidual", defects=None, how=F32),
    "a gate for which there must be none": Row(layers.Mamba2, "llama", None, ["gate"], defects=None, only={"gate"}),
}
RIGHT = {name: row._replace(recognised=True) for name, row in {
    "a function": Row(zoo.standard, "standard", "", ["is RMSNorm: the variant standard"]),
    "PyTorch's function": Row(torch.nn.functional.rms_norm, "torch", how=F32),
    "a gate that may be left out": Row(layers.Mamba2, BEFORE, finds={"gate": "silu, before"}),
    "a gate that must be there": Row(layers.Qwen3Next, APEX, finds={"gate": "silu, after"}),
    "the authors' name of the bias": Row(layers.Zhang, "standard", finds={"bias": True}),
    "x-transformers": Row(
        layers.Clamp, finds=AGREE | {"eps_position": "clamp", "eps": 1e-12, "rounding": "input_dtype"}),
    "zero's gate": Row(
        layers.Gated, "zero", ALL, ["is RMSNorm: the variant standard with eps 1e-08, with a sigmoid gate"],
        finds=AGREE | {"gate": "sigmoid of gate * x, after", "eps": 1e-8, "rounding": "after_scale"}),
    "groups": Row(
        layers.Grouped, "standard", ALL,
        finds=AGREE | {"group_size": 16, "axes": "last, in groups of 16", "rounding": "after_scale"}),
    "an image": Row(
        layers.Image, "x_transformers", "y", ["over axis 1 of 4 (not the last): the variant x_transformers"]),
    "axis 1 of 3": Row(lambda x: zoo.like(zoo.rows(zoo.wide(x), axis=1), x), says=["is RMSNorm over axis 1 of 3 (not"]),
    "all of x": Row(layers.Jointly, says=["is RMSNorm over axis 0, 1 of 2"], defects=None, how={"width": 16}),
    "another eps": Row(layers.Llama, says=["is RMSNorm: the variant llama with eps 1e-05"]),
    "no gain, an eps of none": Row(lambda x: zoo.like(zoo.rows(zoo.wide(x), 3e-6), x), finds={"eps": 3e-6}),
    "one width, eps on the sum": Row(
        OfWidth48(48), says=["no other width could be tried", f"it may also be that {ON_THE_SUM}"], defects=None,
        finds={"eps": pytest.approx(1e-6 / 48, rel=1e-12), "widths": "48"}, how={"gradients": False}),
    "two axes alone": Row(in_two_axes, finds={"axes": "last"}, framework="numpy"),
    # of packages
    **{name: Row(HF.format(name, kind), name, says=[f"the variant {name}"], defects=None)
       for name, kind in (("llama", "LlamaRMSNorm"), ("gemma", "GemmaRMSNorm"), ("t5", "T5LayerNorm"))},
    "Mamba-2": of_transformers("mamba2:MambaRMSNormGated", "silu, before", "before_scale", group_size=16),
    "Kimi Linear": of_transformers("kimi_linear:KimiLinearRMSNormGated", "sigmoid, after", "after_scale"),
    "Gemma 3n": known(HF.format("gemma3n", "Gemma3nRMSNorm"), "gemma4"),
    "OLMo 2": known(HF.format("olmo2", "Olmo2RMSNorm"), "olmo2"),
    "PyTorch": known("torch.nn:RMSNorm", "variant torch", eps="machine epsilon"),
    "Keras": known("keras.layers:RMSNormalization", "variant keras"),
    "nnx": known("flax.nnx:RMSNorm", "variant flax"),
    "Linen": known("flax.linen:RMSNorm", "variant flax"),
    "this one": known("rmsnorm.numpy_impl:rms_norm", "silu gate", rounding="after_scale", residual_rounding="before"),
    **{f"{name}, {preset}": Row(  # these begin as the norm alone
        name, finds={"scale_offset": preset == "gemma"}, how={"init": {"variant": preset}, "gradients": False},
        framework=None)
       for name in ("rmsnorm.torch_impl:RMSNorm", "rmsnorm.tf_impl:RMSNormalization", "rmsnorm.flax_impl:RMSNorm",
                    "rmsnorm.flax_impl.linen:RMSNorm") for preset in ("gemma", "lasagne")},
    **{f"a gate of sigmoid, {place}": Row(
        layers.gated(torch.sigmoid, place == "before"), finds={"gate": f"sigmoid, {place}"})
       for place in ("before", "after")},
}.items()}
WRONG = {name: row._replace(recognised=False) for name, row in {
    "squared before the cast": Row(layers.MiniMind, "standard", ALL, finds=AGREE, defects=CASTS),
    "squares of 3,072 elements before the cast": seen(  # of wide rows fewer are asked
        squares_before_the_cast, *CASTS, how={"gradients": False, "width": 3072}),
    "eps not rescaled": Row(
        layers.CoreML, "standard", ALL, defects=["eps is not rescaled with x / max|x|: it acts as 1e-05 max|x|^2"]),
    "1 + gain rounded": Row(
        layers.OffsetRounded, "gemma", "y dx", ["is close to RMSNorm: the variant gemma; 2 defects"],
        defects=["1 + gain is rounded to the dtype of the gain",
                 "y of a new layer is 2 times the normalised row, as its gain g starts at 1 and 1 + g multiplies"]),
    "a learned factor": Row(
        layers.Learned, "standard", ALL, ["is close to RMSNorm: the variant standard; 2 defects"],
        finds={"confirmed": True},
        defects=["it has a parameter of one number beside the gain, factor, which no RMSNorm has",
                 "y is 0.5 times what it must be"]),
    "no gradient for the gate": Row(
        lambda x, gate: zoo.rows(x) * torch.sigmoid(gate.detach()), GATE, "dgate",
        defects=["there is no gradient for the gate"]),
    "another rounding with a residual": Row(
        layers.rounds_otherwise_with_a_residual, finds={"rounding": "before_scale"},
        defects=["for bfloat16 x, with a residual, y is rounded once, after the gain"]),
    "a gain that starts at 0": Row(
        layers.Zero, "standard", None, defects=["y of a new layer is 0, as its gain g starts at 0 and g multiplies"]),
    "1 + gain that starts at 1": Row(
        layers.Twice, defects=["y of a new layer is 2 times the normalised row, as its gain g starts at 1 and 1 + g"]),
    "a gain that is drawn": Row(layers.Drawn, defects=["the gain of a new layer does not start at one number"]),
    "a bias that does not start at 0": Row(layers.Shifted, defects=["the bias of a new layer does not start at 0"]),
    "clipped": Row(layers.Clipped, defects=["x is cut off at 50"]),
    "LayerNorm": Row(
        torch.nn.LayerNorm, "standard", f"{ALL} dbias", ["is LayerNorm, not RMSNorm"], finds={"kind": "layernorm"},
        defects=[f"the gradient for the {name} is accumulated in 16 bits" for name in ("gain", "bias")]),
    # what depends on the width
    "eps on the sum": wide(lambda x: x / (total(x) + 1e-6) ** 0.5 * x.shape[-1] ** 0.5, ON_THE_SUM, **NEAR),
    "eps on the norm": wide(
        lambda x: x / (total(x) ** 0.5 + 1e-6) * x.shape[-1] ** 0.5,
        "eps is 1e-06 / sqrt(n): it is added to the norm, not to the root of the mean square", **NEAR),
    "over 64": wide(
        lambda x: x / (total(x) / 64 + 1e-6) ** 0.5, "the sum of squares is divided by 64 at every width, not by n",
        **NEAR),
    "floor of q": wide(
        lambda x: x / np.sqrt(np.maximum(zoo.mean_square(x), 1e-6)),
        "rho has the floor 0.001 (q has 1e-06) at every width, not eps / sqrt(n)",
        eps=pytest.approx(1e-3, rel=1e-3), confirmed=True),
    "root n twice": wide(lambda x: zoo.rows(x) * x.shape[-1] ** 0.5, "y is 8 (sqrt(n)) times too large", **NEAR),
    "no known rule": wide(
        lambda x: x / (total(x) / x.shape[-1] ** 0.9 + 1e-6) ** 0.5,
        "the denominator depends on the width in no known way: with 64 and 128 elements in a row it is another one",
        **NEAR),
    # ends of blocks, and axes
    "blocks of 8": seen(zoo.of_blocks_of_8, "the last 1 of 33 elements, after the last full block of 4, are 0 in y"),
    "1,024 columns": seen(
        lambda x, weight: np.concatenate([zoo.standard(x, weight)[..., :1024], x[..., 1024:]], axis=-1),
        says=["y of 507 elements of a row is another one, from element 1024 on"]),
    "1,024 rows": seen(
        zoo.where(lambda x: x.ndim > 1, lambda y: (np.arange(y[..., 0].size) < 1024).reshape(*y.shape[:-1], 1) * y),
        says=["rows is another one, from row 1024 on"]),
    # gradients
    "1 / rho a constant": of_dx(0.0, 1.0, 16384, "the gradient for x takes 1 / rho for a constant"),
    "dx wrong by 0.5 %": of_dx(1.0, 1.005, 64, "the gradient for x is wrong by 0.5 % of its largest element"),
    "dx wrong by 1 % of its second term": of_dx(0.99, 1.0, 4096, "the gradient for x is wrong by "),
    # what is none
    "a gate of quick gelu": none(layers.gated(lambda z: z * torch.sigmoid(1.702 * z)), UNKNOWN),
    "a gate of silu but at 0": none(layers.gated(lambda z: torch.where(z == 0, 1.0, layers.silu(z)), True), UNKNOWN),
    "tanh": none(torch.tanh, "no element of x changes another one's y: nothing is normalised"),
    "softmax": none(
        lambda x: torch.softmax(x, -1), "y is not the row divided by one number: its elements have different factors"),
    "largest": none(layers.Largest, "the denominator is the largest |x| of a row, not its root mean square"),
    "a part of x": none(
        layers.Mixed, "y has a part that the gain does not multiply, and that is no multiple of the normalised row"),
    "root, not divided": none(
        lambda x, weight: x * (zoo.mean_square(x) + 1e-6) ** 0.5 * weight,
        "x is multiplied by the root of its mean square, not divided by it, as by x / rsqrt(q + eps)",
        mend="divide x by sqrt(q + eps), or multiply it by rsqrt(q + eps)"),
    "mean square, divided": none(
        lambda x, weight: x / (zoo.mean_square(x) + 1e-6) * weight, "x is divided by its mean square, not by the root"),
    "the root of the variance": none(
        "keras.layers:LayerNormalization", "divided by the root of its variance, not of its mean square",
        framework=None, how={"init": {"rms_scaling": True}},
        mend="take the mean of x * x, from which no mean of x was subtracted"),
    # broken
    "an error": none(
        zoo.out_of_luck, "raised on x f32[4, 64], scale f32[64]: RuntimeError: out of luck", "y", kind=None),
    "a GPU": none(
        lambda x: zoo.rows(x) + torch.zeros(1, device="cuda"), "needs a GPU, expected one that runs", "y", kind=None),
    "a column": none(
        lambda x: x.mean(-1, keepdim=True), " returned f32[4, 1] for x f32[4, 64], expected the shape of x", "y dx",
        kind=None),
    "nothing": none(lambda x: None, " returned None for x f32[4, 64], expected torch.Tensor", kind=None),
    "slow": none(layers.slow, "slow took more than its limit of 1 s", kind=None, how={"time_limit": 1.0}),
}.items()}
# fmt: on
ROWS = OF_CHECK | RIGHT | WRONG
assert len(ROWS) == len(OF_CHECK) + len(RIGHT) + len(WRONG), "a name is given twice"
NEEDS = {
    "Keras": pytest.mark.needs("keras>=3.9", "the layer is of 3.9"),
    "the root of the variance": pytest.mark.filterwarnings("ignore:You passed `rms_scaling=True`"),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDS.get(name, ())) for name in ROWS])
def test_what_check_and_identify_say(name: str, request: pytest.FixtureRequest) -> None:
    row = ROWS[name]
    if isinstance(row.norm, str):
        package = "keras" if "tf_impl" in row.norm else "flax" if "flax_impl" in row.norm else row.norm.split(".")[0]
        pytest.importorskip(package, reason=f"{package} is not installed")
    request.getfixturevalue("small_circumstances" if row.only and row.framework == "numpy" else "few_circumstances")
    row.hold()


def test_what_is_not_finite_is_no_factor() -> None:
    target = Target("unwritten", "numpy", NumPy(), lambda arrays: arrays["x"] * arrays.get("scale", np.nan), ("scale",))
    (failure,) = first_parameters(target, Variant.get("standard"))
    assert failure.detail.startswith("the gain of a new layer does not start at one number"), failure
