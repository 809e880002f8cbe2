"""identify recovers every observable field of random variants, which the golden computes.

The zoo has those that round everything to the dtype of x.

RMSNORM_IDENTIFY_VARIANTS sets how many are drawn (500 in two minutes); 40 are enough to meet every value of every
field with several others.
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
BATCH = 4


def random_variant(seed):
    """A variant with every field drawn, and which parameters the target takes."""
    random = np.random.default_rng(seed)
    position = random.choice(["inside", "outside", "clamp"])
    exponent = random.uniform(-14, -1) if position != "inside" else random.uniform(-12, 0)
    eps = random.choice([None, 0.0, float(f"{10**exponent:.2e}"), 10.0 ** round(exponent)], p=[0.1, 0.05, 0.45, 0.4])
    if position != "inside" and eps is None:
        eps = 1e-8
    partial = None
    if random.random() < 0.4:
        partial = random.choice([Fraction(int(random.integers(5, 96)), 100), Fraction(int(random.integers(1, 16)), 16)])
    variant = Variant(
        name="random",
        eps=eps,
        eps_position=str(position),
        rounding=str(random.choice(["before_scale", "after_scale"])),
        scale_offset=float(random.choice([0.0, 1.0, 0.5])),
        bias=bool(random.random() < 0.3),
        partial=partial,
        partial_rounding=str(random.choice(["ceil", "floor"])),
        result_dtype=str(random.choice(["x", "scale", "promote", "promote_first", "half_scale"])),
    )
    if variant.rounding != "before_scale" and variant.result_dtype == "promote_first":
        variant = variant.replace(result_dtype="promote")  # which is the same
    gain = random.random() < 0.85
    axes = [(-1,), (0,), (-2, -1)][random.choice(3, p=[0.7, 0.15, 0.15])] if partial is None else (-1,)
    if axes == (-2, -1) and not (gain or variant.bias):
        axes = (-1,)  # without parameters nothing tells two axes from the whole of x
    return variant, gain, axes


def target_of(variant, gain, axes):
    """The variant as a target: the golden, by its kernels."""

    def function(arrays):
        x, scale, bias = (arrays.get(argument) for argument in ("x", "scale", "bias"))
        return fast.rms_norm(x, scale, bias, variant=variant, axis=axes)

    def derivatives(arrays, dy):
        parameters = (arrays.get(argument) for argument in ("scale", "bias"))
        gradients = fast.rms_norm_vjp(dy, arrays["x"], *parameters, variant=variant, axis=axes)
        return dict(zip(("x", "scale", "bias"), gradients, strict=True))

    arguments = (*(["scale"] if gain else []), *(["bias"] if variant.bias else []))
    sizes = {(-2, -1): (4, 8)}.get(axes)
    return Target(
        "random", "numpy", WithGradients(derivatives), function, arguments, width=32 if sizes else None,
        shape_of=lambda argument, shape: sizes or tuple(shape[axis] for axis in axes),
    )  # fmt: skip


def expected(variant, gain):
    """The fields that are observable in the function."""
    fields = {"eps": variant.eps, "bias": variant.bias}
    if variant.eps != 0:
        fields["eps_position"] = variant.eps_position
    if variant.partial is not None:
        fields |= {"partial": variant.partial, "partial_rounding": variant.partial_rounding}
    if gain:
        fields |= {"scale_offset": variant.scale_offset, "result_dtype": variant.result_dtype}
    if gain or variant.bias:
        fields["rounding"] = variant.rounding
    return fields


def wrong(seed):
    """The mistakes of identify on a random variant, as sentences."""
    variant, gain, axes = random_variant(seed)
    identity = identify(target_of(variant, gain, axes), width=32, time_limit=60)
    if identity.variant is None:
        return [f"{seed}: {variant}, {axes}: {identity.text}"]
    missed = []
    for name, want in expected(variant, gain).items():
        got = getattr(identity.variant, name)
        if name == "eps" and want:
            if got is None or abs(got / want - 1) > 1e-2:
                missed.append(f"{name} is {want}, got {got}")
        elif name == "partial":
            counts = [variant.counted(n) == identity.variant.counted(n) for n in range(1, 161)]
            if not all(counts):
                missed.append(f"{name} is {want}, got {got} {identity.variant.partial_rounding}")
        elif name != "partial_rounding" and got != want:
            missed.append(f"{name} is {want}, got {got}")
    wanted = {(-1,): "last", (0,): "0 of 2", (-2, -1): "last 2"}[axes]
    if identity["axes"] != wanted:
        missed.append(f"axes are {axes}, got {identity['axes']}")
    if identity["gradients"] != "agree":
        missed.append(f"the gradients are those of the golden, got {identity['gradients']}")
    if identity.defects or not identity["confirmed"] or not identity.recognised:
        missed.append(f"it has no defect, got {identity.defects} {identity['confirmed']}")
    return [f"{seed}: {variant}, gain {gain}, {axes}: {'; '.join(missed)}\n{identity.text}"] if missed else []


@pytest.mark.parametrize("start", range(0, COUNT, BATCH))
def test_every_field_that_can_be_seen_is_recovered(start):
    missed = [text for seed in range(start, min(start + BATCH, COUNT)) for text in wrong(seed)]
    assert not missed, f"{len(missed)} of {BATCH} were not recovered:\n" + "\n".join(missed)
