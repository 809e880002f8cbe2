"""What multiplies and what is added: gain, offset, bias, gate, and whether the mean leaves the numerator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from rmsnorm.identify.findings import Notebook
from rmsnorm.identify.model import ACTIVATIONS, Gate
from rmsnorm.identify.session import Session
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import TargetError

_COARSE: Final = 2.0**-6  # mistakes of form are of the size of y; roundings to bfloat16 are a quarter of this
_NEUTRAL_GATE: Final = {"identity": 1.0, "sigmoid": 64.0, "silu": 32.0, "gelu": 32.0, "gelu (tanh)": 32.0, "relu": 1.0,
                        "tanh": 64.0, "softplus": 64.0}  # fmt: skip


class NotRms(Exception):
    """The target computes something else: the message says what was seen."""


@dataclass(frozen=True)
class Form:
    """How y is made of the normalised row."""

    offset: float | None
    bias: bool
    gain_first: bool
    centred: bool
    gate: Gate | None


def solve_form(session: Session, notes: Notebook) -> Form:
    """Settle the roles of the parameters, and make them neutral in the session.

    Raises:
        NotRms: y is not a row divided by one number, times a gain, plus a bias.
    """
    random = np.random.default_rng(2)
    x = _spread_rows(random, session.n)
    session.neutral = {"scale": 1.0, "bias": 0.0, "gate_vector": 0.0, "gate": 2.0}
    _swapped(session, notes, x)
    gate = _gate(session, notes, x)
    offset, gain_first = _gain(session, notes, x)
    bias = _bias(session, notes, x)
    centred = _numerator(session, notes, x)
    return Form(offset, bias, gain_first, centred, gate)


def _spread_rows(random: np.random.Generator, n: int) -> Array:
    """Rows with different means, large enough for eps to be small."""
    rows = random.normal(size=(16, n)) + np.linspace(-2, 2, 16)[:, None]
    return 8 * rows


def close(a: Array, b: Array, tolerance: float = _COARSE) -> bool:
    """Equal up to a share of the largest number."""
    size = np.max(np.abs(b), initial=0.0)
    return bool(np.all(np.isfinite(a)) and np.max(np.abs(a - b), initial=0.0) <= tolerance * max(size, 1e-30))


def _swapped(session: Session, notes: Notebook, x: Array) -> None:
    if not (session.has("scale") and session.has("bias")):
        return
    ones, other = session.unit(x), session.unit(x, scale=0.0, bias=1.0)
    if close(ones, np.ones_like(ones)) and not close(other, ones):
        names, own = {"scale": "bias", "bias": "scale"}, session.target
        pull = own.derivatives

        def exchanged(arguments):  # type: ignore[no-untyped-def]
            return {names.get(role, role): value for role, value in arguments.items()}

        session.target = replace(
            own,
            function=lambda arguments: own.function(exchanged(arguments)),
            derivatives=None if pull is None else lambda given, dy: exchanged(pull(exchanged(given), dy)),
            shape_of=lambda role, shape: own.shape_of(names.get(role, role), shape),
        )
        notes.defect("gain and bias are swapped: the bias multiplies and the gain is added")


def _gate(session: Session, notes: Notebook, x: Array) -> Gate | None:
    if "gate_vector" in session.target.arguments:
        return _gate_vector(session, notes, x)
    if "gate" not in session.target.arguments:
        notes.found("gate", False, "y is the normalised row but for gain and bias, at every element")
        return None
    random = np.random.default_rng(3)
    z = random.uniform(-3, 3, x.shape)
    base, y = session.rows(x, gate=2.0).astype(np.float64), session.rows(x, gate=z).astype(np.float64)
    optional = _answers_without_gate(session, x)
    if close(y, base):
        session.neutral["gate"] = None if optional else 1.0
        notes.found("gate", False, "y does not change with the gate")
        notes.defect("the gate is not applied")
        return None
    for name, act in ACTIVATIONS.items():
        share = act(z) / act(np.asarray(2.0))
        before = session.rows(x * share, gate=2.0).astype(np.float64)
        for position, predicted in (("after", base * share), ("before", before)):
            if close(y, predicted):
                gate = Gate(name, position)  # type: ignore[arg-type]
                session.neutral["gate"] = None if optional else _NEUTRAL_GATE[name]
                if not optional:
                    size = float(round(float(ACTIVATIONS[name](np.asarray(_NEUTRAL_GATE[name])))))
                    session.lift, session.factor = (size, 1.0) if position == "before" else (1.0, size)
                where = "x, before the statistic" if position == "before" else "the normalised row"
                notes.found("gate", f"{name}, {position}", f"an input: {name}(gate) multiplies {where}")
                return gate
    raise NotRms("the gate acts in none of the ways that are known")


def _answers_without_gate(session: Session, x: Array) -> bool:
    kept, session.neutral["gate"] = session.neutral.get("gate"), None
    try:
        return bool(np.all(np.isfinite(session.rows(x).astype(np.float64))))
    except TargetError:
        session.neutral["gate"] = kept
        return False


def _gate_vector(session: Session, notes: Notebook, x: Array) -> Gate:
    small = x / 8
    base = session.rows(small, gate_vector=0.0).astype(np.float64)
    vector = session.parameter("gate_vector", np.random.default_rng(4), -2, 2)
    y = session.rows(small, gate_vector=vector).astype(np.float64)
    argument = session.spread(vector, len(x)) * small
    for name, act in ACTIVATIONS.items():
        start = float(act(np.zeros(())))
        if start and close(y, base * act(argument) / start):
            session.factor = start
            notes.found("gate", f"{name} of gate * x, after", f"a parameter: {name}(gate * x) multiplies y")
            return Gate(name, "after", vector=True)
    raise NotRms("the gate acts in none of the ways that are known")


def _gain(session: Session, notes: Notebook, x: Array) -> tuple[float | None, bool]:
    """The offset o of (o + gain), None where it cannot be seen; whether the gain comes before the statistic."""
    if not session.has("scale"):
        notes.found("gain", False, "it takes none")
        notes.unseen("scale_offset", "there is no gain")
        return None, False
    random = np.random.default_rng(5)
    vector = session.parameter("scale", random, 0.25, 2.0)
    zero, one = session.unit(x, scale=0.0), session.unit(x, scale=1.0)
    y = session.unit(x, scale=vector)
    wide = session.spread(vector, len(x))
    slope = one - zero
    if close(y, one) and close(zero, one):
        notes.found("gain", False, "y does not change with the gain")
        notes.unseen("scale_offset", "the gain is not applied")
        notes.defect("the gain is not applied")
        session.neutral["scale"] = 1.0
        return None, False
    if not close(y, zero + wide * slope) or np.max(np.abs(slope)) < 1e-3 * np.max(np.abs(one)):
        for o in (0.0, 1.0):
            if close(session.unit(x * (o + wide), scale=1.0), y):
                session.neutral["scale"] = 1.0 - o
                notes.found("gain", True, "it multiplies x before the statistic is taken")
                notes.found("scale_offset", o, "y(x, gain) = y(x (o + gain))")
                notes.defect("the gain multiplies x before the statistic is taken, not the normalised row")
                return o, True
        raise NotRms("y is not linear in the gain")
    middle = np.abs(slope) > 0.1 * np.max(np.abs(slope))
    ratio = zero[middle] / slope[middle]
    measured = float(np.median(ratio))
    offset = nearest_number(measured, max(1e-6, float(np.percentile(np.abs(ratio - measured), 90))))
    session.neutral["scale"] = 1.0 - offset
    notes.found("gain", True, "y is linear in it")
    notes.found("scale_offset", offset, f"with a gain of 0, y is {measured:.4g} times the normalised row")
    return offset, False


def _bias(session: Session, notes: Notebook, x: Array) -> bool:
    if not session.has("bias"):
        notes.found("bias", False, "it takes none")
        return False
    vector = session.parameter("bias", np.random.default_rng(6), -3, 3)
    added = session.unit(x, bias=vector) - session.unit(x, bias=0.0)
    wide = session.spread(vector, len(x))
    if np.max(np.abs(added)) < 1e-6:
        notes.found("bias", False, "y does not change with the bias")
        notes.defect("the bias is not applied")
        session.neutral["bias"] = 0.0
        return False
    if not close(added, wide):
        raise NotRms("the bias is not added to y")
    notes.found("bias", True, "y changes by the bias")
    return True


def _numerator(session: Session, notes: Notebook, x: Array) -> bool:
    """Whether y is x less its mean, over one number of the row."""
    y = session.unit(x)
    if not np.all(np.isfinite(y)) or np.max(np.abs(y)) == 0:
        raise NotRms("y is not finite, or 0, for ordinary rows")
    mean = x.mean(-1, keepdims=True)
    centre = x - mean
    if session.n == 1:
        return False
    slope = (y * centre).sum(-1, keepdims=True) / np.maximum((centre**2).sum(-1, keepdims=True), 1e-30)
    shift = y.mean(-1, keepdims=True)
    if not close(y, slope * centre + shift):
        raise NotRms("y is not the row over one number: its elements are changed each in another way")
    uncentred, centred = close(shift, slope * mean), bool(np.max(np.abs(shift)) <= 1e-3 * np.max(np.abs(y)))
    if uncentred:
        notes.found("numerator", "x", "y is proportional to x in every row, whatever its mean")
        return False
    if centred:
        notes.found("numerator", "x - mean", "y is proportional to x less its mean")
        return True
    raise NotRms("y is neither proportional to x nor to x less its mean")


def nearest_number(value: float, tolerance: float) -> float:
    """The number of fewest digits within a relative tolerance (below 1 an absolute one).

    >>> nearest_number(0.99999, 1e-3), nearest_number(1e-9, 1e-3)
    (1.0, 0.0)
    """
    for digits in range(6):
        candidate = round(value, digits)
        if abs(candidate - value) <= tolerance * max(1.0, abs(value)):
            return candidate + 0.0
    return value
