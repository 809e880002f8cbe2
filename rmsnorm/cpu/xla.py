"""The kernels as XLA calls them: one handler of its foreign function interface, which runs without Python.

The handler shares out the rows over XLA's own threads. The thread that XLA calls takes chunks until none are left, and
waits for no thread that has not begun. The last thread to leave a job frees it. The C structures are in xla_api.py.
"""

from __future__ import annotations

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
from rmsnorm.cpu import tasks
from rmsnorm.cpu.backward import ARGUMENTS as BACKWARD
from rmsnorm.cpu.formats import CODE, STORAGE, view
from rmsnorm.cpu.forward import ARGUMENTS as FORWARD
from rmsnorm.cpu.launch import Plan, formats, plan
from rmsnorm.cpu.parameters import combine, prepare
from rmsnorm.cpu.settings import SETTINGS
from rmsnorm.cpu.system import STANDARD_CONTROL, advise, allocate, exchange_control, free, yield_core
from rmsnorm.cpu.tasks import fetch_add
from rmsnorm.cpu.threads import available
from rmsnorm.cpu.xla_api import (
    EXHAUSTED,
    PRECONDITION,
    asks_for_version,
    attribute,
    call_c,
    call_frame,
    data,
    error,
    schedule,
    thread_count,
    words,
)

_PARALLEL: Final = 2**17  # elements: below, one thread is as fast as two

# The attribute of a call, in words: these, two words for each argument of the kernel, and the kernel's settings.
_TASK, _ROWS, _STEP, _THREADS, _SOURCES = range(5)
# The two words of an argument: what it is, and its value, or the index of the operand or result whose address it is.
_NUMBER, _OPERAND, _RESULT = range(3)

# A job, in words: these, the arguments, the gains, and for backward the sums of the parameters' gradients. It counts
# the threads that work on it now, the threads that left it, the chunks that were taken and the threads that failed.
(
    _BUSY_IN_JOB, _LEFT_JOB, _NEXT_CHUNK_OF_JOB, _FAILED_IN_JOB, _THREADS_IN_JOB, _SETTINGS_OF_JOB, _ROWS_OF_JOB,
    _STEP_OF_JOB, _ARGUMENTS_OF_JOB,
) = range(9)  # fmt: skip
_GAINS_OF_JOB: Final = _ARGUMENTS_OF_JOB + max(len(FORWARD), len(BACKWARD))

_FORWARD_COUNT, _FORWARD_SCALE, _FORWARD_Y = len(FORWARD), FORWARD.index("scale"), FORWARD.index("y")
_BACKWARD_COUNT, _BACKWARD_SCALE, _BACKWARD_DX = len(BACKWARD), BACKWARD.index("scale"), BACKWARD.index("dx")
_BACKWARD_DSCALE, _BACKWARD_DBIAS = BACKWARD.index("dscale"), BACKWARD.index("dbias")

_NO_MEMORY: Final = np.frombuffer(b"rmsnorm: no memory for the gains and sums of a call\0", np.uint8)
_NO_KERNEL: Final = np.frombuffer(
    b"rmsnorm: the program was compiled in another process and its kernels are not in this one; trace it here\0",
    np.uint8,
)

# Addresses of compiled tasks, by kind and formats: an attribute has an index into this table.
_KINDS: Final = ("forward", "backward")
task_addresses: Final = np.zeros((len(_KINDS), len(STORAGE), len(STORAGE)), np.int64)
_TASK_COUNT, _FIRST_BACKWARD = task_addresses.size, task_addresses[0].size
binding.add_symbol("rmsnorm_tasks", task_addresses.ctypes.data)

_LIKE: Final = np.zeros(1, SETTINGS)  # only its type is read


def forward(call: Call, scale: str | None, bias: str | None, mask: tuple[int, int] | None) -> np.ndarray:
    """The attribute of a call from x, scale, bias and mask, those that are not None, to y and 1 / rho.

    ``mask`` is the mask's steps to the next row and element.
    """
    launched = plan(call, scale, bias)
    x, gain, shift, mask_data = _buffers(_OPERAND, True, scale, bias, mask)
    y, inverse_rms = _buffers(_RESULT, True, True)
    steps = map(_number, mask or (0, 0))
    sources = [x, _number(launched.x_bytes), _number(0), gain, shift, mask_data, *steps, y, _number(0), inverse_rms]
    return _attribute("forward", call, launched, launched.step(available()), sources)


