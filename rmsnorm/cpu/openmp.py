"""The kernels on the OpenMP threads that PyTorch keeps running: they start in a few microseconds, and none compete.

GCC compiles a parallel region to a call of GOMP_parallel. That of the libgomp that PyTorch has loaded starts the
threads of this libgomp.
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

from rmsnorm.cpu import kernel
from rmsnorm.cpu.parameters import gains
from rmsnorm.cpu.tasks import backward_rows, forward_rows

_PROCESS: Final = os.getpid()


def gomp_parallel() -> int:
    """The address of GOMP_parallel.

    0 if no libgomp is loaded, or more than one; with RMSNORM_OPENMP=0; and in a forked process, where it would hang.
    """
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
    settings: Any, formats: Any, gomp_parallel: int, threads: int, rows: int, step: int, scale: int, arguments: Any
) -> int:
    """The forward pass of all rows."""
    gain, next_chunk = gains(settings[0], scale), np.zeros(1, np.int64)
    passed = (settings, formats, next_chunk.ctypes.data, rows, step, gain.ctypes.data, arguments)
    _run(gomp_parallel, threads, forward_rows, passed)
    return gain.size + next_chunk.size  # this keeps both arrays alive until here


@kernel
def backward(
    settings: Any, formats: Any, gomp_parallel: int, threads: int, rows: int, step: int, scale: int, sums: int,
    arguments: Any,
) -> int:  # fmt: skip
    """The backward pass of all rows. Each chunk has its own place in ``sums``, whichever thread computes it."""
    gain, next_chunk = gains(settings[0], scale), np.zeros(1, np.int64)
    passed = (settings, formats, next_chunk.ctypes.data, rows, step, gain.ctypes.data, sums, arguments)
    _run(gomp_parallel, threads, backward_rows, passed)
    return gain.size + next_chunk.size


@intrinsic
def _run(_: Any, gomp_parallel: Any, threads: Any, function: Any, passed: Any) -> Any:
    """Calls a compiled function with the same arguments on every thread of a parallel region."""
    compiled = function.dispatcher.get_compile_result(types.void(*passed))

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

    return types.void(gomp_parallel, threads, function, passed), generate
