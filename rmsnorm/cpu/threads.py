"""Rows shared out among threads: chunks that any free thread takes, the caller's own among them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

_pool: ThreadPoolExecutor | None = None


def available() -> int:
    """How many threads there are to be: RMSNORM_NUM_THREADS, else one for each core that the process may use."""
    given = os.environ.get("RMSNORM_NUM_THREADS", "")
    if given.isdecimal() and int(given):
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def crew() -> tuple[int, int]:
    """As many threads of the pool below: for launch.Plan."""
    return available(), 0


def share_out(task: Callable[[int], object], count: int, threads: int) -> None:
    """Call task(0) to task(count - 1), on as many threads; returns when all are done.

    The caller works too, and waits for no thread that has not begun: with every worker busy it does all by itself.
    An interrupt may come when it does not know of a worker yet, or no longer waits for one: the task is to own the
    memory that it writes to.
    """
    if threads < 2 or count < 2:
        for index in range(count):
            task(index)
        return
    todo = deque(range(count))

    def work() -> None:
        try:
            while todo:
                try:
                    index = todo.popleft()
                except IndexError:  # another thread was faster
                    return
                task(index)
        except BaseException:
            todo.clear()
            raise

    helpers: list[Future[None]] = []
    try:
        with suppress(RuntimeError):  # when the interpreter ends nobody helps any more
            for _ in range(min(threads, count) - 1):
                helpers.append(_workers().submit(work))
        work()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
    finally:
        todo.clear()
        wait([helper for helper in helpers if not helper.cancel()])


def _workers() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(os.cpu_count(), "rmsnorm")
    return _pool


def _forget() -> None:
    """A forked child has the pool but not its threads."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
