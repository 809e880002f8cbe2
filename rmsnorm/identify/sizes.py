"""Whether the model holds where programs have ends: beyond 1,024 columns or rows, and where 8 does not divide them."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from rmsnorm.accuracy.bounds import FORMULA
from rmsnorm.identify.gradients import gradient_mistakes
from rmsnorm.identify.held_out import ask_held_out, confirm
from rmsnorm.identify.model import Model
from rmsnorm.identify.probe import Probe
from rmsnorm.identify.rounding import Numerics
from rmsnorm.specification import dtypes
from rmsnorm.targets.target import TargetError

_WIDTHS: Final = ((1029,), (1032, 61))  # the second ones where the first is refused
_ROWS: Final = 1029


def solve_sizes(probe: Probe, model: Model, numerics: Numerics, *, gradients: bool) -> None:
    """Compare y and its gradients with the model at other widths, and y of many rows with that of few."""
    if probe.is_short_of_time:
        return
    tried: list[str] = []
    for widths in _WIDTHS:
        for width in widths:
            tried += _at_width(probe, model, numerics, width, gradients=gradients)
        if tried:
            break
    tried += _of_many_rows(probe)
    if tried:
        probe.findings.add("sizes", "the same", f"the model holds for x of {', '.join(tried)}")


def _at_width(probe: Probe, model: Model, numerics: Numerics, width: int, *, gradients: bool) -> list[str]:
    """What was asked, in words; a defect where the model does not hold."""
    resized = None if probe.layout.group else probe.resized(width)
    pair = next((pair for pair in numerics.results if pair[0] == pair[1] and pair[0] not in dtypes.HALF), None)
    if resized is None or pair is None:
        return []
    one = replace(numerics, results={pair: numerics.results[pair]})
    try:
        with resized.target.evaluating():
            answers = ask_held_out(resized, one)
        everywhere, _, _ = confirm(model, one, answers, keeps_float64=probe.wide == "float64")
        if not everywhere:
            probe.findings.defect(f"with {width} elements in a row, y is not what it is with {probe.n}")
        elif gradients and probe.target.differentiable and model.plain and not probe.target.bridge.compiles:
            own = set(probe.findings.defects)
            mistakes = [mistake for mistake in gradient_mistakes(resized, model) if mistake not in own]
            probe.findings.defect(*(f"with {width} elements in a row, {mistake}" for mistake in mistakes))
    except TargetError:
        return []  # it takes no such x, or the time is over: that is no finding of this step
    return [f"{width} columns"]


def _of_many_rows(probe: Probe) -> list[str]:
    if not probe.layout.unlimited:
        return []
    count = max(4, min(_ROWS, 2**22 // probe.n))
    rows = np.random.default_rng(29).normal(size=(count, probe.n))
    try:
        few = probe.rows(rows).astype(np.float64)
        x, arrays = probe.prepare(rows)
        many = probe.layout.to_rows(probe.target.forward(x, **arrays), count).astype(np.float64)
    except TargetError:
        return []
    apart = np.max(np.abs(many - few), axis=-1) > FORMULA * np.max(np.abs(few), axis=-1)
    if np.any(apart):
        first = int(np.argmax(apart))
        probe.findings.defect(
            f"in a call of {count} rows, y of {np.sum(apart)} of them is another one, from row {first} on"
        )
    return [f"{count} rows"]
