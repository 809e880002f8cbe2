"""The gradients beside those of the candidate. What they are instead is one of the mistakes that are known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.accuracy.bounds import FORMULA
from rmsnorm.identify import mistakes
from rmsnorm.identify.asking import Probe
from rmsnorm.identify.candidates import ANY, Candidate
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


class Pose(NamedTuple):
    """A call with a gradient of y, what the candidate makes of it, and the largest difference that is allowed.

    ``dh``: the gradient of the returned sum x + residual.
    """

    probe: Probe
    candidate: Candidate
    arrays: Mapping[str, Array]
    dy: Array
    dh: Array | None = None

    @property
    def data(self) -> Data:
        return replace(self.candidate.data(self.probe, self.arrays, self.dy), dh=self.dh)

    @property
    def dtype(self) -> str:
        return str(self.arrays["x"].dtype.name)

    @property
    def allowed(self) -> float:
        is_rough = any(name == self.dtype for name, _ in self.candidate.of_dtype)  # a mistake rounds there to 16 bits
        return max(FORMULA, 8 * dtypes.unit_roundoff("bfloat16" if is_rough else self.dtype))

    def wanted(self, mistake: Mistake | None = None) -> Mapping[str, list[Array]]:
        """The gradients, where the equations have one more mistake."""
        changes = self.candidate.changes(self.dtype) | dict(mistake.changes if mistake else {})
        data = self.data
        results = equations.candidate(data, changes).results
        if not self.candidate.vector or data.gate is None:
            return results
        return {**results, "dx": [results["dx"][0] + results["dgate"][0] * (data.gate / data.x)]}  # of the gate, too

    def apart(self, name: str, got: Array, want: Array) -> float:
        """The largest difference, as of the function ``apart``."""
        return apart(name, got, want, self.probe.axes)

    def mistake(self, name: str, got: Array) -> str:
        """The known mistake that explains a gradient, empty where none does."""
        if name not in self.wanted():
            return ""
        return _named(name, got, self.data, self.wanted, self.candidate.activation, self.allowed)


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


def explanation(name: str, data: Data, got: Array) -> str:
    """The known mistake that explains a gradient of a call, empty where none does."""
    activation = None if data.gate is None else data.variant.gate_function
    allowed = max(FORMULA, 8 * dtypes.unit_roundoff(data.x.dtype.name))
    return _named(name, got, data, lambda each: equations.candidate(data, each.changes).results, activation, allowed)


def _named(
    name: str, got: Array, data: Data, wanted: Callable[[Mistake], Mapping[str, list[Array]]], activation: str | None,
    allowed: float,
) -> str:  # fmt: skip
    """The first mistake with which the equations give a gradient."""
    for mistake in _tried(name, int(data.call.n)):
        if "gate" in mistake.says and activation is None:
            continue
        with contextlib.suppress(AttributeError, TypeError, ValueError):  # of steps that this call has not
            if apart(name, got, wanted(mistake)[name][0], data.call.axes) <= allowed:
                return mistake.says.format(f=activation)
    return ""


def solve_gradients(probe: Probe, candidate: Candidate) -> None:
    """Compare the gradients of ordinary rows in 32 bits, and sums over many rows in 16 bits."""
    findings = probe.findings
    if not probe.target.differentiable:
        findings.add("gradients", None, f"{probe.target.framework} has no automatic differentiation")
        return
    pose = _pose(probe, candidate)
    try:
        got = probe.gradients(pose.arrays, pose.dy)
    except TargetError as error:
        findings.add("gradients", "raise", str(error))
        findings.defect(f"its gradient cannot be taken: {error}")
        return
    said, evidence = _compared(pose, got)
    if "dy" in probe.target.touched:
        said.append("its backward pass writes to the gradient of y")
        probe.target.touched.discard("dy")
    said = said or _in_16_bits(probe, candidate)
    findings.defect(*said)
    findings.add("gradients", "wrong" if said else "agree", evidence)


def _pose(probe: Probe, candidate: Candidate) -> Pose:
    """Rows of very different size, so that eps matters, with random parameters and dy.

    In every second row dy * (o + gain) has the signs of x. The term of dx that is the sum of their products is then of
    the size of the other one; elsewhere it is about 1 / sqrt(n) of it, which no tolerance sees in wide rows.
    """
    arrays = probe.random(14, "float32" if "float32" in probe.accepts else probe.accepts[0], sizes=(-3.5, 1.5))
    data = candidate.data(probe, arrays)
    dy = np.random.default_rng(114).normal(0.1, 1.0, data.x.shape)
    gain: Any = 1.0
    if data.scale is not None:
        gain = candidate.variant.scale_offset + data.scale.astype(np.float64).reshape(data.call.feature_shape)
    aligned = np.abs(dy) * np.where(data.x.astype(np.float64) * gain < 0, -1.0, 1.0)
    dy = np.where(probe.of_rows(np.arange(probe.count(dy)) % 2 == 0, dy), aligned, dy)
    return _posed(probe, candidate, arrays, dy)


def _posed(probe: Probe, candidate: Candidate, arrays: Mapping[str, Array], dy: Array) -> Pose:
    """With dy in the dtype of y."""
    own = candidate.data(probe, arrays).call.result_dtype
    return Pose(probe, candidate, arrays, dy.astype(own if candidate.result in (None, ANY) else candidate.result))


def _compared(pose: Pose, got: Mapping[str, Array | None]) -> tuple[list[str], str]:
    """The sentences on what is wrong, and the evidence."""
    want, said, agree = pose.wanted(), list[str](), list[str]()
    for name, word in _WORDS.items():
        if name not in got or name not in want:
            continue
        gradient = got[name]
        share = np.inf if gradient is None else pose.apart(name, gradient, want[name][0])
        if gradient is None:
            said.append(f"there is no gradient for {word}")
        elif share <= pose.allowed:
            agree.append(f"{name} within {share:.1g} of that of the formula, as a share of its largest element")
        elif mistake := pose.mistake(name, gradient):
            said.append(mistake)
        elif np.all(np.isfinite(gradient.astype(np.float64))):
            said.append(f"the gradient for {word} is wrong by {100 * share:.2g} % of its largest element")
        else:
            said.append(f"the gradient for {word} is not finite")
    return said, f"{dtypes.short(pose.dtype)}: " + "; ".join([*agree, *said])


def _tried(name: str, n: int) -> Iterator[Mistake]:
    """The mistakes that change one gradient, in rows of n elements."""
    if name in ("dx", "dresidual"):
        yield from mistakes.of_dx(n)
    elif name == "dgate":
        yield from mistakes.of_gate()
    else:
        yield from mistakes.of_parameter(name)


def _in_16_bits(probe: Probe, candidate: Candidate) -> list[str]:
    """What is wrong with the sums over many rows in 16 bits, of terms of one sign."""
    half = next((dtype for dtype in ("bfloat16", "float16") if dtype in probe.accepts), None)
    if half is None or probe.is_short_of_time or any("eps is" in defect for defect in probe.findings.defects):
        return []
    many = probe.layout.unlimited and not probe.target.bridge.compiles
    arrays = probe.random(24, half, sizes=(0.0, 0.0), rows=_ROWS if many else ROWS)
    dy = np.random.default_rng(124).uniform(1, 2, arrays["x"].shape) * np.sign(arrays["x"].astype(np.float64))
    pose, said = _posed(probe, candidate, arrays, dy), []
    try:
        got = probe.gradients(arrays, pose.dy)
    except TargetError as error:
        return [f"for {half} x, its gradient cannot be taken: {error}"]
    for name, (want,) in pose.wanted().items():
        gradient = got.get(name) if name in ("dscale", "dbias") else None
        if gradient is None or gradient.size < _LEAST or gradient.shape != want.shape:
            continue
        is_far = pose.apart(name, gradient, want) > 2 * pose.allowed
        is_rough = many and probe.count(dy) > _ROWS // 2 and np.mean(gradient == want) < _SAME
        if is_far or is_rough:
            known = pose.mistake(name, gradient) if is_far else ""
            said.append(known or f"the gradient for {_WORDS[name]} is accumulated in 16 bits")
    return said
