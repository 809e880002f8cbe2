"""The machine code of what numba compiles: made once, kept on disk, and loaded without numba.

To import numba takes longer than to load all that a program needs. The code of each C function is kept by itself.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from functools import lru_cache
from importlib import import_module
from threading import RLock
from typing import Any, Final, NamedTuple

import numpy as np
from llvmlite import binding as llvm

from rmsnorm.cpu import cache
from rmsnorm.cpu.settings import CODE, KERNELS, OPTIONS, STORAGE, cancelled_place

KINDS: Final = ("forward", "backward")
_SHAPE: Final = (len(KINDS), len(STORAGE), len(STORAGE), len(CODE), len(CODE), 2 ** len(OPTIONS))  # of keys of kernels

# See settings.py. Compiled code finds the table by this name.
table: Final = np.zeros(KERNELS + int(np.prod(_SHAPE)), np.int64)
llvm.add_symbol("rmsnorm_table", table.ctypes.data)

_addresses: dict[str, int] = {}
_stubs: list[Any] = []  # compiled code refers to them
_lock = RLock()


def address(module: str, *key: object) -> int:
    """The address of the C function that ``compiled(*key)`` of a module of rmsnorm.cpu describes.

    All its arguments are 64-bit integers, and so is its result.
    """
    name = "-".join((module, *map(str, key)))
    result = _addresses.get(name)
    if result is None:
        with _lock:
            result = _addresses.get(name)
            if result is None:
                result = _addresses[name] = _load(name, cache.read(name) or _compile(name, module, key))
    return result


class Key(NamedTuple):
    """What a kernel is compiled for: formats (empty or None if there is none), and those of OPTIONS that it has."""

    kind: str
    x: str
    y: str
    norm: str | None = None
    product: str | None = None
    options: tuple[str, ...] = ()

    @property
    def place(self) -> int:
        """The place of the kernel in the table."""
        formats = CODE[self.x] - 1, CODE[self.y] - 1, CODE[self.norm], CODE[self.product]
        options = sum(2 ** OPTIONS.index(name) for name in self.options)
        return KERNELS + int(np.ravel_multi_index((KINDS.index(self.kind), *formats, options), _SHAPE))

    def address(self) -> int:
        """The address of the kernel, which is then in the table."""
        if self.kind == "forward":
            result = address("forward", self.x, self.y, self.norm or "", self.product or "", *self.options)
        else:
            result = address("backward", self.x, self.y, *self.options)
            later(cancelled_place(self.x, self.y), "cancelled", self.x, self.y)
        table[self.place] = result
        return result


def later(place: int, module: str, *key: str) -> None:
    """Puts into the table a function that compiles the real one when it is first called, and takes its place: most
    programs never call it."""
    if table[place]:
        return

    def first(*arguments: int) -> int:
        try:
            table[place] = address(module, *key)
            result: int = signature(int(table[place]))(*arguments)
            return result
        except BaseException:
            sys.excepthook(*sys.exc_info())  # compiled code has called this, and knows no exceptions
            return 1

    signature = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 9)
    _stubs.append(signature(first))
    table[place] = ctypes.cast(_stubs[-1], ctypes.c_void_p).value or 0


def _compile(name: str, module: str, key: tuple[object, ...]) -> bytes:
    from numba import cfunc, int64

    collects = gc.isenabled()
    gc.disable()  # a tenth of the time would go into it
    try:
        function = import_module(f"rmsnorm.cpu.{module}").compiled(*key)
        compiled = cfunc(int64(*[int64] * function.__code__.co_argcount), error_model="numpy")(function)
    finally:
        if collects:
            gc.enable()
    ir = llvm.parse_assembly(compiled.inspect_llvm())
    ir.get_function(compiled.native_name).name = _symbol(name)
    machine = _machine()
    _drop_exceptions(name, ir, machine)
    code: bytes = machine.emit_object(ir)
    cache.write(name, code)
    return code


def _drop_exceptions(name: str, ir: Any, machine: Any) -> None:
    """Removes what prints an exception with the help of numba. Nothing that is compiled may raise one."""
    for function in ir.functions:
        if not function.is_declaration and function.name != _symbol(name):
            function.linkage = "internal"  # nothing else can then replace it
    passes = llvm.create_new_module_pass_manager()
    passes.add_ipsccp_pass()
    passes.add_simplify_cfg_pass()
    passes.add_strip_dead_prototype_pass()
    passes.run(ir, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    missing = [function.name for function in ir.functions if function.name.startswith(("numba_", "NRT_"))]
    if missing:
        raise AssertionError(f"{name} calls {missing}, which a process without numba does not have")


def _load(name: str, code: bytes) -> int:
    engine = _engine()
    engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return int(engine.get_function_address(_symbol(name)))


def _symbol(name: str) -> str:
    return f"rmsnorm_{name}"


def _machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    features = llvm.get_host_cpu_features().flatten()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True)


@lru_cache(maxsize=1)
def _engine() -> Any:
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())


def _renew_lock() -> None:
    global _lock
    _lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)  # another thread of the parent may have had it
