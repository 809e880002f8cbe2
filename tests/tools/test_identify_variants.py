"""identify recovers every observable field of random variants, which the golden computes.

The zoo has those that round everything to the dtype of x. RMSNORM_IDENTIFY_VARIANTS sets how many are drawn (500 in two
minutes); 40 are enough to meet every value of every field with several others.
"""

from __future__ import annotations

import os
from fractions import Fraction

import numpy as np
import pytest
from zoo import WithGradients

from rmsnorm import Variant
from rmsnorm.identify import Target, identify
from rmsnorm.numpy_impl import fast

COUNT = int(os.environ.get("RMSNORM_IDENTIFY_VARIANTS", "40"))
AXES = {(-1,): "last", (0,): "0 of 2", (-2, -1): "last 2"}  # as identify says them


def random_variant(seed):
    """A variant with every field drawn, whether the target takes a gain, and the normalised axes."""
    random = np.random.default_rng(seed)
    position = str(random.choice(["inside", "outside", "clamp"]))
    exponent = random.uniform(-14, -1) if position != "inside" else random.uniform(-12, 0)
    eps = random.choice([None, 0.0, float(f"{10**exponent:.2e}"), 10.0 ** round(exponent)], p=[0.1, 0.05, 0.45, 0.4])
    partial = None
    if random.random() < 0.4:
        partial = random.choice([Fraction(int(random.integers(5, 96)), 100), Fraction(int(random.integers(1, 16)), 16)])
    fields = {
        "eps": 1e-8 if eps is None and position != "inside" else eps,
        "eps_position": position,
        "rounding": str(random.choice(["before_scale", "after_scale"])),
        "scale_offset": float(random.choice([0.0, 1.0, 0.5])),
        "bias": bool(random.random() < 0.3),
        "partial": partial,
        "partial_rounding": str(random.choice(["ceil", "floor"])),
        "result_dtype": str(random.choice(["x", "scale", "promote", "promote_first", "half_scale"])),
    }
    if fields["rounding"] == "after_scale" and fields["result_dtype"] == "promote_first":
        fields["result_dtype"] = "promote"  # which is the same
    gain = random.random() < 0.85
    axes = [*AXES][random.choice(3, p=[0.7, 0.15, 0.15])] if partial is None else (-1,)
    if axes == (-2, -1) and not (gain or fields["bias"]):
        axes = (-1,)  # without parameters nothing tells two axes from the whole of x
    return Variant(name="random", **fields), gain, axes


def target_of(variant, gain, axes):
    """The variant as a target: the golden, by its kernels."""
    arguments = (*(["scale"] if gain else []), *(["bias"] if variant.bias else []))
    sizes = (4, 8) if axes == (-2, -1) else None

    def function(arrays):
        x, scale, bias = (arrays.get(argument) for argument in ("x", "scale", "bias"))
        return fast.rms_norm(x, scale, bias, variant=variant, axis=axes)

    def derivatives(arrays, dy):
        parameters = (arrays.get(argument) for argument in ("scale", "bias"))
        gradients = fast.rms_norm_vjp(dy, arrays["x"], *parameters, variant=variant, axis=axes)
        return dict(zip(("x", "scale", "bias"), gradients, strict=True))

    return Target(
        "random", "numpy", WithGradients(derivatives), function, arguments, width=32 if sizes else None,
        shape_of=lambda argument, shape: sizes or tuple(shape[axis] for axis in axes),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(COUNT))
def test_every_field_that_can_be_seen_is_recovered(seed):
    variant, gain, axes = random_variant(seed)
    identity = identify(target_of(variant, gain, axes), width=32, time_limit=60)
    assert (identity.recognised, identity["confirmed"], identity.defects) == (True, True, ()), identity.text
    assert (identity["axes"], identity["gradients"]) == (AXES[axes], "agree"), identity.text
    seen = {"bias"} | ({"eps_position"} if variant.eps != 0 else set())
    seen |= {"scale_offset", "result_dtype"} if gain else set()
    seen |= {"rounding"} if gain or variant.bias else set()
    assert {name: getattr(identity.variant, name) for name in seen} == {name: getattr(variant, name) for name in seen}
    assert identity.variant.eps == (pytest.approx(variant.eps, rel=1e-2) if variant.eps else variant.eps)
    if variant.partial is not None:
        assert all(variant.counted(n) == identity.variant.counted(n) for n in range(1, 161)), identity.text
