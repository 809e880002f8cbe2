"""What no single case can show: dependence on the number of rows, every number of 16 bits, more than 2^31 elements."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

import numpy as np

from rmsnorm import dtypes
from rmsnorm.identify.batches import dependences
from rmsnorm.identify.findings import Findings
from rmsnorm.identify.session import open_session
from rmsnorm.identify.statistic import grouped
from rmsnorm.parity.cases import Case, make
from rmsnorm.parity.fitting import matched
from rmsnorm.parity.judge import Expected, Outcome, Verdict, compare, expect, failed
from rmsnorm.parity.run import Skip
from rmsnorm.targets import Target, TargetError
from rmsnorm.variants import Variant

BATCHES: Final = "batches"
LARGE: Final = Case("2^31 elements", (257, 64), ("standard",), "more elements than 31 bits count")
EVERY: Final = Case("every number", (65536, 6), ("standard",), "every bit pattern of 16 bits as an element of a row")
ELEMENTS: Final = 2**31
_SIZES: Final = (1.0, 2.0**-9, 2.0**9)  # of the other elements of the row
_CUBED: Final = 2.0**40  # cubes of numbers up to it are in the range of float32: automatic differentiation takes them
_AT_ONCE: Final = 64  # repetitions of the rows that are compared together
_TIME: Final = 600.0  # seconds


def of_batches(target: Target, skipped: list[Skip], *, gradients: bool) -> list[Verdict]:
    """A verdict on y, dx and dscale: whether their bits depend on the number of rows, or on the call."""
    with target.evaluating():
        session = open_session(target, target.width or 64, time.monotonic() + _TIME, _TIME, Findings())
        session = grouped(session, Findings())
        if not session.layout.unlimited:
            skipped.append(Skip(BATCHES, "", "it takes one number of rows"))
            return []
        found, asked = dependences(session, gradients=gradients)
    if not asked.widths:
        skipped.append(Skip(BATCHES, "", "it takes no other number of rows"))
        return []
    wrong = {entry.quantity: failed(entry.quantity, entry.sentence) for entry in reversed(found)}
    names = ("y", "dx", *(("dscale",) if "scale" in target.arguments else ())) if gradients else ("y",)
    return [wrong.get(name, Verdict(name, 0.0, 0.0, 1.0, 1.0, 0.0, True, "")) for name in names]


def of_every_number(
    target: Target, variant: Variant, dtype: str, skipped: list[Skip], *, gradients: bool, extremes: bool
) -> list[Verdict]:
    """Verdicts on y and dx of rows in which one element is every number of a dtype of 16 bits.

    The other elements are fixed, of three sizes. Without ``extremes`` numbers whose cubes leave float32 are left out.
    """
    if dtypes.unit_roundoff(dtype) < dtypes.unit_roundoff("float16") or target.rank not in (None, 2) or target.sizes:
        skipped.append(Skip(EVERY.name, dtype, "it is for x of 16 bits, two axes and any number of rows"))
        return []
    sized, case = matched(target, replace(EVERY, shape=(2, EVERY.shape[-1])), None)
    numbers = np.arange(2**16, dtype=np.uint16).view(dtype)
    if not extremes:
        with np.errstate(invalid="ignore"):  # of NaN that signals
            numbers = numbers[~(np.abs(numbers.astype(np.float64)) > _CUBED)]
    worst: dict[str, Verdict] = {}
    for size in _SIZES:
        data = make(replace(case, shape=(len(numbers), *case.shape[1:])), variant, dtype)
        row = np.random.default_rng(26).normal(size=case.shape[1:]) * size
        data.x[...] = row.astype(dtype)
        data.x.reshape(len(numbers), -1)[:, 0] = numbers
        expected = expect(data, ("y", "dx") if gradients else ("y",), automatic=True)
        try:
            results = {"y": [sized.forward(data.x, data.scale, data.bias)]}
            if gradients:
                results["dx"] = [np.asarray(sized.gradients(data.x, data.scale, data.bias, data.dy)[0])]
        except TargetError as error:
            return [failed("y", str(error))]
        for verdict in compare(Outcome(results), expected):
            before = worst.setdefault(verdict.quantity, verdict)
            worse = max(before, verdict, key=lambda entry: (not entry.passed, entry.parity_ratio))
            share = min(before.bit_identical, verdict.bit_identical)
            worst[verdict.quantity] = replace(worse, bit_identical=share)
    return list(worst.values())


def of_31_bits(target: Target, variant: Variant, dtype: str, skipped: list[Skip]) -> list[Verdict]:
    """A verdict on y of 2^31 elements and some more: 257 rows, again and again."""
    if target.rank not in (None, 2) or target.sizes:
        skipped.append(Skip(LARGE.name, dtype, "it takes no x of two axes and any size"))
        return []
    sized, case = matched(target, LARGE, None)
    data = make(case, variant, dtype)
    count = ELEMENTS // data.x.size + 1
    try:
        y = sized.forward(np.tile(data.x, (count, *[1] * (data.x.ndim - 1))), data.scale, data.bias)
    except TargetError as error:
        return [failed("y", str(error))]
    want = expect(data, ["y"], automatic=True)["y"]
    worst: Verdict | None = None
    for start in range(0, count, _AT_ONCE):
        part = y[start * len(data.x) : (start + _AT_ONCE) * len(data.x)]
        repeats = (len(part) // len(data.x), *[1] * (data.x.ndim - 1))
        wanted = Expected(np.tile(want.value, repeats), np.tile(want.unit, repeats), want.bound, repeats[0])
        (verdict,) = compare(Outcome({"y": [part]}), {"y": wanted})
        if not verdict.passed:
            return [replace(verdict, detail=f"after {start * len(data.x)} rows, {verdict.detail}")]
        worst = verdict if worst is None else max(worst, verdict, key=lambda entry: entry.parity_ratio)
    assert worst is not None  # noqa: S101  (there is at least one part)
    return [worst]
