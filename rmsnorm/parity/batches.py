"""Whether the bits of a row depend on how many rows there are, or differ between equal calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from rmsnorm.accuracy.ulps import ulps
from rmsnorm.parity.cases import Array, Case, Data
from rmsnorm.parity.comparison import Comparison
from rmsnorm.parity.fitting import adapted_data
from rmsnorm.parity.judge import failed
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import Target

BATCHES: Final = "batches"
_DIFFERENT: Final = 7  # rows, which are repeated: an odd number, so that each of them is at every kind of place
_COUNTS: Final = (2, 7, 64, 255, 256, 257, 1024, 4096)  # of rows in a call,
_FEWER: Final = (7, 257, 4096)  # and where a library compiles each number of them
_WIDTHS: Final = (64, 1024, 4096)  # programs of one block sum narrow rows in one way


def batches(
    target: Target, variant: Variant, types: Sequence[str], group_size: int | None, *, gradients: bool
) -> list[Comparison]:
    """On y, dx and dscale: whether a row has the same bits alone and among others, and two equal calls have.

    Raises:
        TargetError: the target raised.
    """
    wrong: dict[str, Comparison] = {}
    for dtype in [dtype for dtype in ("float32", "bfloat16") if dtype in types] or types[:1]:
        for width in _WIDTHS:
            sized, data = adapted_data(target, Case(BATCHES, (_DIFFERENT, width)), variant, dtype, group_size)
            for entry in _dependences(sized, data, gradients):
                wrong.setdefault(entry.quantity, entry)
    names = [name for name in ("x", "scale") if name == "x" or name in target.arguments]
    quantities = ("y", *(f"d{name}" for name in names if gradients))
    return [wrong.get(name, Comparison(name, 0.0, 0.0, 1.0, 0.0, True, "")) for name in quantities]


def _dependences(target: Target, data: Data, gradients: bool) -> Iterator[Comparison]:
    alone = [_results(target, data, np.array([row]), gradients) for row in range(_DIFFERENT)]
    each = {name: np.concatenate([one[name] for one in alone]) for name in alone[0] if name != "dscale"}
    where = f"in {data.x.dtype.name} with {data.x.shape[-1]} elements in a row"
    for count in _FEWER if target.bridge.compiles else _COUNTS:
        order = np.arange(count) % _DIFFERENT
        first, again = (_results(target, data, order, gradients) for _ in range(2))
        for name, got in first.items():
            if got.tobytes() != again[name].tobytes():
                words = f"{name} is not the same in two equal calls: {_apart(got, again[name])} {where}"
                yield failed(name, words)
            elif name in each and got.tobytes() != (want := each[name][order]).tobytes():
                words = f"{name} of a row depends on how many rows there are: from {count} rows on, "
                yield failed(name, f"{words}{_apart(got, want)} {where}")


def _results(target: Target, data: Data, order: Array, gradients: bool) -> dict[str, Array]:
    """y, dx and dscale of a call with some of the rows."""
    named = {"x": data.x[order], "scale": data.scale, "bias": data.bias}
    named["gate"] = None if data.gate is None else data.gate[order]
    arrays = {name: array for name, array in named.items() if array is not None}
    leaves = [name for name in ("x", "scale") if name in arrays] if gradients else []
    with target.evaluating():
        called = target.called(arrays, leaves)
        of_leaves = called.gradients(data.dy[order]) if leaves else {}
    got = {"y": called.y, **{f"d{name}": gradient for name, gradient in of_leaves.items()}}
    return {name: array for name, array in got.items() if array is not None}


def _apart(got: Array, want: Array) -> str:
    distances = ulps(got, want)
    return f"{100 * float(np.mean(distances != 0)):.2g} % of elements, at most {distances.max():.0f} ulp"
