"""No bit depends on the number of threads or on the rows beside a row; and what threads have to do with a call."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from test_rows import IMPLEMENTATIONS, bits, draw, results

from rmsnorm import cpu
from rmsnorm.cpu import launch, threads
from rmsnorm.engines import prepare
from rmsnorm.numpy_impl import fast
from rmsnorm.specification import dtypes

KERNELS = pytest.mark.skipif(not cpu.is_available(), reason="there are no kernels here")


@IMPLEMENTATIONS
def test_several_threads_at_once(implementation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every thread has its own arrays, and its own settings of warnings. All calls of kernels share their rows out."""
    monkeypatch.setattr(launch, "_POOL", 0)
    width = 1025 if implementation is fast and cpu.is_available() else 10
    arrays = [draw("float32", rows=(150,), width=width, seed=seed) for seed in range(4)]
    for a in arrays:
        a["x"][0, 0], a["x"][1, 1], a["x"][2] = np.nan, np.inf, 0
    wanted = [bits(results(implementation, a, eps=0.0)) for a in arrays]

    def work(index: int) -> None:
        with np.errstate(all="raise"):
            for turn in range(6):
                which = (index + turn) % 4
                assert bits(results(implementation, arrays[which], eps=0.0)) == wanted[which]

    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(work, range(8), timeout=60))) == 8


@KERNELS
@pytest.mark.parametrize("variant", ["standard", "llama", "gemma", "zhang_torch", "x_transformers"])
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
            y, _, inverse_rms = fast.run_kernel(prepared.in_memory()[0], prepared.call, True, a[some], None, gain, None)
            return [y, inverse_rms, *fast.rms_norm_vjp(b[some], a[some], gain, variant=variant)[:2]]

        monkeypatch.setenv("RMSNORM_NUM_THREADS", "1")
        want = call(slice(None))
        for count in ("2", "8"):
            monkeypatch.setenv("RMSNORM_NUM_THREADS", count)
            assert bits(call(slice(None))) == bits(want), count
        for row in range(8):
            assert bits(call(slice(row, row + 1))[:-1]) == bits(part[row : row + 1] for part in want[:-1]), row


@KERNELS
@pytest.mark.parametrize("dtype", dtypes.FLOATS[:-1])
@pytest.mark.parametrize(("rows", "n", "groups"), [(2100, 1025, 1), (16, 40_001, 1), (2, 300_000, 1), (5, 30_003, 4)])
def test_however_many_threads_share_rows_or_columns(
    rows: int, n: int, groups: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads take the rows; and in the backward pass of a few wide ones the columns: without another bit."""
    random, axes = np.random.default_rng(0), (-2, -1)
    x, dy, residual, dh = random.normal(size=(4, rows, groups, n)).astype(dtype)
    dy[0], dy[1] = 0, x[1]  # rows that go another way
    gain, bias = random.normal(size=(2, groups, n)).astype(dtype)
    assert prepare("test", ("standard", None, None, -1, axes, None), x, gain, bias).in_memory()[0].is_shared
    monkeypatch.setattr(launch, "_POOL", 0)
    of_threads = []
    for count in ("1", "2", "7") if rows < 100 else ("1", "50"):
        monkeypatch.setenv("RMSNORM_NUM_THREADS", count)
        options = {"residual": residual, "feature_axis": axes}
        y = fast.rms_norm(x, gain, bias, return_inverse_rms=True, **options)
        of_threads.append(bits([*y, *fast.rms_norm_vjp((dy, dh), x, gain, bias, **options)]))
    assert all(one == of_threads[0] for one in of_threads)


@KERNELS
@pytest.mark.parametrize(("value", "want"), [("3", 3), ("1", 1), ("1024", 1024), ("", None), (None, None)])
def test_the_number_of_threads(value: str | None, want: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RMSNORM_NUM_THREADS", raising=False)
    if value is not None:
        monkeypatch.setenv("RMSNORM_NUM_THREADS", value)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert threads.available() == (want or cores)
