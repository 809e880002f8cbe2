"""Work shared out among threads: any that is free takes the next part, the caller's own among them.

Of primitives in C alone: an interrupt in the middle of a Python lock, such as that of a ThreadPoolExecutor, leaves it
locked, and whoever comes next waits for ever.
"""

from __future__ import annotations

import _thread
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

_jobs: SimpleQueue[_Job] = SimpleQueue()
_workers: list[int] = []


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
    job = _Job(task, count)
    try:
        _call(job, min(threads, count) - 1)
        job.work()
    finally:
        job.close()
    del job.task  # a gradient that the worker holds PyTorch would copy, in parallel, which hangs in a forked process
    if job.error is not None:
        raise job.error


class _Job:
    def __init__(self, task: Callable[[int], object], count: int) -> None:
        self.task, self.todo = task, deque(range(count))
        self.error: BaseException | None = None
        self.lock, self.idle = _thread.allocate_lock(), _thread.allocate_lock()  # idle is held while a worker is busy
        self.busy, self.is_closed = 0, False

    def work(self) -> None:
        try:
            while self.todo:
                try:
                    index = self.todo.popleft()
                except IndexError:  # another thread was faster
                    return
                self.task(index)
        except BaseException:
            self.todo.clear()
            raise

    def join(self) -> None:
        """What a worker does, if the job is still open."""
        with self.lock:
            if self.is_closed:
                return
            if not self.busy:
                self.idle.acquire()
            self.busy += 1
        try:
            self.work()
        except BaseException as error:
            self.error = error
        finally:
            with self.lock:
                self.busy -= 1
                if not self.busy:
                    self.idle.release()

    def close(self) -> None:
        """Let no more workers in, and wait for those inside, whatever interrupt comes."""
        with self.lock:
            self.is_closed = True
        self.todo.clear()
        try:
            self.idle.acquire()
        finally:
            while self.busy:  # after an interrupt, which does not say whether the lock was had
                time.sleep(0.001)


def _call(job: _Job, helpers: int) -> None:
    with suppress(RuntimeError):  # when the interpreter ends nobody helps any more
        while len(_workers) < min(helpers, os.cpu_count() or 1):
            _workers.append(_thread.start_new_thread(_serve, (_jobs,)))
    for _ in range(helpers):
        _jobs.put(job)


def _serve(jobs: SimpleQueue[_Job]) -> None:
    while True:
        jobs.get().join()


def _forget() -> None:
    """A forked child has the queue but not the threads."""
    global _jobs
    _jobs = SimpleQueue()
    _workers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
