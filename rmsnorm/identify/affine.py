"""What multiplies and what is added: gain, offset, bias, gate, and whether the mean leaves the numerator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rmsnorm.accuracy.bounds import FORM, FORMULA
from rmsnorm.identify.findings import NotRms
from rmsnorm.identify.gate import solve_gate
from rmsnorm.identify.model import Gate, Model
from rmsnorm.identify.probe import Probe
from rmsnorm.specification.variants import Variant
from rmsnorm.targets.bridges import Array


def solve_affine(probe: Probe) -> tuple[Probe, Model, Gate | None]:
    """Find out how y is made of the normalised row.

    Returns:
        The probe in which the parameters are neutral, the model as far as it is known, and a gate that multiplies
        only if it is passed, which the probe and the model are without.

    Raises:
        NotRms: y is not a row divided by one number, times a gain, plus a bias.
    """
    means = np.linspace(-2, 2, 16)[:, None]
    x = 8 * (np.random.default_rng(2).normal(size=(16, probe.n)) + means)  # large enough for eps to be small
    probe = probe.with_neutral(scale=1.0, bias=0.0, gate_vector=0.0, gate=2.0)
    if "factor" in probe.target.arguments:
        name = probe.target.names.get("factor", "factor")
        probe.findings.defect(f"it has a parameter of one number beside the gain, {name}, which no RMSNorm has")
    probe, gate = solve_gate(probe, x)
    optional = None
    if gate is not None and probe.neutral_parameters["gate"] is None:  # what follows asks the norm without it
        probe, gate, optional = probe.leaving_out("gate"), None, gate
    probe, model = _gain(probe, x)
    probe, bias = _bias(probe, x)
    centred = _centred(probe, x)
    model = replace(model, variant=model.variant.replace(bias=bias), centred=centred, gate=gate)
    return replace(probe, centred=centred), model, optional


def close(a: Array, b: Array, tolerance: float = FORM) -> bool:
    """Equal up to a share of the largest number."""
    size = np.max(np.abs(b), initial=0.0)
    return bool(np.all(np.isfinite(a)) and np.max(np.abs(a - b), initial=0.0) <= tolerance * max(size, 1e-30))


def _gain(probe: Probe, x: Array) -> tuple[Probe, Model]:
    """The probe in which the gain multiplies by 1, and the model with what the gain does."""
    model = Model(Variant(name="identified"))
    if not probe.takes("scale"):
        probe.findings.add("gain", False, "it takes none")
        probe.findings.add("scale_offset", None, "there is no gain")
        return probe, model
    vector = probe.parameter("scale", np.random.default_rng(5), 0.25, 2.0)
    zero, one = probe.unit(x, scale=0.0), probe.unit(x, scale=1.0)
    y = probe.unit(x, scale=vector)
    wide = probe.spread(vector, len(x))
    slope = one - zero
    if close(y, one) and close(zero, one):
        probe.findings.add("gain", False, "y does not change with the gain")
        probe.findings.add("scale_offset", None, "the gain is not applied")
        probe.findings.defect("the gain is not applied")
        if "scale" in probe.target.names:  # a layer keeps its own, and the model has none
            probe = probe.leaving_out(*probe.left_out, "scale")
        return probe.with_neutral(scale=1.0), model
    first = not close(y, zero + wide * slope) or np.max(np.abs(slope)) < FORMULA * np.max(np.abs(one))
    if first:
        offset = next((o for o in (0.0, 1.0) if close(probe.unit(x * (o + wide), scale=1.0), y)), -1.0)
        if offset < 0:
            raise NotRms("y is not linear in the gain")
        probe.findings.add("gain", True, "it multiplies x before the statistic is taken")
        probe.findings.add("scale_offset", offset, "y(x, gain) = y(x (o + gain))")
        probe.findings.defect("the gain multiplies x before the statistic is taken, not the normalised row")
    else:
        large = np.abs(slope) > 0.1 * np.max(np.abs(slope))
        ratio = zero[large] / slope[large]
        measured = float(np.median(ratio))
        offset = nearest_number(measured, max(1e-6, float(np.percentile(np.abs(ratio - measured), 90))))
        if not close(zero, measured * slope):
            raise NotRms("y has a part that the gain does not multiply, and that is no multiple of the normalised row")
        probe.findings.add("gain", True, "y is linear in it")
        probe.findings.add("scale_offset", offset, f"with a gain of 0, y is {measured:.4g} times the normalised row")
    model = Model(model.variant.replace(scale_offset=offset), gain_first=first)
    return probe.with_neutral(scale=1.0 - offset), model


def _bias(probe: Probe, x: Array) -> tuple[Probe, bool]:
    if not probe.takes("bias"):
        probe.findings.add("bias", False, "it takes none")
        return probe, False
    vector = probe.parameter("bias", np.random.default_rng(6), -3, 3)
    added = probe.unit(x, bias=vector) - probe.unit(x, bias=0.0)
    if np.max(np.abs(added)) < 1e-6:
        probe.findings.add("bias", False, "y does not change with the bias")
        probe.findings.defect("the bias is not applied")
        return probe.with_neutral(bias=0.0), False
    if not close(added, probe.spread(vector, len(x))):
        raise NotRms(f"{probe.target.names.get('bias', 'the bias')} is not added to y")
    probe.findings.add("bias", True, "y changes by the bias")
    return probe, True


def _centred(probe: Probe, x: Array) -> bool:
    """Whether y is x less its mean, over one number of the row."""
    y = probe.unit(x)
    if not np.all(np.isfinite(y)) or np.max(np.abs(y)) == 0:
        raise NotRms("y is not finite, or 0, for ordinary rows")
    mean = x.mean(-1, keepdims=True)
    centre = x - mean
    if probe.n == 1:
        return False
    slope = (y * centre).sum(-1, keepdims=True) / np.maximum((centre**2).sum(-1, keepdims=True), 1e-30)
    shift = y.mean(-1, keepdims=True)
    if not close(y, slope * centre + shift):
        raise NotRms("y is not the row divided by one number: its elements have different factors")
    if close(shift, slope * mean):
        probe.findings.add("numerator", "x", "y is proportional to x in every row, whatever its mean")
        return False
    if np.max(np.abs(shift)) <= FORMULA * np.max(np.abs(y)):
        probe.findings.add("numerator", "x - mean", "y is proportional to x less its mean")
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
