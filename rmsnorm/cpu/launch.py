"""From a checked call to the kernels: its launch, which is kept, and how many threads compute it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from rmsnorm.cpu import _native
from rmsnorm.specification.call import Call

_CHUNK: Final = 2**15  # elements: below, one thread is as fast as two
_POOL: Final = 2**21  # elements: likewise for threads that must be woken first

# How many threads there are, and the address of the function with which OpenMP starts them (see openmp.py), else 0.
Threads: TypeAlias = Callable[[], tuple[int, int]]

_noted: list[list[str]] = []  # what ``noted`` gave out


class Launch(NamedTuple):
    """What the kernels need for a call, apart from its arrays.

    ``native.forward`` and ``native.backward`` take each array by its name: an object with a buffer, as NumPy's arrays
    are, or an address; None or 0 if there is no such array. The caller keeps the memory alive. Rows of all arrays but
    x, h, mask and gate follow each other without a gap; ``x_step``, ``h_step``, ``mask_step`` and ``gate_step`` are the
    bytes from a row to the next, and ``mask_stride`` those to the next element. The backward pass computes the
    gradients that have an address, dscale and dbias in the formats of the parameters.
    """

    key: Any  # the arguments of ``launch_of``
    native: _native.Plan
    name: str
    rows: int
    n: int  # elements of a row, which has all that is normalised together and all parameters
    row_bytes: int  # of x
    reduced: tuple[int, ...]  # shape of 1 / rho
    small: bool  # one thread computes it
    chunked: bool  # whether the backward pass has several tasks

    def __reduce__(self) -> Any:
        """A copy of a layer of PyTorch that is parametrised copies what the layer keeps, too."""
        return launch_of, self.key

    def forward_threads(self, threads: Threads) -> tuple[int, int]:
        """``threads`` and ``gomp_parallel`` of ``native.forward``, of which ``noted`` hears."""
        if _noted:
            note("forward", self)
        return (1, 0) if self.small else self._threads(threads)

    def backward_threads(self, threads: Threads) -> tuple[int, int]:
        """The same for ``native.backward``."""
        if _noted:
            note("backward", self)
        return self._threads(threads) if self.chunked else (1, 0)

    def _threads(self, threads: Threads) -> tuple[int, int]:
        count, gomp_parallel = threads()
        return (1, 0) if self.rows * self.n < _POOL and not gomp_parallel else (count, gomp_parallel)


def note(kind: str, launch: Launch) -> None:
    """Says to ``noted`` that a kernel, forward or backward, computes a call."""
    for names in _noted:
        names.append(f"{kind}-{launch.name}")


@contextmanager
def noted() -> Iterator[list[str]]:
    """The names of the kernels that run within, of every thread; of XLA those that a program gets."""
    names: list[str] = []
    _noted.append(names)
    try:
        yield names
    finally:
        _noted.remove(names)


@lru_cache(maxsize=1024)
def launch_of(call: Call, scale: str | None, bias: str | None, gate: str | None = None) -> Launch:
    """The launch of a call for which there are kernels, with parameters and a gate of these dtypes. It is kept."""
    n = math.prod(call.shape[call.first_of_row :])
    rows = math.prod(call.shape) // n
    # rows of a task depend on the shape alone, and so does the order of the gradients' sums
    task_rows = max(-(-2 * _CHUNK // n), -(-rows // 64), min(rows, 16))
    variant = call.variant
    native = _native.Plan(
        rows=rows, n=call.n, k=call.k, groups=n // call.n,
        features=math.prod(call.shape[axis] for axis in call.feature_axes),
        spread=math.prod(call.shape[call.feature_axes[-1] + 1 :]), step=task_rows, eps=call.eps,
        offset=variant.scale_offset, position=variant.eps_position, x=call.x, y=call.result,
        norm=call.norm, product=call.product if call.norm else None, scale=scale, bias=bias, gate=gate,
        function=variant.gate_function if gate else None, gate_before=gate is not None and call.is_gated_before,
    )  # fmt: skip
    return Launch(
        key=(call, scale, bias, gate),
        native=native,
        name=_name_of(call, gate),
        rows=rows,
        n=n,
        row_bytes=n * np.dtype(call.x if call.x != "bfloat16" else "float16").itemsize,
        reduced=tuple(1 if axis in call.axes else size for axis, size in enumerate(call.shape)),
        small=rows * n < _CHUNK,
        chunked=rows > task_rows,
    )


def _name_of(call: Call, gate: str | None) -> str:
    gated = f"-{call.variant.gate_function}-{call.variant.gate_position}" if gate else ""
    return f"{call.x}-{call.result}{gated}"


def level() -> str:
    """The processors that the kernels are compiled for."""
    return str(_native.level()).replace("_", "-")
