"""What compiled code asks of the system without Python: memory, huge pages, a core, the rules of the processor."""

from __future__ import annotations

import platform
import sys
from typing import Any, Final

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from rmsnorm.cpu.memory import LEAST, MADV_HUGEPAGE, PAGE

_IS_X86: Final = platform.machine() in ("x86_64", "AMD64")
_IS_ARM: Final = platform.machine() in ("aarch64", "arm64")
# MXCSR (x86) or FPCR (ARM) of a new thread. XLA's threads have other values: they take subnormal numbers as 0.
STANDARD_CONTROL: Final = 0x1F80 if _IS_X86 else 0


@intrinsic
def allocate(_: Any, size: Any) -> Any:
    """The address of new memory of so many bytes, until it is freed. Raises MemoryError."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(context.nrt.allocate(builder, args[0]), ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic
def free(_: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        context.nrt.free(builder, builder.inttoptr(args[0], ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def exchange_control(_: Any, value: Any) -> Any:
    """Sets the thread's control register of floating-point arithmetic, on x86 and ARM. Returns what it was before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _IS_ARM:
            value = ir.IntType(64)
            read, write = ir.FunctionType(value, []), ir.FunctionType(ir.VoidType(), [value])
            former = builder.call(cgutils.get_or_insert_function(builder.module, read, "llvm.aarch64.get.fpcr"), [])
            builder.call(cgutils.get_or_insert_function(builder.module, write, "llvm.aarch64.set.fpcr"), [args[0]])
            return former
        if not _IS_X86:
            return args[0]
        word = ir.IntType(32)
        memory = cgutils.alloca_once(builder, word)
        access = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()])
        pointer = builder.bitcast(memory, ir.IntType(8).as_pointer())
        for name in ("stmxcsr", "ldmxcsr"):
            builder.call(cgutils.get_or_insert_function(builder.module, access, f"llvm.x86.sse.{name}"), [pointer])
            if name == "stmxcsr":
                former = builder.load(memory)
                builder.store(builder.trunc(args[0], word), memory)
        return builder.zext(former, ir.IntType(64))

    return types.int64(types.int64), generate


@njit
def advise(address: int, size: int) -> None:
    """Asks the system for huge pages, as ``advise`` of memory.py does."""
    if address and size >= LEAST:
        start = (address + PAGE - 1) // PAGE * PAGE
        _madvise(start, (address + size - start) // PAGE * PAGE)


@intrinsic
def _madvise(_: Any, address: Any, size: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if sys.platform == "linux":
            word = ir.IntType(64)
            function = ir.FunctionType(ir.IntType(32), [word, word, ir.IntType(32)])
            advice = ir.Constant(ir.IntType(32), MADV_HUGEPAGE)
            builder.call(cgutils.get_or_insert_function(builder.module, function, "madvise"), [*args, advice])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def yield_core(_: Any) -> Any:
    """Lets another thread use this core."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if sys.platform != "win32":
            function = ir.FunctionType(ir.IntType(32), [])
            builder.call(cgutils.get_or_insert_function(builder.module, function, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate
