"""A gate: the function of it that multiplies x or y, and where that function is cut off."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np

from rmsnorm import dtypes
from rmsnorm.accuracy.bounds import FORMULA
from rmsnorm.identify.findings import Learned, NotRms
from rmsnorm.identify.model import ACTIVATIONS, Activation, Gate, Position
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
        session.findings.gate = Learned(False, "y is the normalised row except for gain and bias, at every element")
        return session, None
    optional = _answers_without(session, x)
    z = _wide_gate(x)
    base, y = (session.rows(x, gate=gate).astype(np.float64) for gate in (_COMMON, z))
    slack = _slack(session)
    if _near(y, base, slack):
        session.findings.gate = Learned(False, "y does not change with the gate")
        session.findings.defect("the gate is not applied")
        return session.with_neutral(gate=None if optional else 1.0), None
    for gate in (*(Gate(name, position) for name in ACTIVATIONS for position in _POSITIONS), *_cut_off(session, x)):
        share = gate(x, z) / gate(x, np.asarray(_COMMON))
        before = gate.position == "before"
        with np.errstate(all="ignore"):
            predicted = session.rows(x * share, gate=_COMMON).astype(np.float64) if before else base * share
        if not _near(y, predicted, slack):
            continue
        where = "x, before the statistic" if before else "the normalised row"
        evidence = f"an input: {gate.activation}(gate) multiplies {where}, for -64 to 64"
        session.findings.gate = Learned(f"{gate.activation}, {gate.position}", evidence)
        for words, limit in (("above", gate.high), ("below", gate.low)):
            if math.isfinite(limit):
                session.findings.defect(f"a gate {words} {limit:.4g} is cut off there")
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


def _cut_off(session: Session, x: Array) -> list[Gate]:
    """Functions that the factor follows near 0, and that it does not follow beyond a limit, where it stays as it is.

    The factor of one element is y of it over y of another one of its row, in rows without a mean.
    """
    levels = np.array(sorted([*_LEVELS, *(-level for level in _LEVELS)]))
    rows = np.resize(x - x.mean(-1, keepdims=True), (len(levels), x.shape[1]))
    if rows.shape[1] < 2:
        return []
    z = np.full(rows.shape, _COMMON)
    z[:, 0] = levels
    with np.errstate(all="ignore"):
        y = session.rows(rows, gate=z).astype(np.float64)
        factor = y[:, 0] / y[:, 1] * rows[:, 1] / rows[:, 0]
    gates = []
    for name, act in ACTIVATIONS.items():
        got = factor * act(np.asarray(_COMMON))
        slack = _slack(session) * np.max(np.abs(act(levels)))
        follows = np.abs(got - act(levels)) <= max(FORMULA, _slack(session)) * np.abs(act(levels)) + slack
        inside = np.flatnonzero(follows)
        around = len(inside) >= 3 and levels[inside[0]] < 0 < levels[inside[-1]]
        if np.isfinite(got).all() and around and len(inside) == inside[-1] - inside[0] + 1 < len(levels):
            limits = [_limit(act, levels, got, inside, sign) for sign in (-1, 1)]
            if not any(limit is None for limit in limits):
                low, high = (float(limit) for limit in limits if limit is not None)
                gates += [Gate(name, position, low=low, high=high) for position in _POSITIONS]
    return sorted(gates, key=lambda gate: math.isfinite(gate.low) + math.isfinite(gate.high))


def _limit(act: Activation, levels: Array, got: Array, inside: Array, sign: int) -> float | None:
    """The gate beyond which the factor stays as it is, on one side; infinite for none, None where it does not stay."""
    outside = levels[: inside[0]] if sign < 0 else levels[inside[-1] + 1 :]
    values = got[: inside[0]] if sign < 0 else got[inside[-1] + 1 :]
    if not len(outside):
        return sign * math.inf
    if np.ptp(values) > FORMULA * max(np.max(np.abs(values)), FORMULA):
        return None
    near, far = (levels[inside[0]], outside[-1]) if sign < 0 else (levels[inside[-1]], outside[0])
    limit = _inverse(act, float(np.median(values)), float(near), float(far))
    return next(number for digits in range(9) if abs((number := round(limit, digits)) - limit) <= 2e-6 * abs(limit + 1))


def _inverse(act: Activation, value: float, near: float, far: float) -> float:
    """z between two numbers with act(z) nearest to a value, by halving; act is monotone there."""
    rises = float(act(np.asarray(far))) > float(act(np.asarray(near)))
    for _ in range(60):
        middle = (near + far) / 2
        if (float(act(np.asarray(middle))) > value) == rises:
            far = middle
        else:
            near = middle
    return near


def _neutral(session: Session, gate: Gate, *, optional: bool) -> Session:
    """The session without the gate, or with one that multiplies every element by the same number, a power of two.

    Below a limit there may be none; then the gate is a number that every format has.
    """
    if optional:
        return session.with_neutral(gate=None)
    neutral, act = _NEUTRAL[gate.activation], ACTIVATIONS[gate.activation]
    size = float(round(float(act(np.asarray(neutral)))))
    if neutral > gate.high:
        neutral = 0.0 if gate.activation == "sigmoid" else 2.0 ** math.floor(math.log2(min(gate.high, _COMMON)))
        size = float(act(np.asarray(neutral)))
    lift, factor = (size, 1.0) if gate.position == "before" else (1.0, size)
    return replace(session.with_neutral(gate=neutral), lift=lift, factor=factor)


def _answers_without(session: Session, x: Array) -> bool:
    try:
        return bool(np.all(np.isfinite(session.rows(x, gate=None).astype(np.float64))))
    except TargetError:
        return False


def _vector(session: Session, x: Array) -> tuple[Session, Gate]:
    small = x / 8
    base = session.rows(small, gate_vector=0.0).astype(np.float64)
    vector = session.parameter("gate_vector", np.random.default_rng(4), -2, 2)
    y = session.rows(small, gate_vector=vector).astype(np.float64)
    argument = session.spread(vector, len(x)) * small
    for name, act in ACTIVATIONS.items():
        start = float(act(np.zeros(())))
        if start and _near(y, base * act(argument) / start, _slack(session)):
            session.findings.gate = Learned(f"{name} of gate * x, after", f"a parameter: {name}(gate * x) multiplies y")
            return replace(session, factor=start), Gate(name, "after", vector=True)
    raise NotRms("the gate acts in no known way")
