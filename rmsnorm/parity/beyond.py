"""What no single case can show: dependence on the number of rows, and more than 2^31 elements."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from rmsnorm.identify.batches import dependences
from rmsnorm.identify.findings import Findings
from rmsnorm.identify.groups import grouped
from rmsnorm.identify.probe import open_probe
from rmsnorm.parity.cases import Case, Data
from rmsnorm.parity.comparison import Comparison, Skip
from rmsnorm.parity.fitting import adapted_data, expect_in_groups
from rmsnorm.parity.judge import Outcome, compare, failed
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import Target, TargetError
from rmsnorm.targets.open import WIDTH

BATCHES: Final = "batches"
LARGE: Final = Case("2^31 elements", (257, 64), ("standard",), "more elements than 31 bits count")
ELEMENTS: Final = 2**31
_AT_ONCE: Final = 64  # repetitions of the rows that are compared together
_TIME: Final = 600.0  # seconds


@dataclass(frozen=True)
class Beyond:
    """The questions to a target that are no case; each answer is a list of comparisons, empty where it cannot be asked.

    Attributes:
        target: what is asked.
        variant, group_size: what it should be, as of ``check``.
        skipped: gets what cannot be asked, and why.
        gradients: whether dx and dscale count.
        compiled: whether the target, as the compiler of its library makes it, is asked as well.
    """

    target: Target
    variant: Variant
    group_size: int | None = None
    skipped: list[Skip] = field(default_factory=list)
    gradients: bool = True
    compiled: bool = False

    def batches(self) -> list[Comparison]:
        """On y, dx and dscale: whether their bits depend on the number of rows, or on the call."""
        return self._of_both(self._batches)

    def elements(self, dtype: str) -> list[Comparison]:
        """On y of 2^31 elements and some more: 257 rows, again and again."""
        return self._of_both(lambda target: self._elements(target, dtype))

    def _of_both(self, ask: Callable[[Target], list[Comparison]]) -> list[Comparison]:
        """The answers, where these pass those of the compiled target."""
        answers = ask(self.target)
        if not (self.compiled and answers):
            return answers
        failures = {entry.quantity: entry for entry in ask(self.target.compiled) if not entry.passed}
        failures = {name: replace(entry, detail=f"compiled: {entry.detail}") for name, entry in failures.items()}
        return [failures.get(entry.quantity, entry) if entry.passed else entry for entry in answers]

    def _skip(self, name: str, dtype: str, reason: str) -> list[Comparison]:
        self.skipped.append(Skip(name, dtype, reason))
        return []

    def _sized(self, target: Target, case: Case, dtype: str) -> tuple[Target, Data]:
        return adapted_data(target, case, self.variant, dtype, self.group_size)

    def _batches(self, target: Target) -> list[Comparison]:
        with target.evaluating():
            probe = open_probe(target, target.width or WIDTH, time.monotonic() + _TIME, _TIME, Findings())
            probe = grouped(probe)
            if not probe.layout.unlimited:
                return self._skip(BATCHES, "", "it takes one number of rows")
            differing, asked = dependences(probe, gradients=self.gradients)
        if not asked.widths:
            return self._skip(BATCHES, "", "it takes no other number of rows")
        wrong = {entry.quantity: failed(entry.quantity, entry.sentence) for entry in reversed(differing)}
        names = ("y", "dx", *(("dscale",) if "scale" in target.arguments else ())) if self.gradients else ("y",)
        return [wrong.get(name, Comparison(name, 0.0, 0.0, 1.0, 1.0, 0.0, True, "")) for name in names]

    def _elements(self, target: Target, dtype: str) -> list[Comparison]:
        if target.rank not in (None, 2) or target.sizes:
            return self._skip(LARGE.name, dtype, "it takes no x of two axes and any size")
        sized, data = self._sized(target, LARGE, dtype)
        rows, count = len(data.x), ELEMENTS // data.x.size + 1
        repeats = [1] * (data.x.ndim - 1)
        gate = {} if data.gate is None else {"gate": np.tile(data.gate, (count, *repeats))}
        try:
            y = sized.forward(np.tile(data.x, (count, *repeats)), data.scale, data.bias, **gate)
        except TargetError as error:
            return [failed("y", str(error))]
        want = expect_in_groups(data, ["y"], self.group_size)["y"]
        worst: list[Comparison] = []
        for start in range(0, count, _AT_ONCE):
            part = y[start * rows : (start + _AT_ONCE) * rows]
            many = len(part) // rows
            tiled = want.changed(partial(np.tile, reps=(many, *repeats)))
            (comparison,) = compare(Outcome({"y": [part]}), {"y": tiled})
            if not comparison.passed:
                return [replace(comparison, detail=f"after {start * rows} rows, {comparison.detail}")]
            worst = [max(*worst, comparison, key=lambda entry: entry.parity_ratio)] if worst else [comparison]
        return worst
