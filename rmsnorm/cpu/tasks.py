"""What one of many threads does: it takes the next rows until none are left. No result depends on who took which."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rmsnorm.cpu import exact, kernels
from rmsnorm.cpu.kernels import kernel


@kernel
def forward_rows(settings: Any, formats: Any, taken: int, rows: int, step: int, ready: int, places: Any) -> None:
    """Those that nobody has taken, step by step."""
    start = add(taken, 1) * step
    while start < rows:
        kernels.forward(settings, formats, start, min(start + step, rows), ready, *places)
        start = add(taken, 1) * step


@kernel
def exact_forward_rows(settings: Any, formats: Any, taken: int, rows: int, step: int, ready: int, places: Any) -> None:
    start = add(taken, 1) * step
    while start < rows:
        exact.forward(settings, formats, start, min(start + step, rows), ready, *places)
        start = add(taken, 1) * step


@kernel
def backward_rows(
    settings: Any, formats: Any, taken: int, rows: int, step: int, ready: int, parts: int, places: Any
) -> None:
    index = add(taken, 1)
    while index * step < rows:
        part = parts + index * 16 * settings[0].n
        kernels.backward(settings, formats, index * step, min((index + 1) * step, rows), ready, part, *places)
        index = add(taken, 1)


@intrinsic
def add(_: Any, counter: Any, amount: Any) -> Any:
    """The number at that address, to which the amount is added for whoever comes next."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], ir.IntType(64).as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate
