"""The kernels among threads; that no bit depends on them is also in numpy_impl/test_numpy.py."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest

from rmsnorm import PRESETS, cpu
from rmsnorm.cpu import launch, threads
from rmsnorm.cpu.prepared import prepare
from rmsnorm.numpy_impl import fast, kernels

if not cpu.is_available():
    pytest.skip("there are no kernels here", allow_module_level=True)

ROWS, N = 2100, 1025  # so many elements are shared out


def _call(seed: int = 0) -> list[Any]:
    random = np.random.default_rng(seed)
    x, dy = random.normal(size=(2, ROWS, N)).astype(np.float32)
    gain = random.normal(size=N).astype(np.float32)
    return [fast.rms_norm(x, gain), *fast.rms_norm_vjp(dy, x, gain)[:2]]


@pytest.mark.parametrize("variant", PRESETS)
def test_a_row_does_not_feel_its_neighbours(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of zeros, or one whose squares leave the range, goes another way through a kernel: that row alone does.

    1 / rho in float64 shows it, which is hardly seen in y.
    """
    random = np.random.default_rng(5)
    rows, n = 768, 96  # which several threads share, but for
    monkeypatch.setattr(launch, "_POOL", 0)
    x, dy = random.normal(size=(2, rows, n))
    x[::7] *= random.choice([0.0, 1e-37, 1e30, np.inf, np.nan], (len(x[::7]), 1))
    for dtype in ("bfloat16", "float32"):
        a, b = (array.astype(dtype) for array in (x, dy))
        gain = random.normal(size=n).astype(dtype)

        def call(some: slice, a: Any = a, b: Any = b, gain: Any = gain) -> list[Any]:
            prepared = prepare("test", (variant, None, None, -1, None, None), a[some], gain)
            y, _, inverse_rms = kernels.forward(prepared, a[some], gain, None, None, None, None, True)
            dx, dscale, _ = fast.rms_norm_vjp(b[some], a[some], gain, variant=variant)
            return [y, inverse_rms, dx, dscale]

        monkeypatch.setenv("RMSNORM_NUM_THREADS", "1")
        want = call(slice(None))
        for count in ("2", "3", "8"):
            monkeypatch.setenv("RMSNORM_NUM_THREADS", count)
            assert [part.tobytes() for part in call(slice(None))] == [part.tobytes() for part in want], count
        for row in range(24):
            alone = call(slice(row, row + 1))[:-1]
            assert [part.tobytes() for part in alone] == [part[row : row + 1].tobytes() for part in want[:-1]], row


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("rows", "n", "groups"), [(16, 40_001, 1), (2, 300_000, 1), (5, 30_003, 4)])
def test_threads_share_a_few_wide_rows(
    rows: int, n: int, groups: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the backward pass several threads take the rows and then the columns, without another bit."""
    random, axes = np.random.default_rng(0), (-2, -1)
    x, dy = random.normal(size=(2, rows, groups, n)).astype(dtype)
    dy[0], dy[1] = 0, x[1]  # rows that go another way
    gain, bias = random.normal(size=(2, groups, n)).astype(dtype)
    options: dict[str, Any] = {"variant": "standard", "feature_axis": axes}
    prepared = prepare("test", ("standard", None, None, -1, axes, None), x, gain, bias)
    assert prepared.in_memory()[0].is_shared
    monkeypatch.setattr(launch, "_POOL", 0)
    monkeypatch.setenv("RMSNORM_NUM_THREADS", "1")
    want = fast.rms_norm_vjp(dy, x, gain, bias, **options)
    for count in ("2", "5"):
        monkeypatch.setenv("RMSNORM_NUM_THREADS", count)
        got = fast.rms_norm_vjp(dy, x, gain, bias, **options)
        assert [part.tobytes() for part in got] == [part.tobytes() for part in want]


def test_each_listener_hears_the_kernels_of_its_own_thread() -> None:
    x = np.ones((3, 8), np.float32)
    both_listen, name = threading.Barrier(2), "forward-float32-float32"

    def listen(calls: int, heard: list[str]) -> None:
        with launch.noted() as names:
            both_listen.wait(60)
            for _ in range(calls):
                fast.rms_norm(x)
            both_listen.wait(60)
        heard += names

    heard: list[list[str]] = [[], []]
    workers = [threading.Thread(target=listen, args=(1 + i, heard[i])) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert heard == [[name], [name] * 2]


def test_a_listener_may_be_within_another_one() -> None:
    x = np.ones((3, 8), np.float32)
    with launch.noted() as outer:
        with launch.noted() as inner:
            fast.rms_norm(x)
        fast.rms_norm_vjp(x, x)
        with pytest.raises(ValueError, match="scale has shape"), launch.noted():
            fast.rms_norm(x, np.ones(3))
    fast.rms_norm(x)
    assert inner == ["forward-float32-float32"]
    assert outer == [*inner, "backward-float32-float32"]


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
