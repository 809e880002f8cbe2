"""The kernels as XLA calls them: handlers of its foreign function interface, which run without Python.

What XLA passes is a tree of C structures, read here as 64-bit words by number (xla/ffi/api/c_api.h, version 0.3; XLA
refuses a handler of a version that it does not serve). Rows are shared out over XLA's own threads: the one that is
called takes rows until none are left, and waits for nobody who has not begun. The last one to leave a job frees it.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
from llvmlite import binding, ir
from numba import cfunc, int64, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.unsafe.ndarray import to_fixed_tuple

from rmsnorm.call import Call
from rmsnorm.cpu import kernels, tasks
from rmsnorm.cpu.formats import CODE, STORAGE, at
from rmsnorm.cpu.kernels import SETTINGS
from rmsnorm.cpu.launch import Plan, formats, plan
from rmsnorm.cpu.memory import LEAST, MADV_HUGEPAGE, PAGE
from rmsnorm.cpu.tasks import add
from rmsnorm.cpu.threads import available

_PARALLEL: Final = 2**17  # elements: below, one thread is as fast as two
_VERSION: Final = 3 << 32  # of the interface, 0.3 in two words of 32 bits

# The attribute of a call: these, the place of each argument of the kernel in two words, and the kernel's settings.
_TASK, _ROWS, _STEP, _THREADS, _PLACES = range(5)
_NUMBER, _OPERAND, _RESULT = range(3)  # what the second word of a place is
_FORWARD, _BACKWARD = 11, 12  # arguments, from x on

# A job: these, the arguments, the gains, and backward the parts of the gradients of the parameters.
_BUSY, _LEFT, _TAKEN, _FAILED, _HERE, _SETTINGS, _TOTAL, _CHUNK, _ARGUMENTS = range(9)
_GAINS: Final = _ARGUMENTS + max(_FORWARD, _BACKWARD)

_IS_X86: Final = platform.machine() in ("x86_64", "AMD64")
_IS_ARM: Final = platform.machine() in ("aarch64", "arm64")
_STANDARD: Final = 0x1F80 if _IS_X86 else 0  # of MXCSR or FPCR, as a thread has it first: XLA's flush what is subnormal
_EXHAUSTED, _PRECONDITION = 8, 9  # XLA's codes
_ERROR_CREATE, _ERROR_DESTROY, _SCHEDULE, _NUM_THREADS = 6, 8, 17, 18  # words of its table of functions
_NO_MEMORY: Final = np.frombuffer(b"rmsnorm: no memory for the gains and sums of a call\0", np.uint8)
_NO_KERNEL: Final = np.frombuffer(
    b"rmsnorm: the program was compiled in another process and its kernels are not in this one; trace it here\0",
    np.uint8,
)

# Addresses of compiled tasks, by kind and formats: what the one handler finds where an attribute says.
_KINDS: Final = ("forward", "exact", "backward")
_tasks: Final = np.zeros((len(_KINDS), len(STORAGE), len(STORAGE)), np.int64)
_ALL, _IN_ORDER = _tasks.size, 2 * _tasks[0].size  # from there on they are those of backward
binding.add_symbol("rmsnorm_tasks", _tasks.ctypes.data)

_LIKE: Final = np.zeros(1, SETTINGS)  # of which the type is read


def forward(call: Call, scale: str | None, bias: str | None, mask: tuple[int, int] | None) -> np.ndarray:
    """The attribute of a call from x, scale, bias and mask, of those that there are, to y and 1 / rho.

    The mask is given by its steps to the next row and element.
    """
    given = plan(call, scale, bias)
    x, gain, shift, counted = _arrays(_OPERAND, True, scale, bias, mask)
    y, inverse_rms = _arrays(_RESULT, True, True)
    places = [x, _number(given.x_bytes), _number(0), gain, shift, counted, *_steps(mask), y, _number(0), inverse_rms]
    return _attribute("exact" if given.exact else "forward", call, given, given.step(available()), places)


def backward(
    call: Call, scale: str | None, bias: str | None, mask: tuple[int, int] | None, wanted: Sequence[bool]
) -> np.ndarray:
    """Likewise from dy, x, 1 / rho, scale and mask, to those of dx, dscale and dbias that are wanted."""
    given = plan(call, scale, bias)
    dy, x, inverse_rms, gain, counted = _arrays(_OPERAND, True, True, True, scale, mask)
    results = _arrays(_RESULT, *wanted)
    places = [x, _number(given.x_bytes), gain, counted, *_steps(mask), inverse_rms, dy, _number(0), *results]
    return _attribute("backward", call, given, given.chunk, places)


def _arrays(kind: int, *given: object) -> list[tuple[int, int]]:
    """Places of those that there are, in their order."""
    numbers = iter(range(len(given)))
    return [_number(0) if each is None or each is False else (kind, next(numbers)) for each in given]


def _number(value: int) -> tuple[int, int]:
    return _NUMBER, value


def _steps(mask: tuple[int, int] | None) -> list[tuple[int, int]]:
    return [_number(each) for each in mask or (0, 0)]


def _attribute(kind: str, call: Call, given: Plan, step: int, places: list[tuple[int, int]]) -> np.ndarray:
    task = (_KINDS.index(kind), CODE[call.x] - 1, CODE[call.result] - 1)
    if not _tasks[task]:
        _tasks[task] = _task(kind, call.x, call.result).address
    index = np.ravel_multi_index(task, _tasks.shape)
    threads = available() if given.rows * given.n >= _PARALLEL else 1
    return np.array([index, given.rows, step, threads, *np.ravel(places), *given.settings.view(np.int64)])


@lru_cache
def _task(kind: str, x: str, y: str) -> Any:
    """Takes part in a job: takes rows until none are left, and leaves."""
    both = formats(x, y)

    def forward_task(job: int) -> int:
        values, control = _enter(job)
        try:
            s, places = at(values[_SETTINGS], 1, _LIKE[0]), to_fixed_tuple(values[_ARGUMENTS:], _FORWARD)
            tasks.forward_rows(s, both, job + 8 * _TAKEN, values[_TOTAL], values[_CHUNK], job + 8 * _GAINS, places)
        except Exception:
            add(job + 8 * _FAILED, 1)
        return _exit(job, control)

    def exact_task(job: int) -> int:
        values, control = _enter(job)
        try:
            s, places = at(values[_SETTINGS], 1, _LIKE[0]), to_fixed_tuple(values[_ARGUMENTS:], _FORWARD)
            tasks.exact_forward_rows(
                s, both, job + 8 * _TAKEN, values[_TOTAL], values[_CHUNK], job + 8 * _GAINS, places
            )
        except Exception:
            add(job + 8 * _FAILED, 1)
        return _exit(job, control)

    def backward_task(job: int) -> int:
        values, control = _enter(job)
        try:
            s, places = at(values[_SETTINGS], 1, _LIKE[0]), to_fixed_tuple(values[_ARGUMENTS:], _BACKWARD)
            gains = job + 8 * _GAINS
            parts = gains + 8 * s[0].n
            tasks.backward_rows(s, both, job + 8 * _TAKEN, values[_TOTAL], values[_CHUNK], gains, parts, places)
        except Exception:
            add(job + 8 * _FAILED, 1)
        return _exit(job, control)

    task = {"forward": forward_task, "exact": exact_task, "backward": backward_task}[kind]
    task.__qualname__ = f"{task.__name__}_{x}_{y}"  # of one name on disk and in memory they are taken for each other
    return _for_c(task)


def _for_c(function: Any) -> Any:
    """Compiled, and kept on disk where there is a place for it."""
    try:
        return cfunc(int64(int64), cache=True, error_model="numpy")(function)
    except RuntimeError:
        return cfunc(int64(int64), error_model="numpy")(function)


@lru_cache(maxsize=1)
def handler() -> Any:
    """What XLA is to call."""
    return _for_c(_handle)


def _handle(frame: int) -> int:
    """A call from XLA: 0, or the address of an error. The first one asks for the version of the interface."""
    words = at(frame, 21, np.int64(0))
    if words[1]:
        at(at(words[1], 4, np.int64(0))[3], 4, np.int64(0))[3] = _VERSION
        return 0
    control = _control(_STANDARD)
    try:
        code = _run(words)
    except Exception:
        code = _EXHAUSTED
    _control(control)
    return _error(words, code) if code else 0


@njit
def _run(words: Any) -> int:
    given, count = _given(words), 0
    task, is_backward = at(_address_of_tasks(), _ALL, np.int64(0))[given[_TASK]], given[_TASK] >= _IN_ORDER
    if task == 0:
        return _PRECONDITION
    threads = _threads(words, given[_THREADS])
    if is_backward:
        count = -(-given[_ROWS] // given[_STEP])
    job = _open(words, given, is_backward, threads, count)
    for _ in range(threads - 1):
        if not _schedule(words, task, job):
            _leave(job)  # for one who will not come
    _call(task, job)
    while add(job + 8 * _BUSY, 0):
        _yield()
    values = at(job, _GAINS, np.int64(0))
    failed = values[_FAILED] != 0
    if is_backward and not failed:
        settings = at(values[_SETTINGS], 1, _LIKE[0])
        dscale, dbias = values[_ARGUMENTS + _BACKWARD - 2], values[_ARGUMENTS + _BACKWARD - 1]
        kernels.combine(settings, job + 8 * (_GAINS + settings[0].n), count, dscale, dbias)
    _leave(job)
    return _EXHAUSTED if failed else 0


@njit
def _enter(job: int) -> Any:
    add(job + 8 * _BUSY, 1)
    return at(job, _GAINS, np.int64(0)), _control(_STANDARD)


@njit
def _exit(job: int, control: int) -> int:
    add(job + 8 * _BUSY, -1)
    _control(control)
    _leave(job)
    return 0


@njit
def _given(words: Any) -> Any:
    """The attribute, which is the only one."""
    array = at(at(words[20], 1, np.int64(0))[0], 3, np.int64(0))
    return at(array[2], array[1], np.int64(0))


@njit
def _open(words: Any, given: Any, is_backward: bool, threads: int, parts: int) -> int:
    """A job for as many threads."""
    count, scale = (_BACKWARD, 2) if is_backward else (_FORWARD, 3)
    settings = given[_PLACES + 2 * count :].ctypes.data
    n = at(settings, 1, _LIKE[0])[0].n
    job = _allocate(8 * (_GAINS + n + 2 * n * parts))
    values = at(job, _GAINS, np.int64(0))
    values[:] = 0
    values[_HERE], values[_SETTINGS], values[_TOTAL], values[_CHUNK] = threads, settings, given[_ROWS], given[_STEP]
    for i in range(count):
        kind, value = given[_PLACES + 2 * i], given[_PLACES + 2 * i + 1]
        if kind != _NUMBER:
            buffer = at(words[9 if kind == _OPERAND else 14], value + 1, np.int64(0))[value]
            value = at(buffer, 4, np.int64(0))[3]
        values[_ARGUMENTS + i] = value
    kernels.prepare(at(settings, 1, _LIKE[0]), values[_ARGUMENTS + scale], job + 8 * _GAINS)
    out, width = (9, at(settings, 1, _LIKE[0])[0].x_bytes) if is_backward else (8, at(settings, 1, _LIKE[0])[0].y_bytes)
    _advise(values[_ARGUMENTS + out], given[_ROWS] * n * width)
    return job


@njit
def _leave(job: int) -> None:
    """Frees it after the last of those who take part, and the one who opened it."""
    if add(job + 8 * _LEFT, 1) == at(job, _ARGUMENTS, np.int64(0))[_HERE]:
        _free(job)


@njit
def _threads(words: Any, most: int) -> int:
    """How many threads XLA has, up to the most that there may be."""
    if most < 2:
        return 1
    count = np.ones(1, np.int64)
    _forgive(words, _ask(words, _NUM_THREADS, 32, words[3], count.ctypes.data, 0))
    return min(most, count[0])


@njit
def _schedule(words: Any, task: int, job: int) -> bool:
    return _forgive(words, _ask(words, _SCHEDULE, 40, words[3], task, job))


@njit
def _forgive(words: Any, error: int) -> bool:
    """Whether there is no error; one that there is, is thrown away."""
    if error:
        _ask(words, _ERROR_DESTROY, 24, error, 0, 0)
    return error == 0


@njit
def _error(words: Any, code: int) -> int:
    message = _NO_MEMORY.ctypes.data if code == _EXHAUSTED else _NO_KERNEL.ctypes.data
    return _ask(words, _ERROR_CREATE, 28, message, code, 0)


@njit
def _ask(words: Any, function: int, size: int, first: int, second: int, third: int) -> int:
    """What a function of XLA's returns for a structure of that size."""
    asked = np.zeros(5, np.int64)
    asked[0], asked[2], asked[3], asked[4] = size, first, second, third
    found = _call(at(words[2], 24, np.int64(0))[function], asked.ctypes.data)
    return found + 0 * asked.size  # which lives until here


