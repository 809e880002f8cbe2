"""Held-out data: does the solved model predict the target?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rmsnorm.accuracy.bounds import SAME_BITS, bound
from rmsnorm.accuracy.rounding import cast
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.identify.model import Model, Stages
from rmsnorm.identify.probe import Answer, Probe
from rmsnorm.identify.rounding import Numerics, Pair
from rmsnorm.numpy_impl import rms_norm
from rmsnorm.specification import dtypes
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import TargetError

Answers = Mapping[Pair, Answer]


def ask_held_out(probe: Probe, numerics: Numerics) -> Answers:
    """Answers of the target for rows with random parameters that no step used, in each pair of dtypes that it takes."""
    random = np.random.default_rng(16)
    count = probe.row_count(24)
    sizes = 10.0 ** random.uniform(-3.0, 1.0, (count, 1))  # in float16 arithmetic the square of 1e-3 is 0
    rows = random.normal(0.1, 1.0, (count, probe.n)) * sizes
    values = probe.draw(random)
    if probe.takes("gate"):
        values["gate"] = random.uniform(-3, 3, rows.shape)
    answers: dict[Pair, Answer] = {}
    for pair in numerics.results:
        x = rows if pair[0] != "float16" else rows / sizes * np.clip(sizes, 0.1, 4.0)
        try:
            answers[pair] = probe.answer(x, pair, values)
        except TargetError:  # an optional gate may not go with every pair that it answers without one
            if "gate" not in values:
                raise
    return answers


class Confirmed(NamedTuple):
    """Whether the model predicts y within the bounds in every dtype; its formula, in 32 and 64 bits; the evidence."""

    everywhere: bool
    formula: bool
    evidence: str


def confirm(model: Model, numerics: Numerics, held_out: Answers, *, keeps_float64: bool) -> Confirmed:
    """Compare with the golden, or with the model where a Variant does not say everything."""
    confirmed, comparisons, wide = True, [], []
    free = numerics.rounding == "input_dtype"
    for pair, answer in held_out.items():
        stages = None if free else numerics.stages.get(pair[0])
        narrow = pair[0] == "float64" and not keeps_float64
        wanted = _wanted(model, stages, answer, exact=not narrow)
        ratio, limit, unit = _ratio(model, pair, answer, wanted, narrow=narrow)
        common = narrower(unit, *(pair if free else ()))
        distance = ratio / 2 * dtypes.unit_roundoff(unit) / dtypes.unit_roundoff(common)
        same = float(np.mean(ulps(*(cast(part.astype(np.float64), common) for part in (answer.y, wanted))) == 0))
        within = ratio <= limit and (same >= SAME_BITS or free or unit not in dtypes.HALF or stages is not None)
        confirmed &= within
        if not set(pair) & set(dtypes.HALF):
            wide.append(within)
        types = "/".join(dtypes.short(part) for part in dict.fromkeys(pair))
        comparisons.append(
            f"{types} {distance:.2g} ulp, {100 * same:.4g} % identical{'' if within else ' (beyond the bound)'}"
        )
    what = "the golden" if model.plain else "the model"
    evidence = f"{what} on fresh rows, in ulps of the terms of y: " + "; ".join(comparisons)
    return Confirmed(confirmed, all(wide) if wide else confirmed, evidence)


def narrower(*names: str) -> str:
    """The format of the fewest bits."""
    return max(names, key=dtypes.unit_roundoff)


def _wanted(model: Model, stages: Stages | None, answer: Answer, *, exact: bool) -> Array:
    """By the golden, row by row with its own parameters, where the variant says everything."""
    at, dtype = answer.at, answer.y.dtype.name
    if not (model.plain and stages is None and exact):
        return model.predict(at, stages, dtype)
    flat = [None if p is None else np.ascontiguousarray(p) for p in (at.scale, at.bias)]
    return rms_norm(at.x, *flat, variant=model.variant, axis=-1, feature_axis=(0, 1), out_dtype=dtype)


def _ratio(model: Model, pair: Pair, answer: Answer, wanted: Array, *, narrow: bool) -> tuple[float, float, str]:
    """The largest difference in units of the terms' roundoff, the kit's bound on it, and the dtype of the unit."""
    at, y = answer
    call = model.call(at)
    if narrow:
        call = replace(call, x_dtype="float32", sum_dtype="float32", product_dtype="float32", result_dtype="float32")
    if model.gate is not None:
        position = model.variant.replace(gate_position=model.gate.position)
        call = replace(
            call, variant=position, gate_dtype=dtypes.arithmetic(dtypes.promote(call.x_dtype, call.product_dtype))
        )
    if model.variant.rounding == "input_dtype":
        call = replace(call, x_dtype=narrower(*pair, call.x_dtype), sum_dtype=narrower(*pair, call.sum_dtype))
    dtype = "float32" if narrow else narrower(y.dtype.name, call.norm_dtype or y.dtype.name)
    got, want = y.astype(np.float64), wanted.astype(np.float64)
    with np.errstate(all="ignore"):
        unit = np.maximum(model.terms(at) * dtypes.unit_roundoff(dtype), dtypes.smallest_subnormal(dtype) / 2)
        ratio = np.where((got == want) | (np.isnan(got) & np.isnan(want)), 0.0, np.abs(got - want) / unit)
    return float(np.max(np.nan_to_num(ratio, nan=math.inf))), bound("y", call, dtype).ratio, dtype