def backward(
    call: Call, scale: str | None, bias: str | None, mask: tuple[int, int] | None, wanted: Sequence[bool],
    inverse_rms: bool = True, dh: bool = False,
) -> np.ndarray:  # fmt: skip
    """Likewise from dy, h, 1 / rho, scale, mask and dh, those that are there, to those of dx, dscale, dbias wanted."""
    launched = plan(call, scale, bias)
    dy, h, factors, gain, mask_data, dh_data = _buffers(_OPERAND, True, True, inverse_rms, scale, mask, dh)
    gradients = _buffers(_RESULT, *wanted)
    steps = map(_number, mask or (0, 0))
    sources = [h, _number(launched.x_bytes), gain, mask_data, *steps, factors, dy, dh_data, *gradients]
    return _attribute("backward", call, launched, launched.chunk, sources)


def _buffers(kind: int, *present: object) -> list[tuple[int, int]]:
    """The sources of operands or results; 0 in place of those that are None or False."""
    indices = iter(range(len(present)))
    return [_number(0) if entry is None or entry is False else (kind, next(indices)) for entry in present]


def _number(value: int) -> tuple[int, int]:
    return _NUMBER, value


def _attribute(kind: str, call: Call, launched: Plan, step: int, sources: list[tuple[int, int]]) -> np.ndarray:
    task = (_KINDS.index(kind), CODE[call.x] - 1, CODE[call.result] - 1)
    if not task_addresses[task]:
        task_addresses[task] = _task(kind, call.x, call.result).address
    index = np.ravel_multi_index(task, task_addresses.shape)
    threads = available() if launched.rows * launched.n >= _PARALLEL else 1
    return np.array([index, launched.rows, step, threads, *np.ravel(sources), *launched.settings.view(np.int64)])


@lru_cache
def _task(kind: str, x: str, y: str) -> Any:
    """What each thread of a job runs: it takes chunks of rows until none are left, and leaves the job."""
    like = formats(x, y)

    def forward_task(job: int) -> int:
        values, control = _enter(job)
        try:
            settings = view(values[_SETTINGS_OF_JOB], 1, _LIKE[0])
            arguments = to_fixed_tuple(values[_ARGUMENTS_OF_JOB:], _FORWARD_COUNT)
            next_chunk, gains = job + 8 * _NEXT_CHUNK_OF_JOB, job + 8 * _GAINS_OF_JOB
            tasks.forward_rows(settings, like, next_chunk, values[_ROWS_OF_JOB], values[_STEP_OF_JOB], gains, arguments)
        except Exception:
            fetch_add(job + 8 * _FAILED_IN_JOB, 1)
        return _exit(job, control)

    def backward_task(job: int) -> int:
        values, control = _enter(job)
        try:
            settings = view(values[_SETTINGS_OF_JOB], 1, _LIKE[0])
            arguments = to_fixed_tuple(values[_ARGUMENTS_OF_JOB:], _BACKWARD_COUNT)
            next_chunk, gains = job + 8 * _NEXT_CHUNK_OF_JOB, job + 8 * _GAINS_OF_JOB
            rows, step, sums = values[_ROWS_OF_JOB], values[_STEP_OF_JOB], gains + 8 * settings[0].n
            tasks.backward_rows(settings, like, next_chunk, rows, step, gains, sums, arguments)
        except Exception:
            fetch_add(job + 8 * _FAILED_IN_JOB, 1)
        return _exit(job, control)

    task = {"forward": forward_task, "backward": backward_task}[kind]
    task.__qualname__ = f"{task.__name__}_{x}_{y}"  # numba mixes up functions of one name, on disk and in memory
    return _for_c(task)


def _for_c(function: Any) -> Any:
    """A function compiled for C, and kept on disk if a folder can be written to, as ``kernel`` does."""
    try:
        return cfunc(int64(int64), cache=True, error_model="numpy")(function)
    except RuntimeError:
        return cfunc(int64(int64), error_model="numpy")(function)


@lru_cache(maxsize=1)
def handler() -> Any:
    """The function that XLA calls."""
    return _for_c(_handle)


