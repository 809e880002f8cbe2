"""A gate: the function of it that multiplies x or y."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from rmsnorm.accuracy.bounds import FORMULA
from rmsnorm.identify.findings import NotRms
from rmsnorm.identify.model import ACTIVATIONS, Gate, Position
from rmsnorm.identify.probe import Probe
from rmsnorm.specification import dtypes
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import TargetError

_NEUTRAL: Final = {"identity": 1.0, "sigmoid": 64.0, "silu": 64.0, "gelu": 32.0, "gelu (tanh)": 32.0, "relu": 1.0,
                   "tanh": 64.0, "softplus": 64.0}  # fmt: skip
_POSITIONS: Final[tuple[Position, ...]] = ("after", "before")
_LEVELS: Final = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0, 32.0, 64.0)
_COMMON: Final = 2.0  # the gate at all other elements


def solve_gate(probe: Probe, x: Array) -> tuple[Probe, Gate | None]:
    """How the gate acts on rows x, and the probe in which it multiplies by a power of two.

    Raises:
        NotRms: in no known way.
    """
    if probe.takes("gate_vector"):
        return _vector(probe, x)
    if not probe.takes("gate"):
        probe.findings.add("gate", False, "y is the normalised row except for gain and bias, at every element")
        return probe, None
    try:
        optional = bool(np.all(np.isfinite(probe.rows(x, gate=None).astype(np.float64))))
    except TargetError:  # it must have one
        optional = False
    z = _wide_gate(x)
    base, y = (probe.rows(x, gate=gate).astype(np.float64) for gate in (_COMMON, z))
    slack = _slack(probe)
    if _near(y, base, slack):
        probe.findings.add("gate", False, "y does not change with the gate")
        probe.findings.defect("the gate is not applied")
        return probe.with_neutral(gate=None if optional else 1.0), None
    for gate in (Gate(name, position) for name in ACTIVATIONS for position in _POSITIONS):
        share = gate(x, z) / gate(x, np.asarray(_COMMON))
        before = gate.position == "before"
        with np.errstate(all="ignore"):
            predicted = probe.rows(x * share, gate=_COMMON).astype(np.float64) if before else base * share
        if not _near(y, predicted, slack):
            continue
        where = "x, before the statistic" if before else "the normalised row"
        evidence = f"an input: {gate.activation}(gate) multiplies {where}, for -64 to 64"
        probe.findings.add("gate", f"{gate.function}, {gate.position}", evidence)
        return _neutral(probe, gate, optional=optional), gate
    raise NotRms(f"the gate acts in no known way: not as {', '.join(ACTIVATIONS)}, for -64 to 64")


def _wide_gate(x: Array) -> Array:
    """Ordinary numbers, and in each row 0 and one of the levels of each sign, at different elements."""
    z = np.random.default_rng(3).uniform(-3, 3, x.shape)
    rows, n = np.arange(len(x)), x.shape[1]
    for sign, shift in ((1, 0), (-1, n // 2)):
        z[rows, (rows + shift) % n] = sign * np.resize(_LEVELS, len(x))
    z[rows, (rows + n // 4) % n] = 0.0
    return z


def _slack(probe: Probe) -> float:
    return 16 * dtypes.unit_roundoff(probe.wide)


def _near(a: Array, b: Array, slack: float) -> bool:
    """Equal but for a share of each element, and the roundings of the largest one of its row."""
    largest = np.max(np.abs(b), axis=-1, keepdims=True, initial=0.0)
    share = max(FORMULA, slack)
    return bool(np.all(np.isfinite(a)) and np.all(np.abs(a - b) <= share * np.abs(b) + slack * largest))


def _neutral(probe: Probe, gate: Gate, *, optional: bool) -> Probe:
    """The probe without the gate, or with one that multiplies every element by the same number, a power of two."""
    if optional:
        return probe.with_neutral(gate=None)
    neutral, act = _NEUTRAL[gate.activation], ACTIVATIONS[gate.activation]
    size = float(round(float(act(np.asarray(neutral)))))
    gate_scale, factor = (size, 1.0) if gate.position == "before" else (1.0, size)
    return replace(probe.with_neutral(gate=neutral), gate_scale=gate_scale, factor=factor)


def _vector(probe: Probe, x: Array) -> tuple[Probe, Gate]:
    """A parameter that multiplies x in a sigmoid, which multiplies y: gated_rms_norm of bzhangGo/zero."""
    small, sigmoid = x / 8, Gate("sigmoid", "after", vector=True)
    base = probe.rows(small, gate_vector=0.0).astype(np.float64)
    vector = probe.parameter("gate_vector", np.random.default_rng(4), -2, 2)
    y = probe.rows(small, gate_vector=vector).astype(np.float64)
    if not _near(y, 2 * base * sigmoid(small, probe.spread(vector, len(x))), _slack(probe)):
        raise NotRms("the gate acts in no known way: not as sigmoid(gate * x) on the normalised row")
    evidence = "a parameter: sigmoid(gate * x) multiplies y"
    probe.findings.add("gate", f"{sigmoid.function}, {sigmoid.position}", evidence)
    return replace(probe, factor=0.5), sigmoid
