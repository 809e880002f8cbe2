"""The kernels on the OpenMP threads that PyTorch has running: a few microseconds to start, and none that compete.

GOMP_parallel is what GCC calls for a parallel region; that of a libgomp which is loaded starts the threads that this
libgomp keeps.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import lru_cache
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rmsnorm.cpu.kernels import gains, kernel
from rmsnorm.cpu.tasks import backward_rows, exact_forward_rows, forward_rows

_PROCESS: Final = os.getpid()


def gomp_parallel() -> int:
    """Its address; 0 where there is none, where RMSNORM_OPENMP=0, or in a forked process, where it would hang."""
    return _gomp_parallel() if os.getpid() == _PROCESS else 0


@lru_cache(maxsize=1)
def _gomp_parallel() -> int:
    if sys.platform != "linux" or os.environ.get("RMSNORM_OPENMP") == "0":
        return 0
    with open("/proc/self/maps") as maps:
        loaded = {line.split(maxsplit=5)[5].strip() for line in maps if "libgomp" in line}
    if len(loaded) != 1:
        return 0
    function = ctypes.CDLL(loaded.pop(), mode=os.RTLD_NOLOAD | os.RTLD_NOW).GOMP_parallel
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@kernel
def forward(
    settings: Any, formats: Any, parallel: int, threads: int, rows: int, step: int, scale: int, places: Any
) -> int:
    """As kernels.forward for all rows; returns nothing of interest."""
    gain, taken = gains(settings[0], scale), np.zeros(1, np.int64)
    _run(parallel, threads, forward_rows, (settings, formats, taken.ctypes.data, rows, step, gain.ctypes.data, places))
    return gain.size + taken.size  # which live until here


@kernel
def exact_forward(
    settings: Any, formats: Any, parallel: int, threads: int, rows: int, step: int, scale: int, places: Any
) -> int:
    gain, taken = gains(settings[0], scale), np.zeros(1, np.int64)
    _run(
        parallel,
        threads,
        exact_forward_rows,
        (settings, formats, taken.ctypes.data, rows, step, gain.ctypes.data, places),
    )
    return gain.size + taken.size


@kernel
def backward(
    settings: Any, formats: Any, parallel: int, threads: int, rows: int, step: int, scale: int, parts: int, places: Any
) -> int:
    """As kernels.backward for all rows; the parts of dscale and dbias have an order, whoever computes them."""
    gain, taken = gains(settings[0], scale), np.zeros(1, np.int64)
    given = (settings, formats, taken.ctypes.data, rows, step, gain.ctypes.data, parts, places)
    _run(parallel, threads, backward_rows, given)
    return gain.size + taken.size


@intrinsic
def _run(_: Any, parallel: Any, threads: Any, function: Any, given: Any) -> Any:
    """Call the compiled function with what is given, on every thread of a team."""
    compiled = function.dispatcher.get_compile_result(types.void(*given))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        context.active_code_library.add_linking_library(compiled.library)
        void_pointer = ir.IntType(8).as_pointer()
        outlined = ir.Function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [void_pointer]),
            builder.module.get_unique_name(f"{function.dispatcher.py_func.__name__}_outlined"),
        )
        outlined.linkage = "internal"
        data = cgutils.alloca_once_value(builder, args[3])
        inner = ir.IRBuilder(outlined.append_basic_block())
        values = cgutils.unpack_tuple(inner, inner.load(inner.bitcast(outlined.args[0], data.type)))
        target = context.declare_function(builder.module, compiled.fndesc)
        context.call_conv.call_function(inner, target, compiled.fndesc.restype, compiled.fndesc.argtypes, values)
        inner.ret_void()
        word = ir.IntType(32)
        region = ir.FunctionType(ir.VoidType(), [outlined.type, void_pointer, word, word])
        builder.call(
            builder.inttoptr(args[0], region.as_pointer()),
            [outlined, builder.bitcast(data, void_pointer), builder.trunc(args[1], word), ir.Constant(word, 0)],
        )
        return context.get_dummy_value()

    return types.void(parallel, threads, function, given), generate
