"""The gradients beside those of the candidate. What they are instead is one of the mistakes that are known."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from rmsnorm.accuracy.bounds import FORMULA
from rmsnorm.identify import mistakes
from rmsnorm.identify.asking import Probe
from rmsnorm.identify.candidates import ANY, Candidate, of_call
from rmsnorm.identify.layout import ROWS
from rmsnorm.identify.mistakes import Mistake
from rmsnorm.parity import equations
from rmsnorm.parity.cases import Data
from rmsnorm.specification import dtypes
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import TargetError

_WORDS: Final = {"dx": "x", "dscale": "the gain", "dbias": "the bias", "dgate": "the gate"}
_ROWS: Final = 1029
# Where the sum is rounded once, the roundings of 1,024 terms of one sign move it by 1/50 ulp: 96 % have the same bits.
# Each rounding of a partial sum errs by 0.29 ulp in the mean: a tree of ten leaves 40 %, a loop none.
_SAME: Final = 0.75
_LEAST: Final = 16  # elements of a parameter, of which a share says something


def wanted(candidate: Candidate, data: Data, mistake: Mistake | None = None) -> Mapping[str, Array]:
    """The gradients that a candidate gives, where the equations have one more mistake."""
    changes = candidate.changes(data.x.dtype.name) | dict(mistake.changes if mistake else {})
    results = {name: values[0] for name, values in equations.candidate(data, changes).results.items()}
    if candidate.vector and data.gate is not None:
        results["dx"] = results["dx"] + results["dgate"] * (data.gate / data.x)  # of the gate, too
    return results


def apart(name: str, got: Array, want: Array, axes: Sequence[int]) -> float:
    """The largest difference, as a share of the largest element, for dx and dgate of its row."""
    wide, right = got.astype(np.float64), want.astype(np.float64)
    if wide.size == 1 < right.size:  # a parameter of one number
        wide, right = wide.reshape(1), np.array([right.sum()])
    if wide.shape != right.shape:
        return np.inf
    of_rows = name in ("dx", "dgate", "dresidual")
    size = np.max(np.abs(right), axis=tuple(axes), keepdims=True) if of_rows else np.max(np.abs(right))
    with np.errstate(invalid="ignore"):
        share = float(np.max(np.where(wide == right, 0.0, np.abs(wide - right)) / np.maximum(size, 1e-30)))
    return share if np.isfinite(share) else np.inf


def _allowed(candidate: Candidate, dtype: str) -> float:
    is_rough = any(name == dtype for name, _ in candidate.of_dtype)  # a mistake rounds there to 16 bits
    return max(FORMULA, 8 * dtypes.unit_roundoff("bfloat16" if is_rough else dtype))


def explanation(name: str, data: Data, got: Array, candidate: Candidate | None = None) -> str:
    """The first known mistake with which the equations give this gradient of a call; empty where none does."""
    candidate = candidate or of_call(data)
    if name in ("dx", "dresidual"):
        known = mistakes.of_dx(int(data.call.n))
    else:
        known = mistakes.of_gate() if name == "dgate" else mistakes.of_parameter(name)
    for mistake in known:
        if "gate" in mistake.says and candidate.activation is None:
            continue
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # of steps that this call has not
            right = wanted(candidate, data, mistake)[name]
            if apart(name, got, right, data.call.axes) <= _allowed(candidate, data.x.dtype.name):
                return mistake.says.format(f=candidate.activation)
    return ""


def solve_gradients(probe: Probe, candidate: Candidate) -> None:
    """Compare the gradients of ordinary rows in 32 bits, and sums over many rows in 16 bits."""
    findings = probe.findings
    if not probe.target.differentiable:
        findings.add("gradients", None, f"{probe.target.framework} has no automatic differentiation")
        return
    try:
        said, evidence = _ordinary(probe, candidate)
    except TargetError as error:
        findings.add("gradients", "raise", str(error))
        findings.defect(f"its gradient cannot be taken: {error}")
        return
    if "dy" in probe.target.touched:
        said.append("its backward pass writes to the gradient of y")
        probe.target.touched.discard("dy")
    said = said or _sums_in_16_bits(probe, candidate)
    findings.defect(*said)
    findings.add("gradients", "wrong" if said else "agree", evidence)


def _asked(
    probe: Probe, candidate: Candidate, arrays: Mapping[str, Array], dy: Array
) -> tuple[Data, Mapping[str, Array | None]]:
    """The call with dy in the dtype of y, and the target's gradients."""
    own = candidate.data(probe, arrays).call.result_dtype
    dy = dy.astype(own if candidate.result in (None, ANY) else candidate.result)
    return candidate.data(probe, arrays, dy), probe.gradients(arrays, dy)


def _ordinary(probe: Probe, candidate: Candidate) -> tuple[list[str], str]:
    """The sentences on what is wrong, and the evidence, of rows of very different size, so that eps matters.

    In every second row dy * (o + gain) has the signs of x. The term of dx that is the sum of their products is then of
    the size of the other one; elsewhere it is about 1 / sqrt(n) of it, which no tolerance sees in wide rows.
    """
    arrays = probe.random(14, "float32" if "float32" in probe.accepts else probe.accepts[0], sizes=(-3.5, 1.5))
    data = candidate.data(probe, arrays)
    dy, gain = np.random.default_rng(114).normal(0.1, 1.0, data.x.shape), np.ones(())
    if data.scale is not None:
        gain = candidate.variant.scale_offset + data.scale.astype(np.float64).reshape(data.call.feature_shape)
    aligned = np.abs(dy) * np.where(data.x.astype(np.float64) * gain < 0, -1.0, 1.0)
    dy = np.where(probe.of_rows(np.arange(probe.count(dy)) % 2 == 0, dy), aligned, dy)
    data, got = _asked(probe, candidate, arrays, dy)
    want, said, agree = wanted(candidate, data), list[str](), list[str]()
    for name, word in _WORDS.items():
        if name not in got or name not in want:
            continue
        if (gradient := got[name]) is None:
            said.append(f"there is no gradient for {word}")
        elif (share := apart(name, gradient, want[name], data.call.axes)) <= _allowed(candidate, data.x.dtype.name):
            agree.append(f"{name} within {share:.1g} of that of the formula, as a share of its largest element")
        elif np.all(np.isfinite(gradient.astype(np.float64))):
            other = f"the gradient for {word} is wrong by {100 * share:.2g} % of its largest element"
            said.append(explanation(name, data, gradient, candidate) or other)
        else:
            said.append(f"the gradient for {word} is not finite")
    return said, f"{dtypes.short(data.x.dtype.name)}: " + "; ".join([*agree, *said])


def _sums_in_16_bits(probe: Probe, candidate: Candidate) -> list[str]:
    """What is wrong with the sums over many rows in 16 bits, of terms of one sign."""
    half: Any = next((dtype for dtype in ("bfloat16", "float16") if dtype in probe.accepts), None)
    if half is None or probe.is_short_of_time or any("eps is" in defect for defect in probe.findings.defects):
        return []
    many = probe.layout.unlimited and not probe.target.bridge.compiles
    arrays = probe.random(24, half, sizes=(0.0, 0.0), rows=_ROWS if many else ROWS)
    dy = np.random.default_rng(124).uniform(1, 2, arrays["x"].shape) * np.sign(arrays["x"].astype(np.float64))
    try:
        data, got = _asked(probe, candidate, arrays, dy)
    except TargetError as error:
        return [f"for {half} x, its gradient cannot be taken: {error}"]
    said, right = [], wanted(candidate, data)
    for name in ("dscale", "dbias"):
        want, gradient = right.get(name), got.get(name)
        if want is None or gradient is None or gradient.size < _LEAST or gradient.shape != want.shape:
            continue
        is_far = apart(name, gradient, want, data.call.axes) > 2 * _allowed(candidate, half)
        is_rough = many and probe.count(dy) > _ROWS // 2 and np.mean(gradient == want) < _SAME
        if is_far or is_rough:
            known = explanation(name, data, gradient, candidate) if is_far else ""
            said.append(known or f"the gradient for {_WORDS[name]} is accumulated in 16 bits")
    return said
