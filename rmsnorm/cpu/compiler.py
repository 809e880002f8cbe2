"""Compiles functions by numba and LLVM, for a process or for a library."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from llvmlite import binding as llvm

from rmsnorm.cpu import target
from rmsnorm.cpu.settings import TABLE

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()


def object_of(symbol: str, describe: Callable[[], Any], table: int) -> bytes:
    """The object file of the function that ``describe`` returns, under a name.

    numba loads it, too, with the table at that address.
    """
    from numba import cfunc, int64

    llvm.add_symbol(TABLE, table)
    collects = gc.isenabled()
    gc.disable()  # a tenth of the time would go into it
    try:
        function = describe()
        compiled = cfunc(int64(*[int64] * function.__code__.co_argcount), error_model="numpy")(function)
    finally:
        if collects:
            gc.enable()
    ir = llvm.parse_assembly(compiled.inspect_llvm())
    ir.get_function(compiled.native_name).name = symbol
    machine = _machine()
    _drop_exceptions(symbol, ir, machine)
    return bytes(machine.emit_object(ir))


def _drop_exceptions(symbol: str, ir: Any, machine: Any) -> None:
    """Removes what prints an exception with the help of numba. Nothing that is compiled may raise one."""
    for function in ir.functions:
        if not function.is_declaration and function.name != symbol:
            function.linkage = "internal"  # nothing else can then replace it
    for variable in ir.global_variables:
        if not variable.is_declaration:
            variable.linkage = "internal"  # and a library does not list it
    passes = llvm.create_new_module_pass_manager()
    passes.add_ipsccp_pass()
    passes.add_simplify_cfg_pass()
    passes.add_strip_dead_prototype_pass()
    passes.run(ir, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    missing = [function.name for function in ir.functions if function.name.startswith(("numba_", "NRT_"))]
    if missing:
        raise AssertionError(f"{symbol} calls {missing}, which a process without numba does not have")


def table_object(words: int, mark: str) -> bytes:
    """The object file with what a library has beside its functions: the table of so many words, all 0, and its mark."""
    text = f"""target triple = "{llvm.get_process_triple()}"
    @{TABLE} = global [{words} x i64] zeroinitializer, align 64
    @{mark} = global i64 0
    """
    return bytes(_machine().emit_object(llvm.parse_assembly(text)))


def load(symbol: str, code: bytes, table: int) -> int:
    """The address of the function in an object file, which becomes a part of this process, with the table there."""
    engine = _engine(table)
    engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return int(engine.get_function_address(symbol))


def _machine() -> Any:
    """For a process, code may be far from what it calls; in a library, it may lie at any address."""
    name, features = target.processor()
    kind: dict[str, Any] = {"jit": True} if target.built() is None else {"reloc": "pic", "codemodel": "default"}
    made = llvm.Target.from_triple(llvm.get_process_triple())
    return made.create_target_machine(cpu=name, features=features, opt=3, **kind)


@lru_cache(maxsize=1)
def _engine(table: int) -> Any:
    llvm.add_symbol(TABLE, table)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
