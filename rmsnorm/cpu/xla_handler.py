"""The handler of XLA's foreign function interface, in compiled code: it runs without Python.

It shares out the rows over XLA's own threads. The thread that XLA calls takes chunks until none are left, and waits for
no thread that has not begun. The last thread to leave a job frees it. The C structures are in xla_api.py.
"""

from __future__ import annotations

from typing import Any

from rmsnorm.cpu.settings import (
    ARGUMENTS,
    BACKWARD,
    BUSY,
    COMPUTE,
    FORWARD,
    FRAME,
    INDEX,
    IS_BACKWARD,
    JOB,
    KERNEL,
    KIND,
    LEFT,
    NO_KERNEL,
    NO_MEMORY,
    NUMBER,
    OFFSET,
    OPERAND,
    PARALLEL,
    PARAMETERS,
    ROW_COUNT,
    ROW_STEP,
    ROWS,
    SETTINGS_OF,
    SOURCES,
    SPREAD,
    STEP,
    THREAD_COUNT,
    THREADS,
)
from rmsnorm.cpu.system import (
    STANDARD_CONTROL,
    call_c,
    exchange_control,
    fetch_add,
    free,
    malloc,
    set_word,
    settings_at,
    table,
    word,
    yield_core,
)
from rmsnorm.cpu.xla_api import (
    EXHAUSTED,
    PRECONDITION,
    asks_for_version,
    attribute,
    data,
    error,
    schedule,
    thread_count,
)


def compiled(name: str) -> Any:
    return {"handle": handle, "spread": spread}[name]


def handle(frame: int) -> int:
    """Serves a call from XLA. Returns 0, or the address of an error."""
    if asks_for_version(frame):
        return 0
    call, addresses = attribute(frame), table()
    is_backward = word(call, IS_BACKWARD)
    count = len(BACKWARD) if is_backward else len(FORWARD)
    settings = call + 8 * (SOURCES + 2 * count)
    s, kernel = settings_at(settings), word(addresses, word(call, INDEX))
    no_scale = s.scale != 0 and word(addresses, PARAMETERS + s.scale) == 0
    no_bias = s.bias != 0 and word(addresses, PARAMETERS + s.bias) == 0
    if kernel == 0 or no_scale or no_bias or (s.offset != 0 and word(addresses, OFFSET) == 0):
        return error(frame, word(addresses, NO_KERNEL), PRECONDITION)
    job = malloc(8 * JOB)
    if job == 0:
        return error(frame, word(addresses, NO_MEMORY), EXHAUSTED)
    for i in range(JOB):
        set_word(job, i, 0)
    for i in range(count):
        kind, value = word(call, SOURCES + 2 * i), word(call, SOURCES + 2 * i + 1)
        set_word(job, ARGUMENTS + i, value if kind == NUMBER else data(frame, kind == OPERAND, value))
    threads, rows = word(call, THREAD_COUNT), word(call, ROW_COUNT)
    if threads > 1:
        most = thread_count(frame)
        threads = most if most < threads else threads
    set_word(job, KERNEL, kernel)
    set_word(job, KIND, is_backward)
    set_word(job, SETTINGS_OF, settings)
    set_word(job, ROWS, rows)
    set_word(job, STEP, word(call, ROW_STEP) if is_backward or threads > 1 else rows)
    set_word(job, THREADS, threads)
    set_word(job, FRAME, frame)
    if threads > 1:
        set_word(job, PARALLEL, word(addresses, SPREAD))
    control = exchange_control(STANDARD_CONTROL)
    failed = call_c(word(addresses, COMPUTE), job)
    exchange_control(control)
    if threads < 2 or fetch_add(job + 8 * LEFT, 1) == threads:
        free(job)
    return error(frame, word(addresses, NO_MEMORY), EXHAUSTED) if failed else 0


def spread(work: int, job: int, threads: int, _: int) -> int:
    """Lets so many threads work on a job, the calling one among them; as GOMP_parallel does, but on those of XLA."""
    for _i in range(threads - 1):
        if not schedule(word(job, FRAME), work, job):
            fetch_add(job + 8 * LEFT, 1)  # in place of the thread that will not come
    call_c(work, job)
    while fetch_add(job + 8 * BUSY, 0):
        yield_core()
    return 0
