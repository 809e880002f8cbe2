"""Norms that identify alone is asked about: layers of packages, widths, sizes, and what is no RMSNorm."""

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
from rmsnorm.identify import Target, identify
from rmsnorm.parity.first import first_parameters
from rmsnorm.targets.bridges import NumPy

HF = "transformers.models.{0}.modeling_{0}:{1}"
NUMPY: dict[str, Any] = {"framework": "numpy"}
TORCH: dict[str, Any] = {"framework": "torch"}
FORWARD: dict[str, Any] = {"gradients": False}
NONE = {"kind": "none"}
NEAR = {"eps": pytest.approx(1e-6, rel=1e-3), "confirmed": True}


def of(name: str, preset: str, **finds: Any) -> Row:
    return Row(name, recognised=True, preset=preset, finds=finds, defects=None)


def of_numpy(norm: Any, *defects: str, tells: Any = (), because: Any = None, **finds: Any) -> Row:
    """A function of x and a gain; it is right where nothing is wrong."""
    how = {"recognised": not defects and not tells, "tells": tells, "because": because or {}}
    return Row(norm, finds=finds, defects=None if tells else defects, identify=NUMPY, **how)


def wide(function: Any, *defects: str, width: int = 64, because: Any = None, **finds: Any) -> Row:
    """A function of x in float64, with its defects at that width."""
    row = of_numpy(lambda x: zoo.like(function(zoo.wide(x)), x), *defects, because=because, **finds)
    return row._replace(identify={**NUMPY, "width": width})


def of_one_width(function: Any, width: int, eps: float, words: str) -> Row:
    """A layer of that width alone: it is right there, and both readings are offered."""

    class Norm(layers.Plain):
        def forward(self, x: Any) -> Any:
            return zoo.like(function(zoo.wide(x)) * self.weight, x)

    pattern = f"^no other width could be tried: a number that depends on n.*{re.escape(words)}$"
    finds = {"eps": pytest.approx(eps, rel=1e-12), "widths": str(width)}
    return Row(Norm(width), recognised=True, defects=None, finds=finds, because={"widths": pattern}, identify=FORWARD)


def none(norm: Any, words: str, options: Any = TORCH, **finds: Any) -> Row:
    return Row(norm, recognised=False, tells=[words], finds=finds or NONE, defects=None, identify=options)


def power(exponent: float, words: str, options: Any = NUMPY) -> Row:
    """x times a power of the root of its mean square."""
    return none(lambda x, weight: x * (zoo.mean_square(x) + 1e-6) ** (exponent / 2) * weight,
                f"is not recognised: x is {words}", options)  # fmt: skip


def gradient(second: float, factor: float, width: int, words: str) -> Row:
    how = {**TORCH, "width": width}
    return Row(layers.with_gradient(second, factor), recognised=False, defects=(f"{words}...",), identify=how)


def gate(act: Any, before: bool, is_known: bool = False) -> Row:
    norm = layers.plain("Norm", layers.Required, before=before, act=lambda self, z: act(z))
    finds = {"gate": f"sigmoid, {'before' if before else 'after'}"} if is_known else NONE
    tells = () if is_known else ("the gate acts in no known way",)
    return Row(norm, recognised=is_known, finds=finds, tells=tells, defects=() if is_known else None)


def total(x: Any) -> Any:
    return (x * x).sum(-1)[..., None]


def in_groups(size: Any) -> Any:
    return lambda x: zoo.rows(x.reshape(*x.shape[:-1], -1, size(x.shape[-1]))).reshape(x.shape)


def squares_before_the_cast(x: Any) -> Any:
    h = x.astype(np.promote_types(x.dtype, np.float32))
    return (h / np.sqrt((x * x).astype(h.dtype).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def in_two_axes(x: Any, weight: Any) -> Any:
    assert x.ndim == 2
    return zoo.standard(x, weight)


def first_axis(x: Any) -> Any:
    return zoo.like(zoo.rows(zoo.wide(x), axis=1), x)


def of_channels(x: Any, weight: Any) -> Any:
    return (zoo.wide(first_axis(x)) * weight.reshape(1, -1, *[1] * (x.ndim - 2))).astype(x.dtype)


ON_THE_SUM = "eps is 1e-06 / n: it is added to the sum of squares, not to their mean"
ON_THE_NORM = "eps is 1e-06 / sqrt(n): it is added to the norm, not to the root of the mean square"
FLOOR = "rho has the floor {} (q has {}) at every width, not eps / sqrt(n)"
MANY = "elements of the last axis that change one another"
NOT_LAST = ["is RMSNorm over axis 1 of 3 (not the last)"]
ACTS = {
    "quick gelu": lambda z: z * torch.sigmoid(1.702 * z),
    "silu but at 0": lambda z: torch.where(z == 0, 1.0, layers.silu(z)),
}
OWN = ("rmsnorm.torch_impl:RMSNorm", "rmsnorm.tf_impl:RMSNormalization", "rmsnorm.flax_impl:RMSNorm",
       "rmsnorm.flax_impl.linen:RMSNorm")  # fmt: skip
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
    of(HF.format("olmo2", "Olmo2RMSNorm"), "olmo2"),
    of("rmsnorm.numpy_impl:rms_norm", "standard", residual_rounding="before"),
)} | {  # layers of this package begin as the norm alone
    f"{name}, {variant}": Row(
        name, recognised=True, finds={"scale_offset": variant == "gemma"}, defects=None,
        identify={"init": {"variant": variant}, **FORWARD},
    )
    for name in OWN for variant in ("gemma", "lasagne")
} | {
    "all of x": Row(layers.Jointly, recognised=True, tells=["is RMSNorm over axis 0, 1 of 2"], defects=None,
                    identify={"width": 16}),
    # what depends on the width
    "eps on the sum": wide(lambda x: x / (total(x) + 1e-6) ** 0.5 * x.shape[-1] ** 0.5, ON_THE_SUM, **NEAR),
    "eps on the norm": wide(lambda x: x / (total(x) ** 0.5 + 1e-6) * x.shape[-1] ** 0.5, ON_THE_NORM, **NEAR),
    "over 64": wide(lambda x: x / (total(x) / 64 + 1e-6) ** 0.5,
                    "the sum of squares is divided by 64 at every width, not by n", **NEAR),
    "floor of q": wide(lambda x: x / np.sqrt(np.maximum(zoo.mean_square(x), 1e-6)), FLOOR.format("0.001", "1e-06"),
                       eps=pytest.approx(1e-3, rel=1e-3), confirmed=True),
    "root n twice": wide(lambda x: zoo.rows(x) * x.shape[-1] ** 0.5, "y is 8 (sqrt(n)) times too large", **NEAR),
    "no known rule": wide(
        lambda x: x / (total(x) / x.shape[-1] ** 0.9 + 1e-6) ** 0.5,
        "the denominator depends on the width in no known way: with 64 and 128 elements in a row it is another one",
        **NEAR),
    "of width 48, eps on the sum": of_one_width(
        lambda x: 48**0.5 * x * (total(x) + 1e-6).rsqrt(), 48, 1e-6 / 48, f"; it may also be that {ON_THE_SUM}"),
    "groups of 8": wide(in_groups(lambda n: 8), because={"group_size": MANY}, axes="last, in groups of 8"),
    "squares of 3,072 elements before the cast": Row(  # of wide rows fewer are asked
        squares_before_the_cast, recognised=False, identify={**NUMPY, **FORWARD, "width": 3072},
        defects=[f"for {name} x, the squares are rounded to {name}, before the cast to float32"
                 for name in ("float16", "bfloat16")]),
    # ends of blocks, and axes
    "blocks of 8": of_numpy(
        zoo.of_blocks_of_8, "the last 1 of 33 elements, after the last full block of 4, are 0 in y"),
    "1,024 columns": of_numpy(
        lambda x, weight: np.concatenate([zoo.standard(x, weight)[..., :1024], x[..., 1024:]], axis=-1),
        tells=["y of 507 elements of a row is another one, from element 1024 on"]),
    "1,024 rows": of_numpy(
        zoo.where(lambda x: x.ndim > 1, lambda y: (np.arange(y[..., 0].size) < 1024).reshape(*y.shape[:-1], 1) * y),
        tells=["rows is another one, from row 1024 on"]),
    "axis 1 of 3": of_numpy(first_axis)._replace(tells=NOT_LAST),
    "channels": of_numpy(of_channels)._replace(tells=NOT_LAST),
    "two axes alone": of_numpy(in_two_axes, axes="last"),
    # gradients
    "1 / rho a constant": gradient(0.0, 1.0, 16384, "the gradient for x takes 1 / rho for a constant"),
    "dx wrong by 0.5 %": gradient(1.0, 1.005, 64, "the gradient for x is wrong by 0.5 % of its largest element"),
    "dx wrong by 1 % of its second term": gradient(0.99, 1.0, 4096, "the gradient for x is wrong by "),
    # gates
    **{f"a gate of sigmoid, {before}": gate(torch.sigmoid, before, True) for before in (False, True)},
    **{f"a gate of {name}, {before}": gate(act, before)
       for number, (name, act) in enumerate(ACTS.items()) for before in (bool(number % 2),)},
    # what is none
    "slow": none(layers.slow, "slow took more than its limit of 1 s", {**TORCH, "time_limit": 1.0}, kind=None),
    "root, not divided": power(
        1, "multiplied by the root of its mean square, not divided by it, as by x / rsqrt(q + eps)", TORCH),
    "mean square, divided": power(-2, "divided by its mean square, not by the root of it"),
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
    if name == "root, not divided":
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
