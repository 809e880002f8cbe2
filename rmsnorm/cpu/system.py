"""What compiled code does without Python: memory, other compiled code, a core, the processor's rules."""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rmsnorm.cpu import target
from rmsnorm.cpu.formats import inlined, view
from rmsnorm.cpu.settings import JOB, SETTINGS, TABLE

# MXCSR (x86) or FPCR (ARM) of a new thread. XLA's threads have other values: they take subnormal numbers as 0.
STANDARD_CONTROL: Final = 0x1F80 if target.IS_X86 else 0
_LIKE: Final = np.zeros(1, SETTINGS)  # only its type is read
_WORD: Final = ir.IntType(64)

malloc = types.ExternalFunction("malloc", types.int64(types.int64))
free = types.ExternalFunction("free", types.void(types.int64))


LINE: Final = 64  # bytes of a line of the cache: a vector that begins in the middle of one takes longer to read


@inlined
def aligned(address: int) -> Any:
    """The next address at which a line of the cache begins."""
    return (address + LINE - 1) // LINE * LINE


@inlined
def settings_at(address: int) -> Any:
    return view(address, 1, _LIKE[0])[0]


@intrinsic
def word(_: Any, address: Any, index: Any) -> Any:
    """The 64-bit word of so high an index at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.gep(builder.inttoptr(args[0], _WORD.as_pointer()), [args[1]]))

    return types.int64(types.int64, types.int64), generate


@intrinsic
def set_word(_: Any, address: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], builder.gep(builder.inttoptr(args[0], _WORD.as_pointer()), [args[1]]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@inlined
def copy_words(source: int, target: int, count: int) -> None:
    for i in range(count):
        set_word(target, i, word(source, i))


@intrinsic
def fetch_add(_: Any, counter: Any, amount: Any) -> Any:
    """The number at an address; the amount is added to it, in one step that no other thread can interrupt."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _WORD.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def new_words(_: Any) -> Any:
    """The address of as many words as a job has, in the memory of the function that is compiled."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(_WORD, JOB)), _WORD)

    return types.int64(), generate


@intrinsic
def table(_: Any) -> Any:
    """The address of ``machine_code.table``, also in code that another process compiled."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name, variables = TABLE, builder.module.globals
        variable = variables[name] if name in variables else ir.GlobalVariable(builder.module, _WORD, name)
        return builder.ptrtoint(variable, _WORD)

    return types.int64(), generate


@intrinsic
def call_c(_: Any, function: Any, *arguments: Any) -> Any:
    """Calls the C function at an address with integers. Returns the integer that it returns."""
    words = types.StarArgTuple.from_types([types.int64] * len(arguments))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = cgutils.unpack_tuple(builder, args[1])
        pointer = builder.inttoptr(args[0], ir.FunctionType(_WORD, [_WORD] * len(values)).as_pointer())
        return builder.call(pointer, values)

    return types.int64(types.int64, words), generate


@intrinsic
def exchange_control(_: Any, value: Any) -> Any:
    """Sets the thread's control register of floating-point arithmetic, on x86 and ARM. Returns what it was before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if target.IS_ARM:
            read, write = ir.FunctionType(_WORD, []), ir.FunctionType(ir.VoidType(), [_WORD])
            former = builder.call(cgutils.get_or_insert_function(builder.module, read, "llvm.aarch64.get.fpcr"), [])
            builder.call(cgutils.get_or_insert_function(builder.module, write, "llvm.aarch64.set.fpcr"), [args[0]])
            return former
        if not target.IS_X86:
            return args[0]
        half = ir.IntType(32)
        memory = cgutils.alloca_once(builder, half)
        access = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()])
        pointer = builder.bitcast(memory, ir.IntType(8).as_pointer())
        for name in ("stmxcsr", "ldmxcsr"):
            builder.call(cgutils.get_or_insert_function(builder.module, access, f"llvm.x86.sse.{name}"), [pointer])
            if name == "stmxcsr":
                former = builder.load(memory)
                builder.store(builder.trunc(args[0], half), memory)
        return builder.zext(former, _WORD)

    return types.int64(types.int64), generate


@intrinsic
def yield_core(_: Any) -> Any:
    """Lets another thread use this core."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if sys.platform != "win32":
            function = ir.FunctionType(ir.IntType(32), [])
            builder.call(cgutils.get_or_insert_function(builder.module, function, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate
