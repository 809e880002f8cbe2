"""From a checked call to the kernels: what they take, in how many chunks, on which threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numba import int64, typeof

from rmsnorm.call import Call
from rmsnorm.cpu import exact, kernels, openmp, tasks
from rmsnorm.cpu.formats import CODE, STORAGE
from rmsnorm.cpu.kernels import SETTINGS
from rmsnorm.cpu.threads import share_out

_CHUNK: Final = 2**15  # elements: below, one thread is as fast as two
_POOL: Final = 2**21  # below, so it is where threads have to be woken
_LARGE: Final = 2**21  # huge pages pay
_NARROW: Final = 2**8  # elements of a row, which take no longer than a root: the next one is found in advance
_CACHED: Final = 2**20  # up to here wider rows gain by it, too; beyond, memory is what they wait for

Crew: TypeAlias = Callable[[], tuple[int, int]]  # how many threads, and how OpenMP starts them: see openmp.py; else 0


def address(array: np.ndarray | None) -> int:
    return 0 if array is None else int(array.__array_interface__["data"][0])


class Plan(NamedTuple):
    """What the kernels take for a call, whatever its values."""

    forward: Callable[..., None]
    exact: bool
    settings: Any
    formats: tuple[Any, Any]
    rows: int
    n: int
    x_bytes: int  # of a row
    reduced: tuple[int, ...]  # shape of 1 / rho
    chunk: int  # rows of a backward task; of the shape alone, and so is the order in which gradients are summed
    large: bool

    def run_forward(self, crew: Crew, owners: object, *places: int) -> None:
        """y, h and 1 / rho: the places, whose memory is of the owners, are those of kernels.forward, from x on."""
        size = self.rows * self.n
        threads, parallel = crew() if size >= _CHUNK else (1, 0)
        if threads < 2 or (size < _POOL and not parallel):
            self.forward(self.settings, self.formats, 0, self.rows, 0, *places)
            return
        step = self.step(threads)
        if parallel:
            run = openmp.exact_forward if self.exact else openmp.forward
            run(self.settings, self.formats, parallel, threads, self.rows, step, places[3], places)
            return
        work = tasks.exact_forward_rows if self.exact else tasks.forward_rows
        gains, taken = self._prepared(places[3])

        def task(_: int, __: object = owners) -> None:
            work(self.settings, self.formats, address(taken), self.rows, step, address(gains), places)

        share_out(task, threads, threads)

    def step(self, threads: int) -> int:
        """Rows that one of so many threads takes at a time in the forward pass."""
        return max(-(-_CHUNK // self.n), -(-self.rows // (8 * threads)))

    def run_backward(self, crew: Crew, owners: object, *places: int) -> None:
        """dx; and where their addresses are not 0 dscale and dbias, in the formats of the parameters.

        The places, whose memory is of the owners, are those of kernels.backward, from x on.
        """
        count = -(-self.rows // self.chunk)
        if count == 1:
            kernels.backward(self.settings, self.formats, 0, self.rows, 0, 0, *places)
            return
        threads, parallel = crew()
        if threads < 2 or (self.rows * self.n < _POOL and not parallel):
            kernels.backward_in_order(self.settings, self.formats, self.rows, self.chunk, places)
            return
        parts = np.empty((count, 2, self.n))
        if parallel:
            openmp.backward(
                self.settings, self.formats, parallel, threads, self.rows, self.chunk, places[2], address(parts), places
            )
        else:
            gains, taken = self._prepared(places[2])
            given = (self.rows, self.chunk, address(gains), address(parts), places)

            def task(_: int, __: object = (owners, gains, parts)) -> None:
                tasks.backward_rows(self.settings, self.formats, address(taken), *given)

            share_out(task, threads, threads)
        kernels.combine(self.settings, address(parts), count, *places[-2:])

    def _prepared(self, scale: int) -> tuple[np.ndarray, np.ndarray]:
        """The gains, and where threads count the parts that they have taken."""
        gains = np.empty(self.n)
        kernels.prepare(self.settings, scale, address(gains))
        return gains, np.zeros(1, np.int64)


@lru_cache(maxsize=1024)
def plan(call: Call, scale: str | None, bias: str | None) -> Plan:
    """For a call that is supported, with parameters of those dtypes."""
    settings = np.zeros(1, SETTINGS)
    n, rows = call.n, math.prod(call.shape[: -len(call.axes)])
    values = {
        "n": n,
        "k": call.k,
        "position": ("inside", "outside", "clamp").index(call.variant.eps_position),
        "eps": call.eps,
        "offset": call.variant.scale_offset,
        "variance": call.variant.statistic == "variance",
        "before_scale": call.norm is not None,
        "norm": CODE[call.norm],
        "product": CODE[call.product],
        "scale": CODE[scale],
        "bias": CODE[bias],
        "lead": n <= _NARROW or (n <= 8 * _NARROW and rows * n <= _CACHED),
        "x_bytes": np.dtype(STORAGE[call.x]).itemsize,
        "y_bytes": np.dtype(STORAGE[call.result]).itemsize,
    }
    narrow = call.x == "bfloat16" and bias is None
    if call.norm is None:
        values["single"] = narrow and call.result == "bfloat16"
    else:
        rounds = call.norm == "bfloat16" and call.product in ("bfloat16", "float32")
        values["single"] = narrow and rounds and call.result in ("bfloat16", call.product)
    for name, value in values.items():
        settings[name] = value
    kernel = exact.forward if "float64" in (call.x, call.result) else kernels.forward
    return Plan(
        forward=_entry(kernel, settings, formats(call.x, call.result)),
        exact=kernel is exact.forward,
        settings=settings,
        formats=formats(call.x, call.result),
        rows=rows,
        n=n,
        x_bytes=n * int(values["x_bytes"]),
        reduced=tuple(1 if axis in call.axes else size for axis, size in enumerate(call.shape)),
        chunk=max(-(-2 * _CHUNK // n), -(-rows // 64), min(rows, 16)),
        large=rows * n >= _LARGE,
    )


def formats(x: str, y: str) -> tuple[Any, Any]:
    """Numbers of their types, by which kernels know in what formats x and y are.

    Their types are in the names of compiled functions. That of a record is not, but its number in the process that
    compiled it: what two processes left on disk for two formats a third would take for one and the same.
    """
    return STORAGE[x](0), STORAGE[y](0)


def _entry(kernel: Any, settings: Any, formats: Any) -> Callable[..., None]:
    """What the dispatcher of numba would call, by itself: half a microsecond less."""
    rest = kernel.py_func.__code__.co_argcount - 2
    entry: Callable[..., None] = kernel.compile((typeof(settings), typeof(formats), *[int64] * rest))
    return entry
