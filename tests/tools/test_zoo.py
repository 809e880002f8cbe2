"""One table of norms, right and wrong: what `check` says of each, and what `identify` says."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import numpy as np
import pytest
import zoo
import zoo_torch as layers
from zoo import Row
from zoo_torch import torch

from rmsnorm import Variant
from rmsnorm.numpy_impl import fast

ALL = "y dx dscale"
TWO = "it returns a tuple of 2"


def variant(name: str, **fields: Any) -> Variant:
    return Variant.get(name).replace(**fields)


def of_transformers(name: str, gate: str, rounding: str, **finds: Any) -> Row:
    module, _, kind = name.partition(":")
    finds |= {"gate": gate, "rounding": rounding, "gradients": "agree"}
    return Row(f"transformers.models.{module}.modeling_{module}:{kind}", None, finds=finds)


def wrong(norm: Any, *says: str, asked: str = "standard", **more: Any) -> Row:
    """Of NumPy."""
    return Row(norm, asked, "y", says=says, defects=None, **more)


def named(norm: Any, *says: str) -> Row:
    """Whose first lines say the defect, for float16 alone, of NumPy."""
    return wrong(norm, *says, is_named=True, check={"dtypes": "float16"})


AGREE = {"gradients": "agree"}
IN_T = {"rounding": "input_dtype", "result_dtype": "promote"}
GATE = variant("standard", gate_function="sigmoid", gate_position="after", **IN_T)
CAST = "for {0} x, the squares are rounded to {0}, before the cast to float32"
BEFORE = variant("llama", gate_position="before")
APEX = variant("apex", eps=1e-6)
ZHANG = {"eps_position": "outside", "eps": 1e-8, "partial": 0.25, "partial_rounding": "floor", "bias": True}
F32 = {"dtypes": "float32"}
# fmt: off
OF_NUMPY = {
    "a bias": Row(lambda x, weight, bias: fast.rms_norm(x, weight, bias), "standard"),
    "llama": Row(zoo.llama, "llama", says=("zoo:llama is llama: all ",)),
    "every option": Row(zoo.options, "standard", has={"gate", "mask", "residual"}),
    # what is named
    "n - 1 and 1 + gain": named(
        lambda x, weight: zoo.over_n_minus_1(x, weight, 1.0),
        "the sum of squares is divided by n - 1 = 63", "scale_offset is 1.0, standard has 0.0"),
    "only wide": wrong(
        zoo.where(lambda x: x.shape[-1] > 5000, lambda y: 2 * y),
        " is not standard: it agrees on the rows that identify tries, and not in ", check=F32),
    "six axes": wrong(
        zoo.where(lambda x: x.ndim == 6, lambda y: 2 * y), "6 axes", check=F32),
    "in parts": wrong(zoo.halves, "it agrees on the rows that identify tries, in groups of 32, and not in ", check=F32),
    # options, in both dtypes
    "the memory of a mask": wrong(
        lambda x, weight, mask=None: zoo.options(x, weight, mask if mask is None else zoo.dense(mask)), only={"mask"}),
    "residual ignored": wrong(lambda x, weight, residual=None: zoo.standard(x, weight), only={"residual"}),
    "gate ignored beside a mask": wrong(zoo.forgets("gate", "mask"), only={"gate", "mask"}),
    "mask ignored beside both": wrong(zoo.forgets("mask", "gate", "residual"), only={"gate", "mask", "residual"}),
    "no answer without a gate": wrong(
        lambda x, weight, gate=None: zoo.options(x, weight, gate=gate)[..., : 1 if gate is None else None]),
    "a sum of another dtype": wrong(
        zoo.another_sum(lambda x, h: h.astype("float64")), "the second result is another float64 of shape", check=F32),
    "no sum": wrong(
        zoo.another_sum(lambda x, h: None), f"{TWO} whose second entry is None, expected numpy.ndarray", check=F32),
    # edges
    "nothing for no rows": wrong(
        zoo.where(lambda x: not x.size, lambda y: None), "it returns None, expected numpy.ndarray", only={"no rows"}),
    # memory, results, state
    "strides of the rows ignored": wrong(
        lambda x, weight: zoo.standard(x if x.strides[-1] > x.itemsize else zoo.dense(x), weight), check=F32),
    "tuple": wrong(lambda x, weight: (zoo.llama(x, weight), None), f"{TWO}, expected numpy.ndarray"),
    "another array": wrong(lambda x, weight: memoryview(x), "it returns a memoryview", check=F32),
    "state": wrong(zoo.doubled_after(1), asked="llama"),
    "error": wrong(zoo.out_of_luck, "RuntimeError: out of luck"),
    "shape": wrong(lambda x, weight: x[..., 1:], ", expected the shape of x"),
    "input": wrong(zoo.in_place, "inputs written to: x"),
    "dtype": wrong(lambda x, weight: zoo.standard(x, weight).astype(np.float64), "got f64["),
}
RIGHT = {
    "a function": Row(zoo.standard, "standard", "", "is RMSNorm: the variant standard"),
    **{f"a layer that exists, {layer.__name__}": Row(layer(64), name)
       for layer, name in ((layers.Zero, "standard"), (layers.Twice, None), (layers.Drawn, None),
                           (layers.Shifted, None))},
    "PyTorch's function": Row(torch.nn.functional.rms_norm, "torch", check=F32),
    "a gate that may be left out": Row(layers.Mamba2, BEFORE, has={"gate"}, finds={"gate": "silu, before"}),
    "a gate that must be there": Row(layers.Qwen3Next, APEX, finds={"gate": "silu, after"}),
    "Zhang's": Row(layers.Zhang, None, finds=AGREE | ZHANG),
    "of ceil(n / 16) elements": Row(
        layers.Ceil, None, finds=AGREE | {"partial": 0.0625, "partial_rounding": "ceil", "eps": 1e-6}),
    "x-transformers": Row(
        layers.Clamp, None, finds=AGREE | {"eps_position": "clamp", "eps": 1e-12, "rounding": "input_dtype"}),
    "zero's gate": Row(
        layers.Gated, "zero", ALL, "is RMSNorm: the variant standard with eps 1e-08, with a sigmoid gate",
        AGREE | {"gate": "sigmoid of gate * x, after", "eps": 1e-8, "rounding": "after_scale"}),
    "groups": Row(
        layers.Grouped, "standard", ALL, "",
        AGREE | {"group_size": 16, "axes": "last, in groups of 16", "rounding": "after_scale"}),
    "an image": Row(
        layers.Image, "x_transformers", "y", "is RMSNorm over axis 1 of 4 (not the last): the variant x_transformers"),
    "another eps": Row(layers.Llama, None, "", "is RMSNorm: the variant llama with eps 1e-05"),
    "no gain, an eps of none": Row(layers.NoGain(3e-6), None, finds={"eps": 3e-6}),
    "Mamba-2": of_transformers("mamba2:MambaRMSNormGated", "silu, before", "before_scale", group_size=16),
    "Kimi Linear": of_transformers("kimi_linear:KimiLinearRMSNormGated", "sigmoid, after", "after_scale"),
    **{name: Row(f"transformers.models.{name}.modeling_{name}:{kind}", name, defects=None)
       for name, kind in (("llama", "LlamaRMSNorm"), ("gemma", "GemmaRMSNorm"), ("t5", "T5LayerNorm"))},
}
WRONG = {
    "squared before the cast": Row(
        layers.MiniMind, "standard", ALL, "", AGREE, (CAST.format("float16"), CAST.format("bfloat16"))),
    "eps not rescaled": Row(
        layers.CoreML, "standard", ALL, defects=("eps is not rescaled with x / max|x|: it acts as 1e-05 max|x|^2",)),
    "1 + gain rounded": Row(
        layers.OffsetRounded, "gemma", "y dx", "is close to RMSNorm: the variant gemma; 2 defects", {},
        ("1 + gain is rounded to the dtype of the gain",
         "y of a new layer is 2 times the normalised row, as its gain g starts at 1 and 1 + g multiplies")),
    "1 / rho a constant": Row(
        layers.Constant, "standard", "dx", defects=("the gradient for x takes 1 / rho for a constant",)),
    "a learned factor": Row(
        layers.Learned, "standard", ALL, "is close to RMSNorm: the variant standard; 2 defects", {"confirmed": True},
        ("it has a parameter of one number beside the gain, factor, which no RMSNorm has",
         "y is 0.5 times what it must be")),
    "no gradient for the gate": Row(
        layers.stopped_gate, GATE, "dgate", defects=("there is no gradient for the gate",)),
    "another rounding with a residual": Row(
        layers.rounds_otherwise_with_a_residual, None, "", "", {"rounding": "before_scale"},
        ("for bfloat16 x, with a residual, y is rounded once, after the gain",)),
    "a gain that starts at 0": Row(
        layers.Zero, "standard", None,
        defects=("y of a new layer is 0, as its gain g starts at 0 and g multiplies...",)),
    "1 + gain that starts at 1": Row(
        layers.Twice, None,
        defects=("y of a new layer is 2 times the normalised row, as its gain g starts at 1 and 1 + g...",)),
    "a gain that is drawn": Row(
        layers.Drawn, None, defects=("the gain of a new layer does not start at one number...",)),
    "a bias that does not start at 0": Row(
        layers.Shifted, None, defects=("the bias of a new layer does not start at 0...",)),
    "clipped": Row(layers.Clipped, None, "", defects=("x is cut off at 50",)),
    "LayerNorm": Row(
        torch.nn.LayerNorm, "standard", f"{ALL} dbias", "is LayerNorm, not RMSNorm", {"kind": "layernorm"},
        ("the gradient for the gain is accumulated in 16 bits", "the gradient for the bias is accumulated in 16 bits")),
    # no norms
    **{name: Row(norm, asked, differ, words, {"kind": "none"}) for name, norm, asked, differ, words in (
        ("tanh", torch.tanh, None, "", "no element of x changes another one's y: nothing is normalised"),
        ("softmax", lambda x: torch.softmax(x, -1), None, "",
         "y is not the row divided by one number: its elements have different factors"),
        ("largest", layers.Largest, None, "",
         "the denominator is the largest |x| of a row, not its root mean square"),
        ("a part of x", layers.Mixed, None, "",
         "y has a part that the gain does not multiply, and that is no multiple of the normalised row"))},
    # broken
    **{name: Row(norm, "standard", differ, "", {"kind": None}, (f"{words}...",)) for name, norm, differ, words in (
        ("an error", zoo.out_of_luck, "y",
         "zoo:out_of_luck raised on x f32[4, 64], scale f32[64]: RuntimeError: out of luck"),
        ("a GPU", layers.needs_a_gpu, "y", "zoo_torch:needs_a_gpu needs a GPU, expected one that runs here"),
        ("a column", layers.narrow, "y dx",
         "zoo_torch:narrow returned f32[4, 1] for x f32[4, 64], expected the shape of x"))},
}
OF_CHECK = {  # of PyTorch; identify is not asked
    "Llama's computes in float32": Row(
        "transformers.models.llama.modeling_llama:LlamaRMSNorm", "llama", None, defects=None,
        check={"dtypes": "float64"}),
    "another one in training": Row(
        layers.InTraining(24).eval(), "standard", None, defects=None, says=("; training",)),
    "sums in 16 bits": Row(
        layers.with_narrow_sums(1), "standard", "dscale", defects=None, says=("bf16 dscale: at (",),
        check={"dtypes": "bfloat16"}),
    "wrong dx beside sums in 16 bits": Row(
        layers.with_narrow_sums(2), "standard", None, defects=None, says=(" dx: at (",),
        check={"quantities": "y,dx"}),
    "no gradient for the residual": Row(
        layers.sum_without_gradient, "standard", "dresidual", defects=None, check=F32),
    "a gate for which there must be none": Row(
        layers.Mamba2, "llama", None, defects=None, only={"gate"}, says=("gate",)),
    "a constant gate": Row(layers.ConstantGate, APEX, "dgate", defects=None, check=F32),
}
# fmt: on


@pytest.mark.parametrize("name", OF_NUMPY)
def test_what_check_says_of_norms_of_numpy(name: str, request: pytest.FixtureRequest) -> None:
    """A wrong return type is one comparison and not one for each case, and a report has a dozen lines."""
    row = OF_NUMPY[name]
    request.getfixturevalue(f"{'small' if row.only or 'axes' in name else 'few'}_circumstances")  # all pairs, or some
    result = row.hold("numpy", ("float32", "bfloat16") if row.only else "float32")
    assert result is not None
    if row.differ:
        assert "parity ratio inf" not in result.text
        said = re.sub(r"(?m)^(edge|not compared): .*(\n    .*)*\n", "", result.text)
        assert len(said.splitlines()) <= 12
        assert len(result.run.records) <= 2 or "returns" not in result.text or row.only
        assert len(result.details.splitlines()) > len(result.run.failures)


@pytest.mark.torch
@pytest.mark.usefixtures("few_circumstances")
@pytest.mark.parametrize("name", [*RIGHT, *WRONG, *OF_CHECK])
def test_what_check_and_identify_say(name: str) -> None:
    row = (RIGHT | WRONG | OF_CHECK)[name]
    if isinstance(row.norm, str) and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    row._replace(recognised=None if name in OF_CHECK else name in RIGHT).hold("torch")
    assert name != "another one in training" or not row.norm.training, "it is as it was"
