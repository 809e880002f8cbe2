"""Work shared out among threads: each free thread takes the next part. The caller's own thread is one of them.

Only primitives written in C are used. An interrupt in the middle of a Python lock, such as that of a
ThreadPoolExecutor, leaves it locked, and the next thread waits for ever.
"""

from __future__ import annotations

import _thread
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from rmsnorm import environment

_jobs: SimpleQueue[_Job] = SimpleQueue()
_workers: list[int] = []


def available() -> int:
    """How many threads to use: RMSNORM_NUM_THREADS, else one for each core that the process may use."""
    limit = environment.read("RMSNORM_NUM_THREADS")
    if limit is not None:
        return int(limit)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_threads() -> tuple[int, int]:
    """How many threads of this file, and 0 as they are not OpenMP's: a ``Threads`` of launch.py."""
    return available(), 0


def share_out(task: Callable[[int], object], count: int, threads: int) -> None:
    """Calls task(0) to task(count - 1) on so many threads. Returns when all are done.

    The caller works too, and waits for no thread that has not begun: if every worker is busy, it does all by itself.
    An interrupt may come before it knows of a worker, or when it no longer waits for one. So the task must own the
    memory that it writes to.
    """
    if threads < 2 or count < 2:
        for index in range(count):
            task(index)
        return
    job = _Job(task, count)
    try:
        _enlist_workers(job, min(threads, count) - 1)
        job.work()
    finally:
        job.close()
    del job.task  # PyTorch copies a gradient that a worker still refers to, in parallel; a forked process hangs there
    if job.error is not None:
        raise job.error


class _Job:
    def __init__(self, task: Callable[[int], object], count: int) -> None:
        self.task, self.todo = task, deque(range(count))
        self.error: BaseException | None = None
        self.lock, self.idle = _thread.allocate_lock(), _thread.allocate_lock()  # idle is locked while a worker is busy
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
        """A worker takes part, unless the job is closed."""
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
        """Lets no more workers in, and waits for those inside, even if an interrupt comes."""
        with self.lock:
            self.is_closed = True
        self.todo.clear()
        try:
            self.idle.acquire()
        finally:
            while self.busy:  # after an interrupt: whether it came before or after the lock was taken is unknown
                time.sleep(0.001)


def _enlist_workers(job: _Job, helpers: int) -> None:
    with suppress(RuntimeError):  # no thread can start when the interpreter ends
        while len(_workers) < min(helpers, os.cpu_count() or 1):
            _workers.append(_thread.start_new_thread(_serve, (_jobs,)))
    for _ in range(helpers):
        _jobs.put(job)


def _serve(jobs: SimpleQueue[_Job]) -> None:
    while True:
        jobs.get().join()


def _forget() -> None:
    """Makes a new queue: a forked child has its parent's queue but not its threads."""
    global _jobs
    _jobs = SimpleQueue()
    _workers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
