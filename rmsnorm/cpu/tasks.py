"""What one of many threads does: it takes the next chunk of rows until none are left.

No result depends on which thread takes which chunk. ``next_chunk`` is the address of a counter that all threads share.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rmsnorm.cpu import kernel
from rmsnorm.cpu.backward import backward
from rmsnorm.cpu.forward import forward


@kernel
def forward_rows(
    settings: Any, formats: Any, next_chunk: int, rows: int, step: int, prepared_gains: int, arguments: Any
) -> None:
    """Chunks of ``step`` rows of ``forward``, with its last arguments."""
    start = fetch_add(next_chunk, 1) * step
    while start < rows:
        forward(settings, formats, start, min(start + step, rows), prepared_gains, *arguments)
        start = fetch_add(next_chunk, 1) * step


@kernel
def backward_rows(
    settings: Any, formats: Any, next_chunk: int, rows: int, step: int, prepared_gains: int, sums: int, arguments: Any
) -> None:
    """Likewise of ``backward``; each chunk has its own place in ``sums``."""
    chunk = fetch_add(next_chunk, 1)
    while chunk * step < rows:
        start, chunk_sums = chunk * step, sums + chunk * 16 * settings[0].n
        backward(settings, formats, start, min(start + step, rows), prepared_gains, chunk_sums, *arguments)
        chunk = fetch_add(next_chunk, 1)


@intrinsic
def fetch_add(_: Any, counter: Any, amount: Any) -> Any:
    """The number at an address; the amount is added to it, in one step that no other thread can interrupt."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], ir.IntType(64).as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate
