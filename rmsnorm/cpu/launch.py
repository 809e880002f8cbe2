"""From a checked call to the kernels: their settings, the size of a chunk, and the threads that take the chunks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numba import int64, typeof

from rmsnorm.call import Call
from rmsnorm.cpu import openmp, tasks
from rmsnorm.cpu.backward import ARGUMENTS as BACKWARD
from rmsnorm.cpu.backward import backward, backward_in_order
from rmsnorm.cpu.formats import STORAGE
from rmsnorm.cpu.forward import ARGUMENTS as FORWARD
from rmsnorm.cpu.forward import forward
from rmsnorm.cpu.parameters import combine, prepare
from rmsnorm.cpu.settings import settings_of
from rmsnorm.cpu.threads import share_out

_CHUNK: Final = 2**15  # elements: below, one thread is as fast as two
POOL: Final = 2**21  # elements: likewise for threads that must be woken first
_LARGE: Final = 2**21  # elements: from here on, huge pages are faster

_FORWARD_SCALE: Final = FORWARD.index("scale")
_BACKWARD_SCALE, _DSCALE, _DBIAS = (BACKWARD.index(name) for name in ("scale", "dscale", "dbias"))

# How many threads there are, and the address of the function with which OpenMP starts them (see openmp.py), else 0.
Threads: TypeAlias = Callable[[], tuple[int, int]]


def address(array: np.ndarray | None) -> int:
    return 0 if array is None else int(array.__array_interface__["data"][0])


class Plan(NamedTuple):
    """What the kernels need for a call, apart from its arrays."""

    settings: Any
    formats: tuple[Any, Any]
    rows: int
    n: int
    x_bytes: int  # of a row
    reduced: tuple[int, ...]  # shape of 1 / rho
    chunk: int  # rows of a backward task: it depends on the shape alone, and so does the order of the gradients' sums
    large: bool
    forward: Callable[..., None]  # compiled for these formats

    def run_forward(self, threads: Threads, owners: object, *arguments: int) -> None:
        """Computes y, h and 1 / rho.

        ``arguments`` are those of the kernel ``forward`` from x on. ``owners`` keep the memory at the addresses alive.
        """
        size = self.rows * self.n
        count, gomp_parallel = threads() if size >= _CHUNK else (1, 0)
        if count < 2 or (size < POOL and not gomp_parallel):
            self.forward(self.settings, self.formats, 0, self.rows, 0, *arguments)
            return
        step, scale = self.step(count), arguments[_FORWARD_SCALE]
        if gomp_parallel:
            openmp.forward(self.settings, self.formats, gomp_parallel, count, self.rows, step, scale, arguments)
            return
        gains, next_chunk = self._prepared(scale)

        def task(_: int, __: object = owners) -> None:
            tasks.forward_rows(
                self.settings, self.formats, address(next_chunk), self.rows, step, address(gains), arguments
            )

        share_out(task, count, count)

    def step(self, threads: int) -> int:
        """How many rows one of so many threads takes at a time in the forward pass."""
        return max(-(-_CHUNK // self.n), -(-self.rows // (8 * threads)))

    def run_backward(self, threads: Threads, owners: object, *arguments: int) -> None:
        """Computes dx; and dscale and dbias in the formats of the parameters, unless their addresses are 0.

        ``arguments`` are those of the kernel ``backward`` from h on; ``owners`` are as in ``run_forward``.
        """
        chunks = -(-self.rows // self.chunk)
        if chunks == 1:
            backward(self.settings, self.formats, 0, self.rows, 0, 0, *arguments)
            return
        count, gomp_parallel = threads()
        if count < 2 or (self.rows * self.n < POOL and not gomp_parallel):
            backward_in_order(self.settings, self.formats, self.rows, self.chunk, arguments)
            return
        sums, scale = np.empty((chunks, 2, self.n)), arguments[_BACKWARD_SCALE]
        work = self.rows, self.chunk
        if gomp_parallel:
            openmp.backward(self.settings, self.formats, gomp_parallel, count, *work, scale, address(sums), arguments)
        else:
            gains, next_chunk = self._prepared(scale)

            def task(_: int, __: object = (owners, gains, sums)) -> None:
                tasks.backward_rows(
                    self.settings, self.formats, address(next_chunk), *work, address(gains), address(sums), arguments
                )

            share_out(task, count, count)
        combine(self.settings, address(sums), chunks, arguments[_DSCALE], arguments[_DBIAS])

    def _prepared(self, scale: int) -> tuple[np.ndarray, np.ndarray]:
        """The gains, and the counter of the chunks that threads have taken."""
        gains = np.empty(self.n)
        prepare(self.settings, scale, address(gains))
        return gains, np.zeros(1, np.int64)


@lru_cache(maxsize=1024)
def plan(call: Call, scale: str | None, bias: str | None) -> Plan:
    """The plan of a call that ``supports`` accepts, with parameters of these dtypes."""
    n, rows = call.n, math.prod(call.shape[: -len(call.axes)])
    settings, like = settings_of(call, rows, scale, bias), formats(call.x, call.result)
    return Plan(
        settings=settings,
        formats=like,
        rows=rows,
        n=n,
        x_bytes=n * int(settings[0]["x_bytes"]),
        reduced=tuple(1 if axis in call.axes else size for axis, size in enumerate(call.shape)),
        chunk=max(-(-2 * _CHUNK // n), -(-rows // 64), min(rows, 16)),
        large=rows * n >= _LARGE,
        forward=_compiled(forward, settings, like),
    )


def formats(x: str, y: str) -> tuple[Any, Any]:
    """A number of x's type and one of y's, from whose types the kernels know the formats.

    These types are part of the names of compiled functions. The type of a record is not: its name has a number that
    the compiling process counts. So a third process would mix up what two processes left on disk for two formats.
    """
    return STORAGE[x](0), STORAGE[y](0)


def _compiled(kernel: Any, settings: Any, formats: Any) -> Callable[..., None]:
    """The compiled function that numba's dispatcher would call: calling it directly saves half a microsecond."""
    addresses = kernel.py_func.__code__.co_argcount - 2
    entry: Callable[..., None] = kernel.compile((typeof(settings), typeof(formats), *[int64] * addresses))
    return entry
