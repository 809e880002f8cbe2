"""The kernels among threads: no bit depends on them, and calls from several threads do not disturb each other."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from rmsnorm import cpu
from rmsnorm.cpu import threads
from rmsnorm.numpy_impl import fast

if not cpu.is_available():
    pytest.skip("there are no kernels here", allow_module_level=True)

ROWS, N = 2100, 1025  # so many elements are shared out


def _call(seed: int = 0) -> list[Any]:
    random = np.random.default_rng(seed)
    x, dy = random.normal(size=(2, ROWS, N)).astype(np.float32)
    gain = random.normal(size=N).astype(np.float32)
    return [fast.rms_norm(x, gain), *fast.rms_norm_vjp(dy, x, gain)[:2]]


@pytest.mark.parametrize("count", [2, 3, 7, 50])
def test_the_bits_do_not_depend_on_the_threads(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMSNORM_NUM_THREADS", "1")
    want = _call()
    monkeypatch.setenv("RMSNORM_NUM_THREADS", str(count))
    for _ in range(3):
        for got, expected in zip(_call(), want, strict=True):
            assert np.array_equal(got, expected)


def test_calls_from_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMSNORM_NUM_THREADS", "3")
    want = [_call(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for seed, results in enumerate(pool.map(_call, [0, 1, 2, 3] * 3)):
            assert all(map(np.array_equal, results, want[seed % 4]))


def _call_often() -> None:
    for _ in range(1000):
        _call()


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals of POSIX")
def test_an_interrupt_leaves_nobody_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the end of the call, which leaves the memory of its results to nobody else before."""
    monkeypatch.setenv("RMSNORM_NUM_THREADS", "3")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    want = _call()
    caller = threading.get_ident()
    timer = threading.Timer(0.02, lambda: signal.pthread_kill(caller, signal.SIGINT))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            _call_often()
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert all(map(np.array_equal, _call(), want))


@pytest.mark.parametrize(("value", "want"), [("3", 3), ("1", 1), ("1024", 1024), ("", None), (None, None)])
def test_the_number_of_threads(value: str | None, want: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv("RMSNORM_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("RMSNORM_NUM_THREADS", value)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert threads.available() == (want or cores)
