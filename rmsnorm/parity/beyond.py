"""What no single call can show: dependence on the number of rows, and more than 2^31 elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from rmsnorm.accuracy.ulps import ulps
from rmsnorm.parity.cases import Array, Case, Data
from rmsnorm.parity.comparison import Comparison, Run, Skip
from rmsnorm.parity.fitting import adapted_data, expect_in_groups
from rmsnorm.parity.judge import Outcome, compare, failed
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import Target, TargetError

BATCHES: Final = "batches"
LARGE: Final = Case("2^31 elements", (257, 64), ("standard",), "more elements than 31 bits count")
ELEMENTS: Final = 2**31
_AT_ONCE: Final = 64  # repetitions of the rows that are compared together
_DIFFERENT: Final = 7  # rows, which are repeated: an odd number, so that each of them is at every kind of place
_COUNTS: Final = (2, 7, 64, 255, 256, 257, 1024, 4096)  # of rows in a call,
_FEWER: Final = (7, 257, 4096)  # and where a library compiles each number of them
_WIDTHS: Final = (64, 1024, 4096)  # programs of one block sum narrow rows in one way


@dataclass(frozen=True)
class Beyond:
    """The questions to a target that are no circumstance; each answer is a list of comparisons.

    Attributes:
        target: what is asked.
        variant, group_size: what it should be, as of ``check``.
        run: gets what cannot be asked, and why.
        gradients: whether dx and dscale count.
    """

    target: Target
    variant: Variant
    group_size: int | None
    run: Run
    gradients: bool

    def batches(self, types: Sequence[str]) -> list[Comparison]:
        """On y, dx and dscale: whether a row has the same bits alone and among others, and two equal calls have."""
        target = self.target
        if target.sizes and target.sizes[0] is not None:
            return self._skip(BATCHES, "", "it takes one number of rows")
        counts = _FEWER if target.bridge.compiles else _COUNTS
        wrong: dict[str, Comparison] = {}
        for dtype in [dtype for dtype in ("float32", "bfloat16") if dtype in types] or types[:1]:
            for width in _WIDTHS:
                try:
                    for entry in self._dependences(dtype, width, counts):
                        wrong.setdefault(entry.quantity, entry)
                except TargetError as error:
                    return self._skip(BATCHES, dtype, str(error))
        names = [name for name in ("x", "scale") if name == "x" or name in target.arguments]
        quantities = ("y", *(f"d{name}" for name in names if self.gradients))
        return [wrong.get(name, Comparison(name, 0.0, 0.0, 1.0, 0.0, True, "")) for name in quantities]

    def _dependences(self, dtype: str, width: int, counts: Sequence[int]) -> Iterator[Comparison]:
        case = Case(BATCHES, (_DIFFERENT, width), (self.variant.name,), "")
        sized, data = adapted_data(self.target, case, self.variant, dtype, self.group_size)
        alone = [self._results(sized, data, np.array([row])) for row in range(_DIFFERENT)]
        each = {name: np.concatenate([one[name] for one in alone]) for name in alone[0] if name != "dscale"}
        where = f"in {dtype} with {data.x.shape[-1]} elements in a row"
        for count in counts:
            order = np.arange(count) % _DIFFERENT
            first, again = (self._results(sized, data, order) for _ in range(2))
            for name, got in first.items():
                if got.tobytes() != again[name].tobytes():
                    words = f"{name} is not the same in two equal calls: {_apart(got, again[name])} {where}"
                    yield failed(name, words)
                elif name in each and got.tobytes() != (want := each[name][order]).tobytes():
                    words = f"{name} of a row depends on how many rows there are: from {count} rows on, "
                    yield failed(name, f"{words}{_apart(got, want)} {where}")

    def _results(self, sized: Target, data: Data, order: Array) -> dict[str, Array]:
        """y, dx and dscale of a call with some of the rows."""
        named = {"x": data.x[order], "scale": data.scale, "bias": data.bias}
        named["gate"] = None if data.gate is None else data.gate[order]
        arrays = {name: array for name, array in named.items() if array is not None}
        leaves = [name for name in ("x", "scale") if name in arrays] if self.gradients else []
        with sized.evaluating():
            called = sized.called(arrays, leaves)
            gradients = called.gradients(data.dy[order]) if leaves else {}
        got = {"y": called.y, **{f"d{name}": gradient for name, gradient in gradients.items()}}
        return {name: array for name, array in got.items() if array is not None}

    def elements(self, dtype: str) -> list[Comparison]:
        """On y of 2^31 elements and some more: 257 rows, again and again."""
        target = self.target
        if target.rank not in (None, 2) or target.sizes:
            return self._skip(LARGE.name, dtype, "it takes no x of two axes and any size")
        sized, data = adapted_data(target, LARGE, self.variant, dtype, self.group_size)
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

    def _skip(self, name: str, dtype: str, reason: str) -> list[Comparison]:
        self.run.skipped.append(Skip(name, dtype, reason))
        return []


def _apart(got: Array, want: Array) -> str:
    distances = ulps(got, want)
    return f"{100 * float(np.mean(distances != 0)):.2g} % of elements, at most {distances.max():.0f} ulp"
