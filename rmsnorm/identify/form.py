"""The formula in the widest dtype: gain, bias, gate, what is summed, what divides it, and eps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from rmsnorm.accuracy.bounds import FORMULA
from rmsnorm.identify import mistakes
from rmsnorm.identify.asking import Probe
from rmsnorm.identify.candidates import ACTIVATIONS, OF_VARIANTS, Candidate
from rmsnorm.identify.counted import find_counted, with_fraction
from rmsnorm.identify.findings import NotRms
from rmsnorm.identify.fit import Fit, fits, nice, what_else
from rmsnorm.identify.identity import Kind
from rmsnorm.identify.laws import at_other_widths
from rmsnorm.specification import dtypes
from rmsnorm.specification.variants import Variant
from rmsnorm.targets.bridges import Array

KINDS: Final = {
    "rmsnorm": "the denominator is made of the mean of x^2",
    "layernorm": "the mean is subtracted, and the denominator is made of the variance",
    "l2norm": "x is divided by the root of its sum of squares, not of the mean",
}
_SIZES: Final = ((-16.0, 2.0), (-6.0, 0.5), (-1.5, 1.0))  # of rows, as powers of ten
_OF_FLOAT16: Final = ((-4.0, 2.0), (-3.0, 0.5), (-1.5, 1.0))
_FEW: Final = 20  # rows of one call, which say too little alone
_NEARLY: Final = 1e5  # times what arithmetic may err by: beyond it there is no eps
_NONE: Final = Fit(math.inf, "", 0.0, "inside", 0.0, 1.0, centred=False)


class Rows(NamedTuple):
    """Rows of x with y over the gain, and the gate, as matrices of float64."""

    x: Array
    y: Array
    gate: Array | None

    def fits(
        self, k: int, dtype: str, activation: str | None = None, position: str = "after", *, inexact: bool = False
    ) -> list[Fit]:
        """The fits of eps, if this is how the gate acts."""
        if activation is None or self.gate is None:
            return fits(self.x, self.y, k, dtype, inexact=inexact)
        with np.errstate(all="ignore"):
            f = ACTIVATIONS[activation](self.gate)
        return fits(self.x * f, self.y, k, dtype) if position == "before" else fits(self.x, self.y, k, dtype, f)


def solve_form(probe: Probe) -> tuple[Probe, Candidate]:
    """The candidate that predicts y of rows of every size, and the probe in the dtype in which it does.

    Raises:
        NotRms: there is none: the message says what was seen.
    """
    known = _with_parameters(probe)
    answers = _answers(probe, known)
    try:
        k = find_counted(probe)
    except NotRms:
        if answers.gate is None and not answers.fits(probe.n, probe.wide):
            _refuse(probe, known, answers, _NONE)
        raise
    reading = _first(answers, k, probe.wide)
    if not reading.fit.holds and probe.wide == "float64" and "float32" in probe.accepts:
        probe = replace(probe, wide="float32")  # its float64 goes through float32 somewhere
        answers = _answers(probe, known)
        reading = _first(answers, k, probe.wide)
    if not reading.fit.holds and answers.gate is None and probe.wide not in dtypes.HALF:
        fit = answers.fits(k, probe.wide, inexact=True)[:1]  # a mistake says later how 1 / rho is rounded
        reading = _Reading(fit[0], None, "after", inexact=True) if fit else reading
    if not reading.fit.holds:
        _refuse(probe, known, answers, reading.fit)
    return probe, _written(probe, known, k, reading)


def _with_parameters(probe: Probe) -> Candidate:
    """What gain and bias do, from numbers that all their elements have."""
    findings = probe.findings
    if "factor" in probe.target.arguments:
        name = probe.target.names.get("factor", "factor")
        findings.defect(f"it has a parameter of one number beside the gain, {name}, which no RMSNorm has")
    known, within = Candidate(Variant(name="identified", eps=0.0)), 1e-3 if probe.wide in dtypes.HALF else 1e-5

    def y(**values: float) -> Array:
        arrays = probe.random(5, probe.wide, sizes=(0.0, 1.5), fixed={"gate_vector": 0.0, **values})
        return probe.y(arrays).astype(np.float64)

    if "scale" in probe.passes:
        none = {name: 0.0 for name in ("bias",) if name in probe.passes}
        zero, one, two = (y(scale=value, **none) for value in (0.0, 1.0, 2.0))
        size, step = np.max(np.abs(one)), one - zero
        drawn = probe.random(5, probe.wide, sizes=(0.0, 1.5), fixed={"gate_vector": 0.0, **none})
        apart = np.max(np.abs(probe.y(drawn).astype(np.float64) - one))
        is_constant = np.max(np.abs(two - one)) <= FORMULA * size
        if is_constant and apart > 0.02 * size:
            offset = 1.0 if np.max(np.abs(step)) <= FORMULA * size else 0.0
            findings.add("gain", True, "it multiplies x before the statistic is taken")
            findings.add("scale_offset", offset, "y is the same for every constant gain")
            known = known.but(mistakes.GAIN_FIRST).of(scale_offset=offset)
        elif is_constant:
            findings.add("gain", False, "y does not change with the gain")
            with probe.target.in_mode(True):
                trained = [y(scale=value, **none) for value in (0.5, 1.0)]
            kept = np.max(np.abs(trained[1] - trained[0])) > 1e-6 * size
            known = known.but(mistakes.GAIN_KEPT if kept else mistakes.GAIN_DROPPED)
        else:
            if not np.max(np.abs(two - one - step)) <= 0.02 * size:
                raise NotRms("y is not linear in the gain")
            offset = nice(float((zero * step).sum() / (step * step).sum()), within)
            if np.max(np.abs(zero - offset * step)) > 0.02 * size:
                words = "a part that the gain does not multiply, and that is no multiple of the normalised row"
                raise NotRms(f"y has {words}")
            findings.add("gain", True, "y is linear in it")
            findings.add("scale_offset", offset, f"with a gain of 0, y is {offset:.4g} times the normalised row")
            known = known.of(scale_offset=offset)
    else:
        findings.add("gain", False, "it takes none")
    if "bias" in probe.passes:
        zero, one = (y(bias=value) for value in (0.0, 1.0))
        added = one - zero
        changes = bool(np.max(np.abs(added)) > 1e-6 * np.max(np.abs(one)))
        findings.add("bias", changes, "y changes with it" if changes else "y does not change with it")
        gated = "gate" in probe.passes or "gate_vector" in probe.passes
        if changes and not gated and np.max(np.abs(added - 1)) > 0.02 * np.max(np.abs(one)):
            raise NotRms(f"{probe.target.names.get('bias', 'the bias')} is not added to y")
        known = known.of(bias=changes) if changes else known.but(mistakes.BIAS_DROPPED)
    else:
        findings.add("bias", False, "it takes none")
    return known


def _answers(probe: Probe, known: Candidate, sizes: Sequence[tuple[float, float]] = (), dtype: str = "") -> Rows:
    """Rows of every size with a gain that multiplies by a number, without a bias, and with gates from -64 to 64."""
    dtype, offset = dtype or probe.wide, known.variant.scale_offset
    first = mistakes.GAIN_FIRST in known.mistakes
    gain = 1.0 - offset if first else 1.0 if abs(offset + 1) > 0.25 else 2.0
    neutral = {"scale": gain, "bias": 0.0, "gate_vector": 1.0}
    multiplied = probe.findings["scale_offset"] is not None and not first
    repeats = 1 if probe.count(np.empty(probe.shape())) > _FEW else 12  # x that is one example has few rows
    parts = []
    for seed in range(6, 6 + repeats):
        for span in sizes or (_OF_FLOAT16 if dtype == "float16" else _SIZES):
            arrays, y = probe.answer(seed, dtype, sizes=span, far=True, fixed=neutral)
            gate = arrays.get("gate", arrays["x"])
            parts.append([probe.matrix(array) for array in (arrays["x"], y, gate)])
    x, y, gate = (np.concatenate(part) for part in zip(*parts, strict=True))
    y = y / (offset + gain) if multiplied else y
    return Rows(x, y, gate if {"gate", "gate_vector"} & {*probe.passes} else None)


class _Reading(NamedTuple):
    fit: Fit
    activation: str | None
    position: str
    inexact: bool = False


def _first(rows: Rows, k: int, dtype: str) -> _Reading:
    """The first fit that holds, with the gate that it holds for; else the nearest one."""
    gates: list[tuple[str | None, str]] = [(None, "after")]
    if rows.gate is not None:
        gates = [(name, position) for position in ("after", "before") for name in ACTIVATIONS] + gates
    best = _Reading(_NONE, None, "after")
    for activation, position in gates:
        for fit in rows.fits(k, dtype, activation, position)[:1]:
            if fit.error < best.fit.error:
                best = _Reading(fit, activation, position)
        if best.fit.holds:
            break
    return best


def _refuse(probe: Probe, known: Candidate, rows: Rows, nearest: Fit) -> None:
    """Raises NotRms with what was seen."""
    if rows.gate is not None:
        raise NotRms(f"the gate acts in no known way: not as {', '.join(ACTIVATIONS)}, for -64 to 64")
    ordinary = _answers(probe, known, [(0.5, 2.0)])
    words = what_else(ordinary.x, ordinary.y, probe.wide)
    if words.endswith("sum of squares and sum") and nearest.error < _NEARLY:
        words = f"x / rho depends on the size of x, but not as eps makes it: the nearest eps is {nearest.eps:.3g}"
    raise NotRms(words)


def _written(probe: Probe, known: Candidate, k: int, reading: _Reading) -> Candidate:
    """The candidate as somebody would have written it, so that it holds at every width."""
    findings, (fit, activation, position, _) = probe.findings, reading
    findings.add("numerator", "x - mean" if fit.centred else "x", "y is proportional to it in every row")
    if fit.statistic == "variance" and not fit.centred:
        raise NotRms("x is divided by the root of its variance, not of its mean square")
    if fit.centred:
        known = known.but(mistakes.CENTRED)
    gate = {}
    if activation is not None:
        vector = "gate_vector" in probe.passes
        name = f"{activation} of gate * x" if vector else activation
        findings.add("gate", f"{name}, {position}", f"{'a parameter' if vector else 'an input'}, for -64 to 64")
        gate = {"gate_position": position} | ({"gate_function": activation} if activation in OF_VARIANTS else {})
        known = replace(known, activation=activation, vector=vector)
    elif "gate" in probe.passes:
        findings.add("gate", False, "y does not change with the gate")
        findings.defect("the gate is not applied")
    known = known.of(**gate)
    findings.defect(*(mistake.says for mistake in known.mistakes if mistake != mistakes.CENTRED))
    known = at_other_widths(probe, with_fraction(probe, known, k), k, fit, inexact=reading.inexact)
    if fit.position == "inside" and known.variant.eps in (dtypes.epsilon("float32"), dtypes.epsilon("float64")):
        known = _machine_epsilon(probe, known, k)
    kind = kind_of(known)
    findings.add("kind", kind, KINDS[kind])
    return known


def kind_of(known: Candidate) -> Kind:
    """The kind of norm that a candidate is."""
    if mistakes.CENTRED in known.mistakes:
        return "layernorm"
    return "l2norm" if mistakes.OF_SUM in known.mistakes else "rmsnorm"


def _machine_epsilon(probe: Probe, known: Candidate, k: int) -> Candidate:
    """eps is that of the arithmetic, unless another dtype has the same number."""
    other = "float32" if probe.wide == "float64" else "float64"
    machine = dtypes.epsilon(probe.wide)
    if known.variant.eps != (machine if probe.wide == "float64" else dtypes.epsilon("float32")):
        return known
    if other in probe.accepts:
        rows = _answers(probe, known, [(-9.0, 2.0)], other)
        holding = [fit for fit in rows.fits(k, "float32", known.activation, known.variant.gate_position) if fit.holds]
        if not holding or holding[0].eps not in (dtypes.epsilon(other), 0.0):
            return known
    evidence = f"{machine:.4g} in {probe.wide}, and that of the other dtypes in these"
    probe.findings.add("eps", "machine epsilon", evidence)
    return known.of(eps=None)
