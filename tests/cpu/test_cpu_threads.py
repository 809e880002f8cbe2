"""The kernels among threads; that no bit depends on them is also in numpy_impl/test_numpy.py."""

from __future__ import annotations

import itertools
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


GATES = [None, *itertools.product(("silu", "sigmoid"), ("after", "before"))]


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("variant", PRESETS)
def test_a_row_does_not_feel_its_neighbours(
    variant: str, gate: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of zeros, or one whose squares leave the range, goes another way through a kernel: that row alone does.

    1 / rho in float64 shows it, which is hardly seen in y.
    """
    names = dict(zip(("gate_function", "gate_position"), gate or (), strict=False))
    chosen, random = PRESETS[variant].replace(**names), np.random.default_rng(5)
    rows, n = 768, 96  # which several threads share, but for
    monkeypatch.setattr(launch, "_POOL", 0)
    x, dy, z = random.normal(size=(3, rows, n))
    x[::7] *= random.choice([0.0, 1e-37, 1e30, np.inf, np.nan], (len(x[::7]), 1))
    z[3::11] = random.choice([-700.0, -90.0, 90.0, 1e4], (len(z[3::11]), 1))
    for dtype in ("bfloat16", "float32"):
        a, b, c = (array.astype(dtype) for array in (x, dy, z))
        gain = random.normal(size=n).astype(dtype)

        def call(some: slice, a: Any = a, b: Any = b, c: Any = c, gain: Any = gain) -> list[Any]:
            options = {"variant": chosen, "gate": c[some] if gate else None}
            prepared = prepare("test", (chosen, None, None, -1, None, None), a[some], gain, gate=options["gate"])
            y, _, inverse_rms = kernels.forward(prepared, a[some], gain, None, None, None, options["gate"], True)
            dx, dscale, *dgate = (g for g in fast.rms_norm_vjp(b[some], a[some], gain, **options) if g is not None)
            return [y, inverse_rms, dx, *dgate, dscale]

        monkeypatch.setenv("RMSNORM_NUM_THREADS", "1")
        want = call(slice(None))
        for count in ("2", "3", "8"):
            monkeypatch.setenv("RMSNORM_NUM_THREADS", count)
            assert [part.tobytes() for part in call(slice(None))] == [part.tobytes() for part in want], count
        for row in range(24):
            alone = call(slice(row, row + 1))[:-1]
            assert [part.tobytes() for part in alone] == [part[row : row + 1].tobytes() for part in want[:-1]], row


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