@intrinsic
def _call(_: Any, function: Any, argument: Any) -> Any:
    """What the C function at that address returns, called with one pointer."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        return builder.call(builder.inttoptr(args[0], ir.FunctionType(word, [word]).as_pointer()), [args[1]])

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _address_of_tasks(_: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        table = cgutils.add_global_variable(builder.module, ir.IntType(64), "rmsnorm_tasks")
        return builder.ptrtoint(table, ir.IntType(64))

    return types.int64(), generate


@intrinsic
def _allocate(_: Any, size: Any) -> Any:
    """Memory that lives until it is freed; raises MemoryError."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(context.nrt.allocate(builder, args[0]), ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic
def _free(_: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        context.nrt.free(builder, builder.inttoptr(args[0], ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def _control(_: Any, value: Any) -> Any:
    """The thread's control register of floating-point arithmetic, which is then the value; on x86 and ARM."""

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
        place = cgutils.alloca_once(builder, word)
        access = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()])
        pointer = builder.bitcast(place, ir.IntType(8).as_pointer())
        for name in ("stmxcsr", "ldmxcsr"):
            builder.call(cgutils.get_or_insert_function(builder.module, access, f"llvm.x86.sse.{name}"), [pointer])
            if name == "stmxcsr":
                former = builder.load(place)
                builder.store(builder.trunc(args[0], word), place)
        return builder.zext(former, ir.IntType(64))

    return types.int64(types.int64), generate


@njit
def _advise(address: int, size: int) -> None:
    """Ask for huge pages, as memory.py does."""
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
def _yield(_: Any) -> Any:
    """To whoever else wants this core."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if sys.platform != "win32":
            function = ir.FunctionType(ir.IntType(32), [])
            builder.call(cgutils.get_or_insert_function(builder.module, function, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate
