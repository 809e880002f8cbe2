"""From a checked call to the kernels: their settings, the size of a chunk, and the threads that take the chunks."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from rmsnorm.call import Call
from rmsnorm.cpu import machine_code
from rmsnorm.cpu.settings import (
    ARGUMENTS,
    BACKWARD,
    CODE,
    COMPUTE,
    FAILED,
    FORWARD,
    JOB,
    KERNEL,
    OFFSET,
    OPTIONS,
    PARAMETERS,
    PREPARED,
    ROWS,
    SETTINGS_OF,
    STEP,
    SUMS,
    WORK,
    settings_of,
)
from rmsnorm.cpu.threads import share_out

_CHUNK: Final = 2**15  # elements: below, one thread is as fast as two
POOL: Final = 2**21  # elements: likewise for threads that must be woken first

_RESIDUAL, _FORWARD_SCALE, _FORWARD_BIAS, _FORWARD_MASK = map(FORWARD.index, ("residual", "scale", "bias", "mask"))
_DH, _BACKWARD_SCALE, _BACKWARD_BIAS, _BACKWARD_MASK = map(BACKWARD.index, ("dh", "scale", "bias", "mask"))
_DSCALE, _DBIAS = map(BACKWARD.index, ("dscale", "dbias"))

# How many threads there are, and the address of the function with which OpenMP starts them (see openmp.py), else 0.
Threads: TypeAlias = Callable[[], tuple[int, int]]


def address(array: np.ndarray | None) -> int:
    return 0 if array is None else int(array.__array_interface__["data"][0])


class Plan(NamedTuple):
    """What the kernels need for a call, apart from its arrays."""

    settings: np.ndarray
    place: int  # the address of the settings
    rows: int
    n: int  # elements of a row of the parameters
    x_bytes: int  # of a row
    reduced: tuple[int, ...]  # shape of 1 / rho
    chunk: int  # rows of a backward task: it depends on the shape alone, and so does the order of the gradients' sums
    small: bool  # one thread computes it
    forward: Kernels
    backward: Kernels
    run: Callable[..., int]  # ``run`` of tasks.py

    def run_forward(self, threads: Threads, owners: object, *arguments: int) -> None:
        """Computes y, h and 1 / rho.

        ``arguments`` are FORWARD of settings.py, without a gate up to 1 / rho. ``owners`` keep the memory at the
        addresses alive.
        """
        kernel = self.forward[arguments[_FORWARD_MASK] != 0, arguments[_RESIDUAL] != 0]
        size = self.rows * self.n
        count, gomp_parallel = (1, 0) if self.small else threads()
        if count < 2 or (size < POOL and not gomp_parallel):
            self.run(kernel, 0, self.place, self.rows, self.rows, 1, 0, *arguments)
        elif gomp_parallel:
            self.run(kernel, 0, self.place, self.rows, self.step(count), count, gomp_parallel, *arguments)
        else:
            scale, bias = arguments[_FORWARD_SCALE], arguments[_FORWARD_BIAS]
            self._share_out(kernel, self.step(count), count, owners, arguments, scale, bias)

    def step(self, threads: int) -> int:
        """How many rows one of so many threads takes at a time in the forward pass."""
        return max(-(-_CHUNK // self.n), -(-self.rows // (8 * threads)))

    def run_backward(self, threads: Threads, owners: object, *arguments: int) -> None:
        """Computes dx; and dscale and dbias in the formats of the parameters, unless their addresses are 0.

        ``arguments`` are BACKWARD of settings.py, without a gate up to dbias; ``owners`` are as in ``run_forward``.
        """
        kernel = self.backward[arguments[_BACKWARD_MASK] != 0, arguments[_DH] != 0]
        count, gomp_parallel = threads() if self.rows > self.chunk else (1, 0)
        if count < 2 or (self.rows * self.n < POOL and not gomp_parallel):
            self.run(kernel, 1, self.place, self.rows, self.chunk, 1, 0, *arguments)
        elif gomp_parallel:
            self.run(kernel, 1, self.place, self.rows, self.chunk, count, gomp_parallel, *arguments)
        else:
            sums = np.empty((-(-self.rows // self.chunk), 2, self.n))
            scale, bias = arguments[_BACKWARD_SCALE], 0 if len(arguments) < len(BACKWARD) else arguments[_BACKWARD_BIAS]
            self._share_out(kernel, self.chunk, count, (owners, sums), arguments, scale, bias, address(sums))
            for name, gradient, first in (("scale", _DSCALE, 0), ("bias", _DBIAS, 1)):
                if arguments[gradient]:
                    self._move(name, arguments[gradient], sums[0, first], len(sums))

    def _share_out(
        self, kernel: int, step: int, threads: int, owners: object, arguments: tuple[int, ...], scale: int, bias: int,
        sums: int = 0,
    ) -> None:  # fmt: skip
        """A job on the threads of this package. An interrupt may leave one at work, which then owns the memory."""
        prepared, job, work = np.ones((2, self.n)), np.zeros(JOB, np.int64), _from_c(WORK)
        if scale:
            self._move("scale", scale, prepared[0])
            if self.settings[0]["offset"]:
                _from_c(OFFSET)(self.place, address(prepared), int(sums != 0))
        if bias:
            self._move("bias", bias, prepared[1])
        words = {KERNEL: kernel, SETTINGS_OF: self.place, ROWS: self.rows, STEP: step, SUMS: sums}
        words[PREPARED] = address(prepared)
        job[list(words)] = list(words.values())
        job[ARGUMENTS : ARGUMENTS + len(arguments)] = arguments

        def task(_: int, __: object = (self, owners, prepared)) -> None:
            work(address(job))

        share_out(task, threads, threads)
        if job[FAILED]:
            raise MemoryError

    def _move(self, name: str, parameter: int, values: np.ndarray, count: int = 0) -> None:
        _from_c(PARAMETERS + int(self.settings[0][name]))(parameter, address(values), self.n, count)


class Kernels(dict[tuple[bool, bool], int]):
    """Addresses of kernels, by whether there is a mask, and a residual or dh; compiled when first used."""

    def __init__(self, kind: str, call: Call, has_bias: bool, gate: str | None) -> None:
        self.kind, self.call, self.has_bias, self.gate = kind, call, has_bias, gate

    def __missing__(self, key: tuple[bool, bool]) -> int:
        self[key] = kernel_key(self.kind, self.call, *key, self.has_bias, self.gate).address()
        return self[key]


def kernel_key(
    kind: str, call: Call, has_mask: bool, has_other: bool, has_bias: bool, gate: str | None = None
) -> machine_code.Key:
    """The key of the kernel for a call with a gate of that dtype."""
    masked = has_mask or call.variant.statistic == "variance"
    rounds = kind == "forward" or (gate is not None and not call.is_gated_before)  # whether y before the gate counts
    options = masked, has_other and not masked, has_bias and rounds
    named = tuple(name for name, is_set in zip(OPTIONS, options, strict=True) if is_set)
    gated = "" if gate is None else f"{call.variant.gate_function}-{call.variant.gate_position}-{gate}"
    norm = call.norm if rounds else None
    return machine_code.Key(kind, call.x, call.result, norm, None if norm is None else call.product, named, gated)


@lru_cache(maxsize=1024)
def plan(call: Call, scale: str | None, bias: str | None, gate: str | None = None) -> Plan:
    """The plan of a call that ``supports`` accepts, with parameters and a gate of these dtypes."""
    n = math.prod(call.shape[axis] for axis in call.feature_axes)
    rows = math.prod(call.shape) // n
    settings = settings_of(call, rows, scale, bias)
    load_parameters(call, scale, bias)
    return Plan(
        settings=settings,
        place=address(settings),
        rows=rows,
        n=n,
        x_bytes=n * int(settings[0]["x_bytes"]),
        reduced=tuple(1 if axis in call.axes else size for axis, size in enumerate(call.shape)),
        chunk=max(-(-2 * _CHUNK // n), -(-rows // 64), min(rows, 16)),
        small=rows * n < _CHUNK,
        forward=Kernels("forward", call, bias is not None, gate),
        backward=Kernels("backward", call, bias is not None, gate),
        run=run(),
    )


def load_parameters(call: Call, *names: str | None) -> None:
    """Lets compiled code read and write parameters of these dtypes."""
    for name in names:
        if name is not None:
            machine_code.table[PARAMETERS + CODE[name]] = machine_code.address("parameters", name)
    if call.variant.scale_offset:
        machine_code.table[OFFSET] = machine_code.address("parameters", "offset")


class _Method(ctypes.Structure):
    """PyMethodDef of Python's C interface."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_FASTCALL: Final = 0x80  # METH_FASTCALL
_methods: list[_Method] = []  # Python refers to them


@lru_cache(maxsize=1)
def load_tasks() -> None:
    """Lets compiled code compute a job."""
    for index, name in ((COMPUTE, "compute"), (WORK, "work")):
        machine_code.table[index] = machine_code.address("tasks", name)


@lru_cache(maxsize=1)
def run() -> Callable[..., int]:
    """``run`` of tasks.py. As a method of Python it is called in a fifth of the time that ctypes takes."""
    load_tasks()
    _methods.append(_Method(b"run", machine_code.address("tasks", "run"), _FASTCALL, None))
    new = ctypes.pythonapi.PyCFunction_NewEx
    new.restype, new.argtypes = ctypes.py_object, (ctypes.POINTER(_Method), ctypes.c_void_p, ctypes.c_void_p)
    method: Callable[..., int] = new(_methods[-1], None, None)
    return method


def _from_c(index: int) -> Callable[..., int]:
    """A function of the table, for Python. It runs without Python's lock."""
    count = {WORK: 1, OFFSET: 3}.get(index, 4)
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * count)(int(machine_code.table[index]))
