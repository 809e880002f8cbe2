"""Whether the gradients for the gain and the bias, which are sums over all rows, are accumulated in 16 bits."""

from __future__ import annotations

from typing import Final

import numpy as np

from rmsnorm.identify.probe import Probe
from rmsnorm.specification import dtypes
from rmsnorm.targets.target import TargetError

_ROWS: Final = 1024
_LEAST: Final = 16  # elements of a parameter, of which a share says something
# Where the sum is rounded once, the roundings of 1,024 terms of one sign move it by 1/50 ulp: 96 % have the same bits.
# Each rounding of a partial sum errs by 0.29 ulp in the mean: a tree of ten leaves 40 %, a loop none.
_SAME: Final = 0.75
_WORDS: Final = {"scale": "the gain", "bias": "the bias"}


def solve_sums(probe: Probe) -> None:
    """Compare each sum with that of the same numbers in float32, which the target computes, too."""
    if any(defect.startswith("eps is ") for defect in probe.findings.defects):
        return  # with another eps in another dtype, the sums are not of the same numbers
    names = [name for name in _WORDS if probe.takes(name) and not probe.is_short_of_time]
    halves = [name for name in ("bfloat16", "float16") if name in probe.accepts]
    if not (names and halves and "float32" in probe.accepts and probe.layout.unlimited and probe.target.differentiable):
        return
    random, evidence = np.random.default_rng(27), []
    rows = random.normal(size=(min(_ROWS, max(4, 2**22 // probe.n)), probe.n)).astype(halves[0])
    dy = (random.uniform(1, 2, rows.shape) * np.sign(rows.astype(np.float64))).astype(halves[0])
    sums = []
    try:
        for dtype in (halves[0], "float32"):
            x, arrays = probe.prepare(rows, dtype)
            sums.append(probe.target.all_gradients(probe.layout.to_x(dy).astype(dtype), x=x, **arrays))
    except TargetError:
        return  # it takes no such x: that is no finding of this step
    for name in names:
        got, want = (of_dtype.get(name) for of_dtype in sums)
        if got is None or want is None or got.shape != want.shape or got.size < _LEAST:
            continue
        same = float(np.mean(got.astype(halves[0]) == want.astype(halves[0])))
        short = dtypes.short(halves[0])
        evidence.append(f"{100 * same:.3g} % of d{name} in {short} has the bits of the sum of {len(rows)} rows in f32")
        if same < _SAME:
            probe.findings.defect(f"the gradient for {_WORDS[name]} is accumulated in 16 bits")
    if evidence:
        narrow = any("accumulated in 16 bits" in defect for defect in probe.findings.defects)
        probe.findings.add("sums_over_rows", "16 bits" if narrow else "wider", "; ".join(evidence))
