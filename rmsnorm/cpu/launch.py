"""From a checked call to the kernels: its launch, which is kept, and how many threads compute it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from rmsnorm.cpu import _native
from rmsnorm.specification.call import Call

_CHUNK: Final = 2**15  # elements: below, one thread is as fast as two
_POOL: Final = 2**21  # elements: likewise for threads that must be woken first
_FEW_ROWS: Final = 2**19  # elements of one task of the backward pass, from which on threads share its rows: driver.cpp

# How many threads there are, and the address of the function with which OpenMP starts them (see openmp.py), else 0.
Threads: TypeAlias = Callable[[], tuple[int, int]]

# The lists that ``noted`` gave out in this thread, the outermost first.
_listening: ContextVar[tuple[list[str], ...]] = ContextVar("_listening", default=())


class Launch(NamedTuple):
    """What the kernels need for a call, apart from its arrays.

    ``native.forward`` and ``native.backward`` take each array by its name: an object with a buffer, as NumPy's arrays
    are, or an address; None or 0 if there is no such array. The caller keeps the memory alive. Rows of all arrays but
    x and h follow each other without a gap; ``x_step`` and ``h_step`` are the bytes from a row to the next. Gain and
    bias have an element for each of a row. The backward pass computes the gradients that have an address, dscale and
    dbias in the formats of the parameters.
    """

    key: Any  # the arguments of ``launch_of``
    native: _native.Plan
    name: str
    rows: int
    n: int  # elements of a row, which has all that is normalised together and all parameters
    row_bytes: int  # of x
    reduced: tuple[int, ...]  # shape of 1 / rho
    small: bool  # one thread computes it
    is_shared: bool  # whether several threads may compute the backward pass

    def __reduce__(self) -> Any:
        """A copy of a layer of PyTorch that is parametrised copies what the layer keeps, too."""
        return launch_of, self.key

    def forward_threads(self, threads: Threads) -> tuple[int, int]:
        """``threads`` and ``gomp_parallel`` of ``native.forward``, of which ``noted`` hears."""
        if _listening.get():
            note("forward", self)
        return (1, 0) if self.small else self._threads(threads)

    def backward_threads(self, threads: Threads) -> tuple[int, int]:
        """The same for ``native.backward``."""
        if _listening.get():
            note("backward", self)
        return self._threads(threads) if self.is_shared else (1, 0)

    def _threads(self, threads: Threads) -> tuple[int, int]:
        count, gomp_parallel = threads()
        return (1, 0) if self.rows * self.n < _POOL and not gomp_parallel else (count, gomp_parallel)


def note(kind: str, launch: Launch) -> None:
    """Says to ``noted`` that a kernel, forward or backward, computes a call."""
    for names in _listening.get():
        names.append(f"{kind}-{launch.name}")


@contextmanager
def noted() -> Iterator[list[str]]:
    """The names of the kernels that this thread runs within; of XLA those that a program gets.

    Of another thread it hears only what runs in a copy of this thread's context, as ``asyncio.to_thread`` makes one.
    """
    names: list[str] = []
    token = _listening.set((*_listening.get(), names))
    try:
        yield names
    finally:
        _listening.reset(token)


@lru_cache(maxsize=1024)
def launch_of(call: Call, scale: str | None, bias: str | None) -> Launch:
    """The launch of a call for which there are kernels, with parameters of these dtypes. It is kept.

    Raises:
        ValueError: the parameters have fewer elements than a row, or the kernels lack a dtype of the call.
    """
    n = math.prod(call.shape[call.first_of_row :])
    rows = math.prod(call.shape) // n
    if (scale or bias) and math.prod(call.shape[axis] for axis in call.feature_axes) != n:
        raise ValueError(f"the kernels need parameters of all {n} elements of a row")  # they would read beyond the end
    # rows of a task depend on the shape alone, and so does the order of the gradients' sums
    most_rows = max(-(-_CHUNK // n), -(-rows // 64), min(rows, 16))
    task_rows = -(-rows // -(-rows // most_rows))  # tasks of about one size
    variant = call.variant
    native = _native.Plan(
        rows=rows, n=call.n, k=call.k, groups=n // call.n, step=task_rows, eps=call.eps, offset=variant.scale_offset,
        position=variant.eps_position, x=call.x_dtype, y=call.result_dtype, norm=call.norm_dtype,
        product=call.product_dtype if call.norm_dtype else None, scale=scale, bias=bias,
    )  # fmt: skip
    return Launch(
        key=(call, scale, bias),
        native=native,
        name=f"{call.x_dtype}-{call.result_dtype}",
        rows=rows,
        n=n,
        row_bytes=n * np.dtype(call.x_dtype if call.x_dtype != "bfloat16" else "float16").itemsize,
        reduced=tuple(1 if axis in call.axes else size for axis, size in enumerate(call.shape)),
        small=rows * n < _CHUNK,
        is_shared=rows > task_rows or (rows > 1 and rows * n >= _FEW_ROWS),  # see driver.cpp
    )


def level() -> str:
    """The processors that the kernels are compiled for."""
    return str(_native.level()).replace("_", "-")
