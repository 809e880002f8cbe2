"""The compiled kernels among threads: who works, who stops, and who holds what memory."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rmsnorm import cpu
from rmsnorm.numpy_impl import fast

pytest.importorskip("numba")
if not cpu.is_available():
    pytest.skip("RMSNORM_CPU_KERNELS=0 switches the kernels off", allow_module_level=True)
from numba import cfunc, int64

from rmsnorm.cpu import tasks, threads


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 200])
@pytest.mark.parametrize("workers", [1, 2, 3, 16])
def test_every_task_once(count: int, workers: int) -> None:
    for _ in range(20):
        done: list[int] = []
        threads.share_out(done.append, count, workers)
        assert Counter(done) == Counter(range(count))


def test_the_tasks_are_shared() -> None:
    """Two tasks that wait for each other need two threads."""
    meeting = threading.Barrier(2, timeout=60)
    threads.share_out(lambda _: meeting.wait(), 2, 2)


def test_what_is_done_is_held_by_nobody() -> None:
    """Not even by a worker that comes too late: PyTorch would copy such a gradient, which hangs after a fork."""
    for _ in range(500):
        memory = np.empty(1)
        reference = weakref.ref(memory)
        threads.share_out(lambda _, __=memory: None, 2, 2)  # type: ignore[misc]
        del memory
        assert reference() is None


def test_a_job_is_not_read_after_a_thread_has_left_it() -> None:
    """Another thread may free a job of XLA then. The last count in the compiled code is that of LEFT."""
    code = cfunc(int64(int64), error_model="numpy")(tasks.work).inspect_llvm()
    leaving = code[code.rindex("atomicrmw") :].partition("\n}")[0]
    assert "@free(" in leaving
    assert not re.search(r"\bload\b", leaving)


def test_with_every_worker_busy_the_caller_does_all() -> None:
    """A task that shares out tasks does so, too."""
    done: list[tuple[int, int]] = []

    def task(index: int) -> None:
        threads.share_out(lambda inner: done.append((index, inner)), 50, 4)

    threads.share_out(task, 50, 4)
    assert sorted(done) == [(index, inner) for index in range(50) for inner in range(50)]


class Work:
    """Every thread has one of these tasks at the same time; then that of the caller or of another thread fails."""

    def __init__(self, workers: int, fail: Any, by_caller: bool) -> None:
        self.workers, self.fail, self.caller, self.by_caller = workers, fail, threading.get_ident(), by_caller
        self.met, self.chosen = threading.Barrier(workers, timeout=60), threading.Lock()
        self.busy: list[int] = []
        self.started = 0

    def __call__(self, index: int) -> None:
        self.busy.append(index)
        self.started += 1
        try:
            if index >= self.workers:
                return
            self.met.wait()
            is_caller = threading.get_ident() == self.caller
            if is_caller == self.by_caller and self.chosen.acquire(blocking=False):
                self.fail()
            elif not is_caller:
                time.sleep(0.2)  # another task fails now, and this one still writes
        finally:
            self.busy.remove(index)

    def check_is_over(self) -> None:
        assert not self.busy, "a task goes on after share_out has returned"
        started = self.started
        time.sleep(0.05)
        assert self.started == started, "a task began after share_out had returned"


@pytest.fixture
def _three_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with any number of cores."""
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 3)


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Also in a program that ignores interrupts, as one that a shell runs in the background does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _raise() -> None:
    raise ValueError("of a task")


def _interrupt() -> None:
    signal.raise_signal(signal.SIGINT)
    time.sleep(0.05)  # the handler runs in between


@pytest.mark.usefixtures("_three_workers")
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("by_caller", [True, False])
def test_an_exception_reaches_the_caller(by_caller: bool, workers: int) -> None:
    for _ in range(6):  # it may be the first or the last of the threads
        work = Work(workers, _raise, by_caller)
        with pytest.raises(ValueError, match="of a task"):
            threads.share_out(work, 1000, workers)
        work.check_is_over()
        done: list[int] = []
        threads.share_out(done.append, 5, workers)
        assert sorted(done) == list(range(5)), "the next call is well"


@pytest.mark.usefixtures("_three_workers", "_interruptible")
def test_an_interrupt_leaves_nobody_at_work() -> None:
    work = Work(3, _interrupt, by_caller=True)
    with pytest.raises(KeyboardInterrupt):
        threads.share_out(work, 1000, 3)
    work.check_is_over()
    assert work.started < 1000


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals of POSIX")
def test_an_interrupt_while_waiting_leaves_nobody_at_work() -> None:
    """The caller has done its part, another thread has not."""
    caller, over = threading.get_ident(), threading.Event()
    begun = threading.Barrier(2, timeout=60)

    def task(_: int) -> None:
        begun.wait()
        if threading.get_ident() != caller:
            time.sleep(0.2)  # by now the caller waits
            signal.pthread_kill(caller, signal.SIGINT)
            time.sleep(0.3)
            over.set()

    with pytest.raises(KeyboardInterrupt):
        threads.share_out(task, 2, 2)
    assert over.is_set()


@pytest.mark.parametrize("operation", ["rms_norm", "rms_norm_vjp"])
def test_memory_outlives_an_interrupt_before_the_worker_is_known(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker goes on writing. Until it has finished, nobody else gets the memory that it writes to."""
    go, done = threading.Event(), threading.Event()

    def enlist(job: Any, _: int) -> None:
        threading.Thread(target=lambda: (go.wait(60), job.task(0), done.set())).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(threads, "_enlist_workers", enlist)
    monkeypatch.setenv("RMSNORM_NUM_THREADS", "2")
    x = np.ones((2100, 1025), np.float32)
    owner = weakref.ref(x)
    with pytest.raises(KeyboardInterrupt):
        fast.rms_norm(x) if operation == "rms_norm" else fast.rms_norm_vjp(x, x)
    del x
    gc.collect()
    assert owner() is not None
    go.set()
    done.wait(60)


@pytest.mark.parametrize(("value", "want"), [("3", 3), ("1", 1), ("1024", 1024), ("", None), (None, None)])
def test_the_number_of_threads(value: str | None, want: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv("RMSNORM_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("RMSNORM_NUM_THREADS", value)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert threads.available() == (want or cores)
