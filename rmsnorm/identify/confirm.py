"""Fresh data: does what was solved predict the target, and how far is it from each preset?"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from rmsnorm import dtypes
from rmsnorm.accuracy.bounds import bound
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.identify.findings import Notebook
from rmsnorm.identify.identity import FIELDS
from rmsnorm.identify.model import Model, Stages, cast, rounded
from rmsnorm.identify.rounding import SHARE, Numerics
from rmsnorm.identify.session import Session
from rmsnorm.numpy_impl import rms_norm
from rmsnorm.targets.bridges import Array
from rmsnorm.variants import PRESETS, Variant


class Fresh:
    """Answers of the target for fresh rows with random parameters, in each pair of dtypes that it takes."""

    def __init__(self, session: Session, numerics: Numerics, seed: int) -> None:
        random = np.random.default_rng(seed)
        count = session.few(24)
        sizes = 10.0 ** random.uniform(-3.0, 1.0, (count, 1))  # in float16 arithmetic the square of 1e-3 is 0
        rows = random.normal(0.1, 1.0, (count, session.n)) * sizes
        values: dict[str, Any] = {}
        if session.has("scale"):
            values["scale"] = session.parameter("scale", random, -1.5, 1.5)
        if session.has("bias"):
            values["bias"] = session.parameter("bias", random, -1, 1)
        if session.has("gate_vector"):
            values["gate_vector"] = session.parameter("gate_vector", random, -2, 2)
        gate = random.uniform(-3, 3, rows.shape) if session.has("gate") else None
        self.answers: dict[tuple[str, str], tuple[Array, Array | None, Array | None, Array | None, Array]] = {}
        for pair in numerics.results:
            x = rounded(rows if pair[0] != "float16" else rows / sizes * np.clip(sizes, 0.1, 4.0), pair[0])
            if gate is not None:
                values["gate"] = rounded(gate, pair[0])
            y = session.rows(x, *pair, **values)
            scale, bias, vector = (
                session.spread(values[role].astype(pair[1]), count) if role in values else None
                for role in ("scale", "bias", "gate_vector")
            )
            z = vector if gate is None else rounded(gate, pair[0])
            self.answers[pair] = (x.astype(pair[0]), scale, bias, z, y)


def confirm(session: Session, model: Model, numerics: Numerics, fresh: Fresh, notes: Notebook) -> bool:
    """Compare with the golden, or where no Variant says it all with the model; True within the kit's bounds."""
    held, told = True, []
    free = numerics.rounding == "input_dtype"
    for pair, (x, scale, bias, z, y) in fresh.answers.items():
        stages = None if free else numerics.stages.get(pair[0])
        narrow = pair[0] == "float64" and notes["float64"] != "kept"
        wanted = _wanted(model, stages, x, scale, bias, z, y.dtype.name, exact=not narrow)
        ratio, limit, unit = _ratio(model, pair, x, scale, bias, z, y, wanted, narrow=narrow)
        common = narrower(unit, *(pair if free else ()))
        distance = ratio / 2 * dtypes.unit_roundoff(unit) / dtypes.unit_roundoff(common)
        same = float(np.mean(ulps(*(cast(part.astype(np.float64), common) for part in (y, wanted))) == 0))
        holds = ratio <= limit and (same >= SHARE or free or unit not in dtypes.HALF or stages is not None)
        held &= holds
        name = "/".join(dtypes.short(part) for part in dict.fromkeys(pair))
        told.append(f"{name} {distance:.2g} ulp, {100 * same:.4g} % identical{'' if holds else ' (beyond the bound)'}")
    what = "the golden" if model.plain else "the model"
    notes.found("confirmed", held, f"{what} on fresh rows, in ulps of the terms of y: " + "; ".join(told))
    return held


def narrower(*names: str) -> str:
    """The format of the fewest bits."""
    return max(names, key=dtypes.unit_roundoff)


def _wanted(
    model: Model,
    stages: Stages | None,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    z: Array | None,
    result: str,
    *,
    exact: bool,
) -> Array:
    """By the golden, row by row with its own parameters, where the variant says it all."""
    if not (model.plain and stages is None and exact):
        return model.predict(x, scale, bias, z, stages=stages, result=result)
    flat = [None if p is None else np.ascontiguousarray(p) for p in (scale, bias)]
    return rms_norm(x, *flat, variant=model.variant, axis=-1, feature_axis=(0, 1), out_dtype=result)


def _ratio(
    model: Model,
    pair: tuple[str, str],
    x: Array,
    scale: Array | None,
    bias: Array | None,
    z: Array | None,
    y: Array,
    wanted: Array,
    *,
    narrow: bool,
) -> tuple[float, float, str]:
    """Largest difference in units of the terms' roundoff, what the kit allows, and of which dtype they are."""
    call = model.call(x, scale, bias)
    if narrow:
        call = replace(call, x="float32", product="float32", result="float32")
    if model.variant.rounding == "input_dtype":
        call = replace(call, x=narrower(*pair))
    dtype = "float32" if narrow else narrower(y.dtype.name, call.norm or y.dtype.name)
    got, want = y.astype(np.float64), wanted.astype(np.float64)
    with np.errstate(all="ignore"):
        terms = model.terms(x, scale, bias, z)
    unit = np.maximum(terms * dtypes.unit_roundoff(dtype), dtypes.smallest_subnormal(dtype) / 2)
    with np.errstate(all="ignore"):
        ratio = np.where((got == want) | (np.isnan(got) & np.isnan(want)), 0.0, np.abs(got - want) / unit)
    limit = bound("y", call, dtype).ratio
    return float(np.max(np.nan_to_num(ratio, nan=math.inf))), limit + (4 if model.gate else 0), dtype


def nearest(fresh: Fresh, variant: Variant, bias: bool) -> tuple[tuple[str, float], ...]:
    """Every preset by the largest difference of y from it, as a share of the largest |y| of the row."""
    found = []
    for place, preset in enumerate(PRESETS.values()):
        model, distance = Model(preset), 0.0
        for pair, (x, scale, shift, _, y) in fresh.answers.items():
            if pair not in (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")):
                continue
            want = model.predict(x, scale, shift if bias else None).astype(np.float64)
            size = np.max(np.abs(want), axis=-1, keepdims=True)
            with np.errstate(all="ignore"):
                part = np.max(np.abs(y.astype(np.float64) - want) / np.where(size > 0, size, 1.0))
            distance = max(distance, float(part) if np.isfinite(part) else math.inf)
        others = sum(getattr(preset, name) != getattr(variant, name) for name in FIELDS)
        found.append((float(f"{distance:.1e}"), others, place, preset.name))
    return tuple((name, distance) for distance, _, _, name in sorted(found))
