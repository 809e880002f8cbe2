"""Whether a row has the same bits of y and dx however many rows are in the call, and wherever it is among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from rmsnorm.accuracy.ulps import ulps
from rmsnorm.identify.probe import Probe, Value
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import TargetError

_COUNTS: Final = (2, 7, 64, 255, 256, 257, 1024, 4096)
_FEWER: Final = (7, 257, 4096)  # where every count is compiled
_FEWEST: Final = (7, 257)  # of identify, which asks for much else
_PERIOD: Final = 7  # different examples, which are repeated: an odd number, so that each is at every kind of place
_WIDTHS: Final = (1024, 4096)  # beside the target's own: programs of one block sum narrow rows in one way
_ELEMENTS: Final = 2**22  # in one call


@dataclass(frozen=True)
class Dependence:
    """One result that is not the same bits.

    Attributes:
        quantity: y, dx or dscale.
        count: rows in the first call in which it differs; 0 where the same call has another result each time.
        width: elements in a row.
        share: of the elements that differ, at most in one call.
        distance: the largest one in ulps.
        dtype: of x.
    """

    quantity: str
    count: int
    width: int
    share: float
    distance: float
    dtype: str

    @property
    def sentence(self) -> str:
        many = f"{100 * self.share:.2g} % of elements, at most {self.distance:.0f} ulp"
        where = f"in {self.dtype} with {self.width} elements in a row"
        if not self.count:
            return f"{self.quantity} is not the same in two equal calls: {many} {where}"
        return f"{self.quantity} of a row depends on how many rows there are: from {self.count} rows on, {many} {where}"


class Asked(NamedTuple):
    """What was compared: widths and numbers of rows."""

    widths: tuple[int, ...]
    counts: tuple[int, ...]


def dependences(probe: Probe, *, gradients: bool, thorough: bool = True) -> tuple[list[Dependence], Asked]:
    """Every quantity that depends on the number of rows, or on the call, with the first number of rows that shows it.

    A call has one example alone, or up to 4,096; seven different ones come again and again, so that each of them is at
    many places. An example is a row, or the rows that lie together in x, as the groups of its last axis, each of which
    may have a gain of its own. dscale, a sum over the rows, is compared with that of an equal call.

    Args:
        probe: of the target.
        gradients: whether dx and dscale count.
        thorough: whether to ask for float32 and bfloat16, at three widths, with eight numbers of rows (three where a
            library compiles each); else for one dtype, two widths and two numbers.
    """
    few = _FEWER if probe.target.bridge.compiles else _COUNTS
    sizes, more = (few, _WIDTHS) if thorough else (_FEWEST, _WIDTHS[-1:])
    asked = [entry for entry in probe.accepts if entry in ("float32", "bfloat16")][::-1] or probe.accepts[:1]
    differing: dict[tuple[str, bool], Dependence] = {}
    widths: list[int] = []
    counts: list[int] = []
    for width, resized in _at_widths(probe, more):
        try:
            for dtype in asked if thorough else asked[:1]:
                for seen in _of_one(resized, sizes, dtype, counts, gradients=gradients):
                    differing.setdefault((seen.quantity, not seen.count), seen)
        except TargetError:
            probe.check_time()
            continue  # it takes no such x: that is no finding of this step
        widths.append(width)
    return list(differing.values()), Asked(tuple(widths), tuple(sorted(set(counts))))


def solve_batches(probe: Probe, *, gradients: bool) -> None:
    """Say whether results depend on the number of rows. That is no defect: sums in another order are right, too."""
    if not probe.layout.unlimited:
        probe.findings.add("batches", None, "it takes one number of rows")
        return
    try:
        differing, asked = dependences(probe, gradients=gradients and probe.target.differentiable, thorough=False)
    except TargetError as error:  # the time is over
        probe.findings.add("batches", None, str(error))
        return
    if not asked.widths:
        probe.findings.add("batches", None, "no other number of rows could be tried")
    elif differing:
        probe.findings.add("batches", "differ", "; ".join(entry.sentence for entry in differing))
    else:
        tried = " and ".join(map(str, asked.counts))
        widths = " and ".join(map(str, asked.widths))
        evidence = (
            f"a row of {widths} elements has the same bits alone and in calls of {tried} rows, and in a second call"
        )
        probe.findings.add("batches", "the same", evidence)


def _at_widths(probe: Probe, more: Sequence[int]) -> Iterator[tuple[int, Probe]]:
    yield probe.n, probe
    if probe.layout.group:
        return
    for width in more:
        resized = probe.resized(width) if width > probe.n else None
        if resized is not None:
            yield width, resized


def _of_one(
    probe: Probe, sizes: Sequence[int], dtype: str, counts: list[int], *, gradients: bool
) -> Iterator[Dependence]:
    """At one width and in one dtype; ``counts`` gets the numbers of rows that were asked for."""
    width = probe.n
    random, each = np.random.default_rng(23), probe.layout.rows_per_example
    rows, dy = (random.normal(size=(_PERIOD, each, probe.n)) for _ in range(2))
    parts = [_results(probe, row, v, dtype, gradients=gradients) for row, v in zip(rows, dy, strict=True)]
    alone = {name: np.concatenate([part[name] for part in parts]) for name in parts[0] if name != "dscale"}
    seen: dict[str, Dependence] = {}
    for count in sizes:
        if count * each * probe.n > _ELEMENTS:
            break
        many = [np.resize(part, (count * each, probe.n)) for part in (rows, dy)]
        first, again = (_results(probe, many[0], many[1], dtype, gradients=gradients) for _ in range(2))
        counts.append(count * each)
        for name, want in first.items():
            if want.tobytes() != again[name].tobytes():
                yield _difference(name, want, again[name], 0, width, dtype)
        for name, row in alone.items():
            want = np.resize(row, first[name].shape)
            if want.tobytes() != first[name].tobytes():
                one = _difference(name, want, first[name], count * each, width, dtype)
                before = seen.get(name, one)
                share, distance = max(before.share, one.share), max(before.distance, one.distance)
                seen[name] = replace(before, share=share, distance=distance)
    yield from seen.values()


def _difference(name: str, want: Array, got: Array, count: int, width: int, dtype: str) -> Dependence:
    distances = ulps(want, got)
    share, most = float(np.mean(distances != 0)), float(distances.max(initial=0.0))
    return Dependence(name, count, width, share, most, dtype)


def _results(probe: Probe, rows: Array, dy: Array, dtype: str, *, gradients: bool) -> dict[str, Array]:
    """y and dx as rows, and dscale, of one call."""
    x, arrays = probe.prepare(rows, dtype, None, **_parameters(probe))
    results = {"y": probe.layout.to_rows(probe.target.forward(x, **arrays), len(rows))}
    probe.check_time()
    if gradients:
        v = probe.layout.to_x(dy).astype(results["y"].dtype)
        for name, gradient in probe.target.all_gradients(v, x=x, **arrays).items():
            if name == "x" and gradient is not None:
                results["dx"] = probe.layout.to_rows(gradient, len(rows))
            elif name == "scale" and gradient is not None:
                results["dscale"] = gradient
    return results


def _parameters(probe: Probe) -> dict[str, Value]:
    """A gain that is not constant: a product with a power of two would hide the last bit."""
    if not probe.takes("scale"):
        return {}
    return {"scale": probe.parameter("scale", np.random.default_rng(25), 0.5, 2.0)}
