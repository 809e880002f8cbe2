"""The parameters in compiled code: gains are computed once for all rows, gradients are summed and written once."""

from __future__ import annotations

from typing import Any

from rmsnorm.cpu.formats import LOAD, STORE, grid, rounded, view
from rmsnorm.cpu.settings import STORAGE
from rmsnorm.cpu.system import settings_at


def compiled(name: str) -> Any:
    """The function that reads and writes parameters of a format; named ``offset``, the one that adds o to the gains."""
    return _offset if name == "offset" else _mover(name)


def _mover(name: str) -> Any:
    load, store, like = LOAD[name], STORE[name], STORAGE[name](0)

    def move(address: int, values: int, n: int, count: int) -> int:
        """Reads n numbers to float64; or writes sums of float64, each rounded once, if there is a ``count``.

        These sums are over so many chunks of rows, added from the first chunk to the last. A chunk has two of them.
        """
        stored, total = view(address, n, like), view(values, n, 0.0)
        if count == 0:
            for j in range(n):
                total[j] = load(stored[j])
            return 0
        for i in range(1, count):
            sums = view(values + i * 16 * n, n, 0.0)
            for j in range(n):
                total[j] += sums[j]
        for j in range(n):
            store(stored, j, total[j])
        return 0

    return move


def _offset(settings: int, gains: int, is_backward: int) -> int:
    """Adds o to scale: rounded if the variant rounds each operation, but the gradients are those of the formula."""
    s = settings_at(settings)
    n, offset = s.n * s.groups, s.offset
    gain = view(gains, n, 0.0)
    for j in range(n):
        gain[j] += offset
    if s.before_scale and not is_backward:
        product = grid(s.product)
        for j in range(n):
            gain[j] = rounded(gain[j], product)
    return 0