def _handle(frame_address: int) -> int:
    """Serves a call from XLA. Returns 0, or the address of an error."""
    frame = call_frame(frame_address)
    if asks_for_version(frame):
        return 0
    control = exchange_control(STANDARD_CONTROL)
    try:
        code = _run(frame)
    except Exception:
        code = EXHAUSTED
    exchange_control(control)
    if code == 0:
        return 0
    return error(frame, _NO_MEMORY.ctypes.data if code == EXHAUSTED else _NO_KERNEL.ctypes.data, code)


@njit
def _run(frame: Any) -> int:
    call, chunks = attribute(frame), 0
    task, is_backward = words(_address_of_tasks(), _TASK_COUNT)[call[_TASK]], call[_TASK] >= _FIRST_BACKWARD
    if task == 0:
        return PRECONDITION
    threads = 1 if call[_THREADS] < 2 else min(call[_THREADS], thread_count(frame))
    if is_backward:
        chunks = -(-call[_ROWS] // call[_STEP])
    job = _open(frame, call, is_backward, threads, chunks)
    for _ in range(threads - 1):
        if not schedule(frame, task, job):
            _leave(job)  # in place of the thread that will not come
    call_c(task, job)
    while fetch_add(job + 8 * _BUSY_IN_JOB, 0):
        yield_core()
    values = words(job, _GAINS_OF_JOB)
    failed = values[_FAILED_IN_JOB] != 0
    if is_backward and not failed:
        settings = view(values[_SETTINGS_OF_JOB], 1, _LIKE[0])
        sums, arguments = job + 8 * (_GAINS_OF_JOB + settings[0].n), values[_ARGUMENTS_OF_JOB:]
        combine(settings, sums, chunks, arguments[_BACKWARD_DSCALE], arguments[_BACKWARD_DBIAS])
    _leave(job)
    return EXHAUSTED if failed else 0


@njit
def _open(frame: Any, call: Any, is_backward: bool, threads: int, chunks: int) -> int:
    """A new job for so many threads. Its address."""
    count, scale = (_BACKWARD_COUNT, _BACKWARD_SCALE) if is_backward else (_FORWARD_COUNT, _FORWARD_SCALE)
    settings = view(call[_SOURCES + 2 * count :].ctypes.data, 1, _LIKE[0])
    s = settings[0]
    job = allocate(8 * (_GAINS_OF_JOB + s.n + 2 * s.n * chunks))
    values = words(job, _GAINS_OF_JOB)
    values[:] = 0
    values[_THREADS_IN_JOB], values[_SETTINGS_OF_JOB] = threads, settings.ctypes.data
    values[_ROWS_OF_JOB], values[_STEP_OF_JOB] = call[_ROWS], call[_STEP]
    arguments = values[_ARGUMENTS_OF_JOB:]
    for i in range(count):
        kind, value = call[_SOURCES + 2 * i], call[_SOURCES + 2 * i + 1]
        arguments[i] = value if kind == _NUMBER else data(frame, kind == _OPERAND, value)
    prepare(settings, arguments[scale], job + 8 * _GAINS_OF_JOB)
    result, width = (_BACKWARD_DX, s.x_bytes) if is_backward else (_FORWARD_Y, s.y_bytes)
    advise(arguments[result], call[_ROWS] * s.n * width)
    return job


@njit
def _enter(job: int) -> Any:
    fetch_add(job + 8 * _BUSY_IN_JOB, 1)
    return words(job, _GAINS_OF_JOB), exchange_control(STANDARD_CONTROL)


@njit
def _exit(job: int, control: int) -> int:
    fetch_add(job + 8 * _BUSY_IN_JOB, -1)
    exchange_control(control)
    _leave(job)
    return 0


@njit
def _leave(job: int) -> None:
    """Frees the job if nobody else needs it: each of its threads leaves once, and so does the call that opened it."""
    if fetch_add(job + 8 * _LEFT_JOB, 1) == words(job, _ARGUMENTS_OF_JOB)[_THREADS_IN_JOB]:
        free(job)


@intrinsic
def _address_of_tasks(_: Any) -> Any:
    """The address of the table, also in code that another process compiled."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        table = cgutils.add_global_variable(builder.module, ir.IntType(64), "rmsnorm_tasks")
        return builder.ptrtoint(table, ir.IntType(64))

    return types.int64(), generate
