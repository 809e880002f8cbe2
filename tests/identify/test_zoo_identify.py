"""Norms that identify alone is asked about: layers of packages, widths, sizes, and what is no RMSNorm."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import numpy as np
import numpy_zoo
import pytest
import torch_zoo
from torch_zoo import torch
from zoo_row import Row

from rmsnorm import Variant
from rmsnorm.identify import Target, identify
from rmsnorm.parity.first import first_parameters
from rmsnorm.targets.bridges import NumPy

HF = "transformers.models.{0}.modeling_{0}:{1}"
NUMPY: dict[str, Any] = {"framework": "numpy"}
FORWARD: dict[str, Any] = {"gradients": False}


def of(name: str, preset: str, **finds: Any) -> Row:
    return Row(name, recognised=True, preset=preset, finds=finds, defects=None)


def of_numpy(norm: Any, *defects: str, tells: Any = (), because: Any = None, **finds: Any) -> Row:
    """A function of x and a gain; it is right where nothing is wrong."""
    how = {"recognised": not defects and not tells, "tells": tells, "because": because or {}}
    return Row(norm, finds=finds, defects=None if tells else defects, identify=NUMPY, **how)


def wide(function: Any, *defects: str, width: int = 64, because: Any = None, **finds: Any) -> Row:
    """A function of x, in float32 at least, with its defects at that width."""

    def norm(x: Any) -> Any:
        return function(x.astype(np.promote_types(x.dtype, np.float32))).astype(x.dtype)

    row = of_numpy(norm, *defects, because=because, **finds)
    return row._replace(identify={**NUMPY, "width": width})


def of_one_width(function: Any, width: int, eps: float, words: str) -> Row:
    """A layer of that width alone: it is right there, and both readings are offered."""

    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(width))

        def forward(self, x: Any) -> Any:
            h = x.to(torch.promote_types(x.dtype, torch.float32))
            return (function(h) * self.weight).type_as(x)

    pattern = f"^no other width could be tried: a number that depends on n.*{re.escape(words)}$"
    finds = {"eps": pytest.approx(eps, rel=1e-12), "widths": str(width)}
    return Row(Norm(), recognised=True, defects=None, finds=finds, because={"widths": pattern}, identify=FORWARD)


def power(framework: str, exponent: float, words: str) -> Row:
    """x times a power of the root of its mean square."""

    def norm(x: Any, weight: Any) -> Any:
        return x * ((x * x).mean(-1)[..., None] + 1e-6) ** (exponent / 2) * weight

    headline = f"is not recognised: x is {words}"
    return Row(norm, "", recognised=False, headline=headline, finds=NONE, defects=None,
               identify={"framework": framework})  # fmt: skip


def gradient(second: float, factor: float, width: int, words: str) -> Row:
    """dx whose second term, or all of it, is a little wrong."""

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            inverse = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
            ctx.save_for_backward(x, weight, inverse)
            return (x.double() * inverse * weight.double()).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            x, weight, inverse = ctx.saved_tensors
            dscale = (dy.double() * x.double() * inverse).sum(tuple(range(x.ndim - 1)))
            v, y = dy.double() * weight.double(), x.double() * inverse
            dx = factor * inverse * (v - second * y * (v * y).mean(-1, keepdim=True))
            return dx.to(x.dtype), dscale.to(weight.dtype)

    how = {"framework": "torch", "width": width}
    return Row(lambda x, weight: Norm.apply(x, weight), recognised=False, defects=(f"{words}...",), identify=how)


class Stretched(torch.autograd.Function):
    """The gradient is 1.5 times as large."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return 1.5 * dy


def gain_beside_a_gate(wrong: bool) -> Any:
    def norm(x: Any, weight: Any, gate: Any) -> Any:
        weight = Stretched.apply(weight) if wrong else weight
        return (torch_zoo.rows(x.float()) * weight.float() * torch_zoo.silu(gate.float())).to(x.dtype)

    return norm


class OneNumber(torch.nn.Module):
    """A gain of one number."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.weight, self.wrong = torch.nn.Parameter(torch.ones(1)), wrong

    def forward(self, x: Any) -> Any:
        weight = Stretched.apply(self.weight) if self.wrong else self.weight
        return (torch_zoo.rows(x.float()) * weight.float()).to(x.dtype)


def of_gain(norm: Any, wrong: bool) -> Row:
    finds, tells = {"gradients": "wrong" if wrong else "agree"}, ["the gradient for the gain is wrong by"] * wrong
    return Row(norm, recognised=not wrong, finds=finds, tells=tells, defects=None if wrong else ())


def gate(act: Any, before: bool, is_known: bool = False) -> Row:
    norm = type("Norm", (torch_zoo.Required,), {"before": before, "act": lambda self, z: act(z)})
    finds = {"gate": f"sigmoid, {'before' if before else 'after'}"} if is_known else NONE
    tells = () if is_known else ("the gate acts in no known way",)
    return Row(norm, recognised=is_known, finds=finds, tells=tells, defects=() if is_known else None)


def total(x: Any) -> Any:
    return (x * x).sum(-1, keepdims=True)


def square_sum(x: Any) -> Any:
    return x.square().sum(-1, keepdim=True)


def in_groups(size: Any) -> Any:
    def norm(x: Any) -> Any:
        groups = x.reshape(*x.shape[:-1], -1, size(x.shape[-1]))
        return numpy_zoo.rows(groups).reshape(x.shape)

    return norm


def squares_before_the_cast(x: Any) -> Any:
    h = x.astype(np.promote_types(x.dtype, np.float32))
    return (h / np.sqrt((x * x).astype(h.dtype).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def in_two_axes(x: Any, weight: Any) -> Any:
    assert x.ndim == 2
    return numpy_zoo.standard(x, weight)


def first_axis(x: Any) -> Any:
    wide = x.astype(np.float64)
    return (wide / np.sqrt((wide * wide).mean(1, keepdims=True) + 1e-6)).astype(x.dtype)


def of_channels(x: Any, weight: Any) -> Any:
    return (first_axis(x).astype(np.float64) * weight.reshape(1, -1, *[1] * (x.ndim - 2))).astype(x.dtype)


class Dropped(torch_zoo.Plain):
    def forward(self, x: Any) -> Any:
        return torch.nn.functional.dropout(super().forward(x), 0.5, self.training)


NONE = {"kind": "none"}
ON_THE_SUM = "eps is 1e-06 / n: it is added to the sum of squares, not to their mean"
ON_THE_NORM = "eps is 1e-06 / sqrt(n): it is added to the norm, not to the root of the mean square"
NEAR = {"eps": pytest.approx(1e-6, rel=1e-3), "confirmed": True}
MANY = "elements of the last axis that change one another"
ACTS = {
    "silu up to 10": lambda z: torch_zoo.silu(z.clamp(max=10)),
    "relu6": torch.nn.functional.relu6,
    "hardswish": torch.nn.functional.hardswish,
    "quick gelu": lambda z: z * torch.sigmoid(1.702 * z),
    "silu but at 0": lambda z: torch.where(z == 0, 1.0, torch_zoo.silu(z)),
}
# fmt: off
ROWS = {row.norm: row for row in (
    of("torch.nn:RMSNorm", "torch", eps="machine epsilon"),
    of("keras.layers:RMSNormalization", "keras", eps=1e-6),
    of("flax.nnx:RMSNorm", "flax", eps=1e-6),
    of("flax.linen:RMSNorm", "flax", eps=1e-6),
    of(HF.format("llama", "LlamaRMSNorm"), "llama"),
    of(HF.format("gemma", "GemmaRMSNorm"), "gemma", scale_offset=1.0),
    of(HF.format("t5", "T5LayerNorm"), "t5"),
    of(HF.format("gemma3n", "Gemma3nRMSNorm"), "gemma4"),
    of(HF.format("gemma4", "Gemma4RMSNorm"), "gemma4"),
    of(HF.format("olmo2", "Olmo2RMSNorm"), "olmo2"),
    of("rmsnorm.torch_impl:RMSNorm", "torch"),
    of("rmsnorm.tf_impl:RMSNormalization", "keras"),
    of("rmsnorm.numpy_impl:rms_norm", "standard", residual_rounding="before"),
)} | {  # layers of this package begin as the norm alone
    f"{name}, {variant}": Row(
        name, recognised=True, finds={"scale_offset": variant == "gemma"}, defects=None,
        identify={"init": {"variant": variant}, **FORWARD},
    )
    for name in ("rmsnorm.torch_impl:RMSNorm", "rmsnorm.tf_impl:RMSNormalization", "rmsnorm.flax_impl:RMSNorm",
                 "rmsnorm.flax_impl.linen:RMSNorm")
    for variant in ("standard", "gemma", "lasagne")
} | {
    "kind": of_numpy(numpy_zoo.rows, kind="rmsnorm"),
    "several names": of_numpy(numpy_zoo.only_float32)._replace(headline=(
        "is RMSNorm: the variant mlx (or onnx, apex, transformer_engine, theano, the same in what was asked)")),
    "all of x": Row(torch_zoo.Jointly, recognised=True, tells=["is RMSNorm over axis 0, 1 of 2"], defects=None,
                    identify={"width": 16}),
    "all of x, wider": Row(torch_zoo.Jointly, recognised=True, tells=["is RMSNorm over axis 0, 1 of 2"], defects=None,
                           identify={"width": 24}),
    "options of a class": Row(torch.nn.RMSNorm, recognised=True, finds={"eps": 0.5}, defects=None,
                              identify={"init": {"normalized_shape": 24, "eps": 0.5}}),
    # what depends on the width
    "eps on the sum": wide(lambda x: x / np.sqrt(total(x) + 1e-6) * x.shape[-1] ** 0.5, ON_THE_SUM, **NEAR),
    "eps on the norm": wide(lambda x: x / (np.sqrt(total(x)) + 1e-6) * x.shape[-1] ** 0.5, ON_THE_NORM, **NEAR),
    "over 64": wide(lambda x: x / np.sqrt(total(x) / 64 + 1e-6),
                    "the sum of squares is divided by 64 at every width, not by n", **NEAR),
    "floor of rho": wide(lambda x: x / np.maximum(np.sqrt(total(x) / x.shape[-1]), 1e-6),
                         "rho has the floor 1e-06 (q has 1e-12) at every width, not eps / sqrt(n)", **NEAR),
    "floor of q": wide(lambda x: x / np.sqrt(np.maximum(total(x) / x.shape[-1], 1e-6)),
                       "rho has the floor 0.001 (q has 1e-06) at every width, not eps / sqrt(n)",
                       eps=pytest.approx(1e-3, rel=1e-3), confirmed=True),
    "root n twice": wide(lambda x: numpy_zoo.rows(x) * x.shape[-1] ** 0.5, "y is 8 (sqrt(n)) times too large", **NEAR),
    "root n not taken back": wide(lambda x: numpy_zoo.rows(x) / x.shape[-1] ** 0.5,
                                  "y is 0.125 (1 / sqrt(n)) times what it must be", **NEAR),
    "32 elements": wide(lambda x: x / np.sqrt(total(x[..., :32]) / 32 + 1e-6),
                        "the statistic has 32 elements at every width, whatever n is", **NEAR),
    "64 elements": wide(lambda x: x / np.sqrt(total(x[..., :64]) / 64 + 1e-6),
                        "the statistic has 64 elements at every width, whatever n is", **NEAR),
    "no known rule": wide(
        lambda x: x / np.sqrt(total(x) / x.shape[-1] ** 0.9 + 1e-6),
        "the denominator depends on the width in no known way: with 64 and 128 elements in a row it is another one",
        **NEAR),
    **{f"a clamp of the norm, {width}": wide(
        lambda x: x / np.maximum(np.sqrt(total(x)), 1e-12) * x.shape[-1] ** 0.5, width=width, eps=1e-12,
        widths=f"{width} and {2 * width}", eps_position="clamp") for width in (48, 64)},
    "of one width, over 64": of_one_width(
        lambda x: x * (square_sum(x) / 64 + 1e-6).rsqrt(), 64, 1e-6, "cannot be told from a constant"),
    "of one width, eps on the sum": of_one_width(
        lambda x: 8 * x * (square_sum(x) + 1e-6).rsqrt(), 64, 1e-6 / 64, f"; it may also be that {ON_THE_SUM}"),
    "of width 48, eps on the sum": of_one_width(
        lambda x: 48**0.5 * x * (square_sum(x) + 1e-6).rsqrt(), 48, 1e-6 / 48, f"; it may also be that {ON_THE_SUM}"),
    "of width 48, eps on the norm": of_one_width(
        lambda x: 48**0.5 * x / (square_sum(x).sqrt() + 1e-6), 48, 1e-6 / 48**0.5, f" that {ON_THE_NORM}"),
    "of one width, floor of q": of_one_width(
        lambda x: x * (square_sum(x) / 64).clamp_min(1e-6).rsqrt(), 64, 8e-3,
        "; it may also be that rho has the floor 0.001 (q has 1e-06) at every width, not eps / sqrt(n)"),
    "groups of 8": wide(in_groups(lambda n: 8), because={"group_size": MANY}, axes="last, in groups of 8"),
    "8 groups": wide(
        in_groups(lambda n: n // 8), axes="last, in groups of 8",
        because={"group_size": "there are 8 groups at a width of 128, too, of 16 elements"}),
    "groups as wide as the first width": wide(
        in_groups(lambda n: 64), because={"group_size": MANY}, axes="last, in groups of 64"),
    "another one in training": Row(
        Dropped, recognised=False, finds={"widths": "64 and 128"}, identify=FORWARD,
        defects=("in training, y is another one than in evaluation",)),
    **{f"squares of {width} elements before the cast": Row(  # of wide rows fewer are asked: 5 and 13 here
        squares_before_the_cast, recognised=False, identify={**NUMPY, **FORWARD, "width": width},
        defects=[f"for {name} x, the squares are rounded to {name}, before the cast to float32"
                 for name in ("float16", "bfloat16")]) for width in (3072, 1200)},
    # ends of blocks, and axes
    "blocks of 8": of_numpy(
        numpy_zoo.of_blocks_of_8, "the last 1 of 33 elements, after the last full block of 4, are 0 in y"),
    "a statistic of blocks of 8": of_numpy(numpy_zoo.statistic_of_blocks_of_8, tells=[""]),
    "1,024 columns": of_numpy(
        numpy_zoo.of_1024_columns, tells=["y of 507 elements of a row is another one, from element 1024 on"]),
    "1,024 rows": of_numpy(
        numpy_zoo.of_1024_rows, tells=["y of 1026 rows is another one, from row 1024 on"]),
    "axis 1 of 3": of_numpy(first_axis)._replace(tells=["is RMSNorm over axis 1 of 3 (not the last)"]),
    "channels": of_numpy(of_channels)._replace(tells=["is RMSNorm over axis 1 of 3 (not the last)"]),
    "two axes alone": of_numpy(in_two_axes, axes="last"),
    # gradients
    **{f"a gain beside a gate, {word}": of_gain(gain_beside_a_gate(word == "wrong"), word == "wrong")
       for word in ("right", "wrong")},
    **{f"a gain of one number, {word}": of_gain(OneNumber(word == "wrong"), word == "wrong")
       for word in ("right", "wrong")},
    "1 / rho a constant": gradient(0.0, 1.0, 64, "the gradient for x takes 1 / rho for a constant"),
    "1 / rho a constant, of a wide row": gradient(0.0, 1.0, 16384, "the gradient for x takes 1 / rho for a constant"),
    "dx wrong by 0.5 %": gradient(
        1.0, 1.005, 64, "the gradient for x is wrong by 0.5 % of its largest element"),
    "dx wrong by 1 % of its second term": gradient(0.99, 1.0, 4096, "the gradient for x is wrong by "),
    # gates
    **{f"a gate of sigmoid, {before}": gate(torch.sigmoid, before, True) for before in (False, True)},
    **{f"a gate of {name}, {before}": gate(act, before) for name, act in ACTS.items() for before in (False, True)},
    # what is none
    "writes": Row(torch_zoo.writes, recognised=False, tells=["it writes to its arguments: x"], defects=None,
                  identify={"framework": "torch", "time_limit": 1.0}),
    "slow": Row(torch_zoo.slow, recognised=False, tells=["slow took more than its limit of 1 s"], defects=None,
                finds={"kind": None}, identify={"framework": "torch", "time_limit": 1.0}),
    "root, not divided, torch": power("torch", 1, (
        "multiplied by the root of its mean square, not divided by it, as by x / rsqrt(q + eps)")),
    "root, not divided": power("numpy", 1, (
        "multiplied by the root of its mean square, not divided by it, as by x / rsqrt(q + eps)")),
    "mean square, divided": power("numpy", -2, "divided by its mean square, not by the root of it"),
    "mean square, not divided": power("numpy", 2, "multiplied by its mean square, not divided by the root of it"),
    "fourth root": power("torch", -0.5, "divided by the fourth root of its mean square, not by the square root"),
    "standard deviation, not divided": Row(
        lambda x, weight: x * (x.var(-1, unbiased=False)[..., None] + 1e-6).sqrt() * weight, recognised=False,
        finds=NONE, defects=None, tells=["multiplied by the root of its variance, not divided by it"],
        identify={"framework": "torch"}),
    "standard deviation": Row(
        lambda x, weight: x / (x.var(-1, unbiased=False)[..., None] + 1e-6).sqrt() * weight, recognised=False,
        finds=NONE, defects=None, tells=["divided by the root of its variance, not of its mean square"],
        identify={"framework": "torch"}),
}
# fmt: on
NEEDS = {"keras.layers:RMSNormalization": pytest.mark.needs("keras>=3.9", "the layer is of 3.9")}
PACKAGES = {"rmsnorm.tf_impl:RMSNormalization": "keras", "rmsnorm.flax_impl.linen:RMSNorm": "flax",
            "rmsnorm.flax_impl:RMSNorm": "flax"}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDS.get(name, ())) for name in ROWS])
def test_what_identify_says(name: str) -> None:
    row = ROWS[name]
    if isinstance(row.norm, str):
        package = PACKAGES.get(row.norm, row.norm.split(".")[0])
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    identity = identify(row.norm, **row.identify)
    row.hold_identity(identity)
    assert name != "two axes alone" or identity.rank == 2
    if "a gate of sigmoid" in name:
        assert not [words for words in identity.differences("standard") if not words.startswith("gate_")]
    if "root" in name and row.finds is NONE:
        mends = identity.mends(Variant.get("llama"))
        assert mends[0] == "divide x by sqrt(q + eps), or multiply it by rsqrt(q + eps)"


@pytest.mark.filterwarnings("ignore:You passed `rms_scaling=True`")
def test_a_root_of_the_variance_is_no_rmsnorm() -> None:
    keras = pytest.importorskip("keras")
    identity = identify(keras.layers.LayerNormalization(rms_scaling=True))
    assert (identity.kind, identity.recognised, identity["numerator"]) == ("none", False, "x"), identity.text
    assert "is not recognised: x is divided by the root of its variance, not of its mean square" in identity.headline
    assert identity.mends(Variant.get("keras")) == ["take the mean of x * x, from which no mean of x was subtracted"]


def test_what_is_not_finite_is_no_factor() -> None:
    target = Target("unwritten", "numpy", NumPy(), lambda arrays: arrays["x"] * arrays.get("scale", np.nan), ("scale",))
    (failure,) = first_parameters(target, Variant.get("standard"))
    assert failure.detail.startswith("the gain of a new layer does not start at one number"), failure
