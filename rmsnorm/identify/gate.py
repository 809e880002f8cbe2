"""A gate: the function of it that multiplies x or y."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from rmsnorm import dtypes
from rmsnorm.accuracy.bounds import FORMULA
from rmsnorm.identify.findings import NotRms
from rmsnorm.identify.model import ACTIVATIONS, Gate, Position
from rmsnorm.identify.session import Session
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import TargetError

_NEUTRAL: Final = {"identity": 1.0, "sigmoid": 64.0, "silu": 64.0, "gelu": 32.0, "gelu (tanh)": 32.0, "relu": 1.0,
                   "tanh": 64.0, "softplus": 64.0}  # fmt: skip
_POSITIONS: Final[tuple[Position, ...]] = ("after", "before")
_LEVELS: Final = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0, 32.0, 64.0)
_COMMON: Final = 2.0  # the gate at all other elements


def solve_gate(session: Session, x: Array) -> tuple[Session, Gate | None]:
    """How the gate acts on rows x, and the session in which it multiplies by a power of two.

    Raises:
        NotRms: in no known way.
    """
    if session.takes("gate_vector"):
        return _vector(session, x)
    if not session.takes("gate"):
        session.findings.add("gate", False, "y is the normalised row except for gain and bias, at every element")
        return session, None
    optional = _answers_without(session, x)
    z = _wide_gate(x)
    base, y = (session.rows(x, gate=gate).astype(np.float64) for gate in (_COMMON, z))
    slack = _slack(session)
    if _near(y, base, slack):
        session.findings.add("gate", False, "y does not change with the gate")
        session.findings.defect("the gate is not applied")
        return session.with_neutral(gate=None if optional else 1.0), None
    for gate in (Gate(name, position) for name in ACTIVATIONS for position in _POSITIONS):
        share = gate(x, z) / gate(x, np.asarray(_COMMON))
        before = gate.position == "before"
        with np.errstate(all="ignore"):
            predicted = session.rows(x * share, gate=_COMMON).astype(np.float64) if before else base * share
        if not _near(y, predicted, slack):
            continue
        where = "x, before the statistic" if before else "the normalised row"
        evidence = f"an input: {gate.activation}(gate) multiplies {where}, for -64 to 64"
        session.findings.add("gate", f"{gate.activation}, {gate.position}", evidence)
        return _neutral(session, gate, optional=optional), gate
    raise NotRms(f"the gate acts in no known way: not as {', '.join(ACTIVATIONS)}, for -64 to 64")


def _wide_gate(x: Array) -> Array:
    """Ordinary numbers, and in each row 0 and one of the levels of each sign, at different elements."""
    z = np.random.default_rng(3).uniform(-3, 3, x.shape)
    rows, n = np.arange(len(x)), x.shape[1]
    for sign, shift in ((1, 0), (-1, n // 2)):
        z[rows, (rows + shift) % n] = sign * np.resize(_LEVELS, len(x))
    z[rows, (rows + n // 4) % n] = 0.0
    return z


def _slack(session: Session) -> float:
    return 16 * dtypes.unit_roundoff(session.wide)


def _near(a: Array, b: Array, slack: float) -> bool:
    """Equal but for a share of each element, and the roundings of the largest one of its row."""
    largest = np.max(np.abs(b), axis=-1, keepdims=True, initial=0.0)
    share = max(FORMULA, slack)
    return bool(np.all(np.isfinite(a)) and np.all(np.abs(a - b) <= share * np.abs(b) + slack * largest))


def _neutral(session: Session, gate: Gate, *, optional: bool) -> Session:
    """The session without the gate, or with one that multiplies every element by the same number, a power of two."""
    if optional:
        return session.with_neutral(gate=None)
    neutral, act = _NEUTRAL[gate.activation], ACTIVATIONS[gate.activation]
    size = float(round(float(act(np.asarray(neutral)))))
    lift, factor = (size, 1.0) if gate.position == "before" else (1.0, size)
    return replace(session.with_neutral(gate=neutral), lift=lift, factor=factor)


def _answers_without(session: Session, x: Array) -> bool:
    try:
        return bool(np.all(np.isfinite(session.rows(x, gate=None).astype(np.float64))))
    except TargetError:
        return False


def _vector(session: Session, x: Array) -> tuple[Session, Gate]:
    """A parameter that multiplies x in a sigmoid, which multiplies y: gated_rms_norm of bzhangGo/zero."""
    small, sigmoid = x / 8, Gate("sigmoid", "after", vector=True)
    base = session.rows(small, gate_vector=0.0).astype(np.float64)
    vector = session.parameter("gate_vector", np.random.default_rng(4), -2, 2)
    y = session.rows(small, gate_vector=vector).astype(np.float64)
    if not _near(y, 2 * base * sigmoid(small, session.spread(vector, len(x))), _slack(session)):
        raise NotRms("the gate acts in no known way: not as sigmoid(gate * x) on the normalised row")
    evidence = "a parameter: sigmoid(gate * x) multiplies y"
    session.findings.add("gate", "sigmoid of gate * x, after", evidence)
    return replace(session, factor=0.5), sigmoid
