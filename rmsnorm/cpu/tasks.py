"""The code that runs the kernels, for all formats: on the calling thread, or as one of many threads.

Each of many threads takes the next chunk of rows until none are left. No result depends on which thread takes which
chunk. The words of a job are described in settings.py.
"""

from __future__ import annotations

from typing import Any

from numba import types

from rmsnorm.cpu.formats import view
from rmsnorm.cpu.settings import (
    ARGUMENTS,
    BACKWARD,
    BUSY,
    COMPUTE,
    FAILED,
    FORWARD,
    FRAME,
    JOB,
    KERNEL,
    KIND,
    LEFT,
    NEXT,
    OFFSET,
    PARALLEL,
    PARAMETERS,
    PREPARED,
    ROWS,
    SETTINGS_OF,
    STEP,
    SUMS,
    THREADS,
    WORK,
)
from rmsnorm.cpu.system import (
    LINE,
    STANDARD_CONTROL,
    aligned,
    call_c,
    exchange_control,
    fetch_add,
    free,
    malloc,
    new_words,
    set_word,
    settings_at,
    table,
    word,
)

_FORWARD_SCALE, _FORWARD_BIAS = (ARGUMENTS + FORWARD.index(name) for name in ("scale", "bias"))
_BACKWARD_SCALE, _BACKWARD_BIAS = (ARGUMENTS + BACKWARD.index(name) for name in ("scale", "bias"))
_DSCALE, _DBIAS = (ARGUMENTS + BACKWARD.index(name) for name in ("dscale", "dbias"))

# Python's C interface; an object is the integer of its address.
_integer = types.ExternalFunction("PyLong_AsLongLong", types.int64(types.int64))
_to_python = types.ExternalFunction("PyLong_FromLongLong", types.int64(types.int64))
_error_occurred = types.ExternalFunction("PyErr_Occurred", types.int64())
_memory_error = types.ExternalFunction("PyErr_NoMemory", types.int64())
_leave_python = types.ExternalFunction("PyEval_SaveThread", types.int64())
_enter_python = types.ExternalFunction("PyEval_RestoreThread", types.void(types.int64))


def compiled(name: str) -> Any:
    return {"run": run, "compute": compute, "work": work}[name]


def run(_: int, arguments: int, count: int) -> int:
    """Computes a job whose first words, to the last argument of the kernel, are the arguments of a method of Python."""
    job = new_words()
    for i in range(count):
        set_word(job, i, _integer(word(arguments, i)))
    for i in range(count, JOB):
        set_word(job, i, 0)
    if _error_occurred():
        return 0
    thread = _leave_python()
    failed = call_c(word(table(), COMPUTE), job)
    _enter_python(thread)
    return _memory_error() if failed else _to_python(0)


def compute(job: int) -> int:
    """Computes a job. Returns 1 if memory is short, else 0."""
    settings, rows, step, is_backward = word(job, SETTINGS_OF), word(job, ROWS), word(job, STEP), word(job, KIND)
    s, parallel = settings_at(settings), word(job, PARALLEL)
    n = s.n * s.groups
    chunks = (rows + step - 1) // step if parallel else 1
    parts = (chunks if parallel else 2) if is_backward else 0  # the second is for the sums of the next chunk
    memory = malloc(LINE + 16 * n * (1 + parts))
    if memory == 0:
        return 1
    prepared = aligned(memory)
    sums = prepared + 16 * n
    scale = word(job, _BACKWARD_SCALE if is_backward else _FORWARD_SCALE)
    if scale:
        call_c(word(table(), PARAMETERS + s.scale), scale, prepared, n, 0)
        if s.offset != 0:
            call_c(word(table(), OFFSET), settings, prepared, is_backward)
    else:
        gain = view(prepared, n, 0.0)
        for j in range(n):
            gain[j] = 1.0
    bias = word(job, _BACKWARD_BIAS if is_backward else _FORWARD_BIAS)
    if bias:
        call_c(word(table(), PARAMETERS + s.bias), bias, prepared + 8 * n, n, 0)
    if parallel:
        set_word(job, PREPARED, prepared)
        set_word(job, SUMS, sums)
        call_c(parallel, word(table(), WORK), job, word(job, THREADS), 0)
    else:
        start, total, others = 0, view(sums, 2 * n, 0.0), view(sums + 16 * n, 2 * n, 0.0)
        while start < rows:
            stop = start + step if start + step < rows else rows
            place = sums + 16 * n if start else sums
            if call_c(word(job, KERNEL), settings, start, stop, prepared, place, job + 8 * ARGUMENTS):
                set_word(job, FAILED, 1)
            for j in range(2 * n if is_backward and start else 0):
                total[j] += others[j]
            start = stop
    if is_backward:
        if word(job, _DSCALE):
            call_c(word(table(), PARAMETERS + s.scale), word(job, _DSCALE), sums, n, chunks)
        if word(job, _DBIAS):
            call_c(word(table(), PARAMETERS + s.bias), word(job, _DBIAS), sums + 8 * n, n, chunks)
    free(memory)
    return word(job, FAILED)


def work(job: int) -> int:
    """The work of each thread of a job. The last thread that leaves a job of XLA frees it.

    Another thread may free the job as soon as this one has counted itself out in LEFT, so nothing reads it after that.
    """
    fetch_add(job + 8 * BUSY, 1)
    of_xla, threads = word(job, FRAME) != 0, word(job, THREADS)
    control = exchange_control(STANDARD_CONTROL) if of_xla else 0
    rows, step = word(job, ROWS), word(job, STEP)
    chunk = fetch_add(job + 8 * NEXT, 1)
    while chunk * step < rows:  # a thread that comes too late reads nothing but the job
        settings, start = word(job, SETTINGS_OF), chunk * step
        stop = start + step if start + step < rows else rows
        s = settings_at(settings)
        place = word(job, SUMS) + chunk * 16 * s.n * s.groups
        if call_c(word(job, KERNEL), settings, start, stop, word(job, PREPARED), place, job + 8 * ARGUMENTS):
            set_word(job, FAILED, 1)
        chunk = fetch_add(job + 8 * NEXT, 1)
    if of_xla:
        exchange_control(control)
    fetch_add(job + 8 * BUSY, -1)
    if of_xla and fetch_add(job + 8 * LEFT, 1) == threads:
        free(job)
    return 0
