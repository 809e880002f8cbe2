"""One table of norms, right and wrong: what `check` says of each, and what `identify` says."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch_zoo as zoo
from torch_zoo import torch
from zoo_row import Row

from rmsnorm import Variant
from rmsnorm.parity.circumstances import options_of

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("few_circumstances")]
ALL = "y dx dscale"


def variant(name: str, **fields: Any) -> Variant:
    return Variant.get(name).replace(**fields)


def of_transformers(name: str, gate: str, rounding: str, **finds: Any) -> Row:
    module, _, kind = name.partition(":")
    finds |= {"gate": gate, "rounding": rounding, "gradients": "agree"}
    return Row(f"transformers.models.{module}.modeling_{module}:{kind}", None, finds=finds)


AGREE = {"gradients": "agree"}
IN_T = {"rounding": "input_dtype", "result_dtype": "promote"}
GATE = variant("standard", gate_function="sigmoid", gate_position="after", **IN_T)
CAST = "for {0} x, the squares are rounded to {0}, before the cast to float32"
BEFORE = variant("llama", gate_position="before")
APEX = variant("apex", eps=1e-6)
FUSED = AGREE | {"residual_rounding": "before"}
ZHANG = {"eps_position": "outside", "eps": 1e-8, "partial": 0.25, "partial_rounding": "floor", "bias": True}
# fmt: off
RIGHT = {
    "a function": Row(
        zoo.standard, "standard", "", "is RMSNorm: the variant standard",
    ),
    "plain": Row(zoo.Plain, "standard", "", "is RMSNorm: the variant standard", AGREE),
    "1 + gain": Row(zoo.Offset, "gemma"),
    **{f"a layer that exists, {layer.__name__}": Row(layer(64), name)
       for layer, name in ((zoo.Zero, "standard"), (zoo.Twice, None), (zoo.Drawn, None), (zoo.Shifted, None))},
    "PyTorch's of one width": Row(torch.nn.RMSNorm(24), "torch"),
    "PyTorch's of two axes": Row(
        torch.nn.RMSNorm((4, 6), eps=1e-3), variant("torch", eps=1e-3), finds={"axes": "last 2", "eps": 1e-3}
    ),
    "PyTorch's function": Row(torch.nn.functional.rms_norm, "torch", check={"dtypes": "float32"}),
    "a gate that may be left out": Row(zoo.Mamba2, BEFORE, has={"gate"}, finds={"gate": "silu, before"}),
    "a gate that must be there": Row(zoo.Qwen3Next, APEX, finds={"gate": "silu, after"}),
    "all in the dtype of x": Row(
        zoo.AllInT, None, finds=AGREE | {"rounding": "input_dtype", "eps": 1e-5}
    ),
    "Zhang's": Row(zoo.Zhang, None, finds=AGREE | ZHANG),
    "of ceil(n / 16) elements": Row(
        zoo.Ceil, None, finds=AGREE | {"partial": 0.0625, "partial_rounding": "ceil", "eps": 1e-6}
    ),
    "x-transformers": Row(
        zoo.Clamp, None, finds=AGREE | {"eps_position": "clamp", "eps": 1e-12, "rounding": "input_dtype"}
    ),
    "zero's gate": Row(
        zoo.Gated, "zero", ALL, "is RMSNorm: the variant standard with eps 1e-08, with a sigmoid gate",
        AGREE | {"gate": "sigmoid of gate * x, after", "eps": 1e-8, "rounding": "after_scale"},
    ),
    "groups": Row(
        zoo.Grouped, "standard", ALL, "",
        AGREE | {"group_size": 16, "axes": "last, in groups of 16", "rounding": "after_scale"},
    ),
    "an image": Row(
        zoo.Image, "x_transformers", "y", "is RMSNorm over axis 1 of 4 (not the last): the variant x_transformers"
    ),
    "another eps": Row(zoo.Llama, None, "", "is RMSNorm: the variant llama with eps 1e-05"),
    "nearer to llama": Row(zoo.Keras5, None, "", "is RMSNorm: the variant llama but rounding is 'input_dtype'"),
    "no gain, an eps of presets": Row(zoo.NoGain(1e-5), None, finds={"eps": 1e-5}),
    "no gain, an eps of none": Row(zoo.NoGain(3e-6), None, finds={"eps": 3e-6}),
    "a sigmoid gate": Row(zoo.sigmoid_gate, None),
    "a residual": Row(zoo.fused, None, finds=FUSED),
    "a layer's residual": Row(zoo.Fused, "standard", finds=FUSED, has={"residual"}),
    "Mamba-2": of_transformers("mamba2:MambaRMSNormGated", "silu, before", "before_scale", group_size=16),
    "Qwen3-Next": of_transformers("qwen3_next:Qwen3NextRMSNormGated", "silu, after", "before_scale"),
    "Kimi Linear": of_transformers("kimi_linear:KimiLinearRMSNormGated", "sigmoid, after", "after_scale"),
}
WRONG = {
    "squared before the cast": Row(
        zoo.MiniMind, "standard", ALL, "", AGREE, (CAST.format("float16"), CAST.format("bfloat16"))
    ),
    "eps not rescaled": Row(
        zoo.CoreML, "standard", ALL, defects=("eps is not rescaled with x / max|x|: it acts as 1e-05 max|x|^2",)
    ),
    "1 + gain rounded": Row(
        zoo.OffsetRounded, "gemma", "y", "is close to RMSNorm: the variant gemma; 2 defects", {},
        ("1 + gain is rounded to the dtype of the gain",
         "y of a new layer is 2 times the normalised row, as its gain g starts at 1 and 1 + g multiplies"),
    ),
    "no gradient for the gain": Row(
        zoo.NoGainGradient, "standard", "dscale", defects=("there is no gradient for the gain",)
    ),
    "1 / rho a constant": Row(
        zoo.Constant, "standard", "dx", defects=("the gradient for x takes 1 / rho for a constant",)
    ),
    "a learned factor": Row(
        zoo.Learned, "standard", ALL, "is close to RMSNorm: the variant standard; 2 defects", {"confirmed": True},
        ("it has a parameter of one number beside the gain, factor, which no RMSNorm has",
         "y is 0.5 times what it must be"),
    ),
    "no gradient for the gate": Row(
        zoo.stopped_gate, GATE, "dgate", defects=("there is no gradient for the gate",)
    ),
    "another rounding with a residual": Row(
        zoo.rounds_otherwise_with_a_residual, None, "", "",
        {"rounding": "before_scale"}, ("for bfloat16 x, with a residual, y is rounded once, after the gain",),
    ),
    "a gain that starts at 0": Row(
        zoo.Zero, "standard", None,
        defects=("y of a new layer is 0, as its gain g starts at 0 and g multiplies...",),
    ),
    "1 + gain that starts at 1": Row(
        zoo.Twice, None,
        defects=("y of a new layer is 2 times the normalised row, as its gain g starts at 1 and 1 + g...",),
    ),
    "a gain that is drawn": Row(
        zoo.Drawn, None,
        defects=("the gain of a new layer does not start at one number...",),
    ),
    "a bias that does not start at 0": Row(
        zoo.Shifted, None,
        defects=("the bias of a new layer does not start at 0...",),
    ),
    "clipped": Row(zoo.Clipped, None, "", defects=("x is cut off at 50",)),
    "LayerNorm": Row(
        torch.nn.LayerNorm, "standard", f"{ALL} dbias", "is LayerNorm, not RMSNorm", {"kind": "layernorm"},
        ("the gradient for the gain is accumulated in 16 bits", "the gradient for the bias is accumulated in 16 bits"),
    ),
}
NO_NORM = {  # name: the function, what check is asked, the quantities, the headline
    "tanh": (torch.tanh, None, "", "no element of x changes another one's y: nothing is normalised"),
    "softmax": (
        zoo.softmax, "standard", "y dx", "y is not the row divided by one number: its elements have different factors"
    ),
    "largest": (zoo.Largest, None, "", "the denominator is the largest |x| of a row, not its root mean square"),
    "a part of x": (
        zoo.Mixed, None, "",
        "y has a part that the gain does not multiply, and that is no multiple of the normalised row",
    ),
}
BROKEN = {
    "an error": (zoo.raises, "y", "torch_zoo:raises raised on x f32[4, 64]: RuntimeError: no kernel image"),
    "a GPU": (zoo.needs_a_gpu, "y", "torch_zoo:needs_a_gpu needs a GPU, expected one that runs here"),
    "shape": (zoo.narrow, "y dx", "torch_zoo:narrow returned f32[4, 1] for x f32[4, 64], expected the shape of x"),
}
# fmt: on
RIGHT |= {
    name: Row(f"transformers.models.{name}.modeling_{name}:{kind}", name, defects=None)
    for name, kind in (
        ("llama", "LlamaRMSNorm"),
        ("gemma", "GemmaRMSNorm"),
        ("t5", "T5LayerNorm"),
    )
}
OF_CHECK = {  # what identify is not asked
    "Llama's computes in float32": Row(
        "transformers.models.llama.modeling_llama:LlamaRMSNorm",
        "llama",
        None,
        defects=None,
        check={"dtypes": "float64"},
    ),
    "PyTorch's is not Llama's": Row(torch.nn.RMSNorm(24), "llama", ALL, check={"dtypes": "float32"}, defects=None),
    "another one in training": Row(zoo.InTraining(24).eval(), "torch", None, defects=None, says=("; training",)),
    "no gradient for the residual": Row(
        zoo.sum_without_gradient, "standard", "dresidual", defects=None, check={"dtypes": "float32"}
    ),
    "twice the residual": Row(
        lambda x, residual, weight: zoo.fused(x, 2 * residual, weight), "standard", None, defects=None
    ),
    "a write to one element": Row(
        zoo.writes_one_element,
        "standard",
        None,
        defects=None,
        only={"rows of 1"},
        says=("inputs written to: x",),
        lacks="it writes to its arguments",
        check={"dtypes": "float32"},
    ),
    "a write to dy of one element": Row(
        zoo.writes_dy,
        "standard",
        None,
        defects=None,
        only={"rows of 1"},
        says=("inputs written to: dy",),
        lacks="it writes to its arguments",
        check={"dtypes": "float32"},
    ),
    "a gate for which there must be none": Row(
        zoo.Mamba2,
        "llama",
        None,
        defects=None,
        only={"gate"},
        says=("gate",),
    ),
    "a gate on the other side": Row(
        zoo.Qwen3Next,
        BEFORE,
        None,
        defects=None,
        says=("gate_position is 'after', llama has 'before'",),
    ),
    "a gate cut off": Row(zoo.CutOff, APEX, "y", defects=None, check={"gradients": False}),
    "a constant gate": Row(zoo.ConstantGate, APEX, "dgate", defects=None, check={"dtypes": "float32"}),
}
WRONG |= {name: Row(*said, {"kind": "none"}) for name, said in NO_NORM.items()}
WRONG |= {
    name: Row(norm, "standard", differ, "", {"kind": None}, (f"{words}...",))
    for name, (norm, differ, words) in BROKEN.items()
}


@pytest.mark.parametrize("name", [*RIGHT, *WRONG, *OF_CHECK])
def test_what_check_and_identify_say(name: str) -> None:
    row = (RIGHT | WRONG | OF_CHECK)[name]
    if isinstance(row.norm, str) and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    found = row._replace(recognised=None if name in OF_CHECK else name in RIGHT).hold("torch")
    assert name != "another one in training" or not row.norm.training, "it is as it was"
    if found is not None and row.norm in (zoo.Mamba2, zoo.Qwen3Next) and found.passed:
        of_gate = {record.case for record in found.run.records if record.quantity == "dgate"}
        assert all("gate" in options_of(case) for case in of_gate)
        with_gate = {"gate" in options_of(record.case) for record in found.run.records}
        assert with_gate == ({True, False} if row.norm is zoo.Mamba2 else {True})
