"""Compares a backend of this package with the golden: ``rmsnorm selftest`` does so in a process for each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rmsnorm.parity.backends import open_backend
from rmsnorm.parity.cases import make, select
from rmsnorm.parity.comparison import Run, labelled
from rmsnorm.parity.judge import judge
from rmsnorm.specification import errors

_NO_LARGE: Final = ("numpy",)  # backends that make a matrix for each row, as the paper does


def compare(
    backend: str,
    *,
    variants: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    device: str = "cpu",
    brief: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Run:
    """Compare a backend with the golden, on the cases that ``select`` gives for these variants and dtypes.

    on_progress: called after every case with the number of cases done and the number of all.
    """
    keep_what_jax_compiles()
    run, began = Run(backend), time.monotonic()
    try:
        version, implementation = open_backend(backend, device)
    except ModuleNotFoundError as error:
        run.status, run.message = "absent", str(error)
        return run
    except errors.InputError as error:
        run.status, run.message = "refused", str(error)
        return run
    run.version, run.device = version, device
    selected = list(select(tuple(variants), tuple(dtypes), brief=brief, large=backend not in _NO_LARGE))
    for case, variant, dtype in selected:
        data = make(case, variant, dtype)
        run.records += labelled(judge(implementation, data), variant, dtype, case.name)
        run.cases += 1
        on_progress(run.cases, len(selected))
    run.conclude()
    run.seconds = time.monotonic() - began
    return run


def keep_what_jax_compiles() -> None:
    """Compiling takes most of the time: JAX keeps the results on disk. It reads this when it is imported."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rmsnorm" / "xla"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
