"""Fields that another argument shows: where a residual is rounded, and how a gate acts that may be left out."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Final

import numpy as np

from rmsnorm.accuracy.bounds import SAME_BITS_OF_SUM
from rmsnorm.identify.asking import Answer, Probe
from rmsnorm.identify.candidates import ACTIVATIONS, OF_VARIANTS, Candidate
from rmsnorm.specification import dtypes
from rmsnorm.targets.target import TargetError

_ROUNDED: Final = {
    "before": "the statistic is of the sum after it is rounded",
    "after": "the statistic is of the sum before it is rounded",
}


def solve_beside(probe: Probe, candidate: Candidate) -> tuple[Candidate, Candidate | None]:
    """The candidate with what it does with a residual and with a gate, and that of a gate that may be left out."""
    takes, gated = probe.target.arguments, None
    if "residual" in takes and candidate.is_plain and not probe.layout.group:
        with contextlib.suppress(TargetError):
            candidate = _residual(probe, candidate)
    if "gate" in takes and "gate" not in probe.passes and not probe.findings.defects:
        gated = _optional_gate(replace(probe, passes=(*probe.passes, "gate")), candidate)
    if gated is not None:
        candidate = candidate.of(gate_function=gated.variant.gate_function, gate_position=gated.variant.gate_position)
    return candidate, gated


def _residual(probe: Probe, candidate: Candidate) -> Candidate:
    """Where x + residual is rounded, which 16 bits show. What else becomes of it, the judge says."""
    dtype = next((name for name in dtypes.HALF if name in probe.accepts), None)
    if dtype is None:
        return candidate
    arrays = probe.random(18, dtype, sizes=(-0.3, 0.3))
    arrays["residual"] = np.random.default_rng(20).normal(size=arrays["x"].shape).astype(dtype)
    answer = Answer(arrays, probe.y(arrays))
    shares = {order: candidate.of(residual_rounding=order).score(probe, answer, exact=False) for order in _ROUNDED}
    order = max(shares, key=lambda order: shares[order])
    if not min(shares.values()) < SAME_BITS_OF_SUM <= shares[order]:
        return candidate
    evidence = f"{100 * shares[order]:.4g} % of y are within its bounds in {dtypes.short(dtype)}"
    probe.findings.add("residual_rounding", order, f"{_ROUNDED[order]}: {evidence}")
    return candidate.of(residual_rounding=order)


def _optional_gate(probe: Probe, candidate: Candidate) -> Candidate | None:
    """What it does with a gate, which all else was asked without; None where that is not known."""
    findings = probe.findings
    try:
        answers = [probe.answer(11, probe.wide, sizes=(-0.3, 0.3), far=True)]
    except TargetError as error:
        findings.defect(f"with a gate: {error}")
        return None
    gates = [
        replace(candidate, activation=name).of(
            gate_position=position, **({"gate_function": name} if name in OF_VARIANTS else {})
        )
        for position in ("after", "before") for name in ACTIVATIONS
    ]  # fmt: skip
    gated = next((each for each in gates if each.holds(probe, answers, exact=False)), None)
    if gated is not None:
        findings.add("gate", f"{gated.activation}, {gated.variant.gate_position}", "an input that may be left out")
        return gated
    ignored = candidate.holds(probe, answers, exact=False)
    findings.add("gate", False, "y does not change with it" if ignored else "it acts in no known way")
    findings.defect("the gate is not applied" if ignored else "with a gate, y is not what a known function of it gives")
    return None
