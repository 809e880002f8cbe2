"""Compares a backend of this package with the golden: ``rmsnorm selftest`` does so in a process for each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from rmsnorm.parity.backends import open_backend
from rmsnorm.parity.cases import Case, make
from rmsnorm.parity.comparison import Run, labelled
from rmsnorm.parity.judge import judge
from rmsnorm.specification import errors
from rmsnorm.specification.dtypes import FLOATS, HALF
from rmsnorm.specification.variants import PRESETS

_GROUPS: Final = {"axis": -1, "feature_axis": (-2, -1)}
_NOT_64: Final = FLOATS[:3]  # without float64, in which squares of these values leave the range of the equations
CASES: Final = (  # every variant on ordinary rows, then a call of each option
    Case("rows", (48, 96), tuple(PRESETS)),
    Case("wide", (3, 4096), ("llama",)),
    Case("tall", (3, 7, 5, 11, 8), ("torch",)),
    Case("many rows", (65792, 3), ("standard",)),  # more than 16 bits count
    Case("no rows", (0, 16), ("standard",)),
    Case("huge", (8, 33), ("gemma",), "huge", dtypes=_NOT_64),
    Case("tiny", (8, 33), ("paper",), "tiny", dtypes=_NOT_64),
    Case("zero rows", (3, 2, 20), ("torch",), "zero_rows"),
    Case("clamped", (8, 33), ("x_transformers",), "clamped", dtypes=("bfloat16", "float32")),
    Case("no gain, bias", (16, 48), ("apex",), scale=False, bias=True),
    Case("gain f32", (24, 48), ("llama",), parameters="float32", dtypes=HALF),
    Case("gain bf16", (24, 48), ("t5",), parameters="bfloat16", dtypes=("float16", "float32")),
    Case("out f32", (24, 48), ("standard",), dtypes=HALF, options={"out_dtype": "float32"}),
    Case("eps 0.1", (16, 48), ("zhang_torch",), options={"eps": 0.1}),
    Case("partial 0.3", (16, 48), ("paper",), options={"partial": 0.3}),
    Case("mask", (16, 48), ("flax",), mask=True),
    Case("mask, partial, 2 axes", (5, 6, 9), ("paper",), mask=True, options={"partial": 0.7, "axis": (-1, -2)}),
    Case("residual", (16, 48), ("gemma",), residual=True),
    Case("residual, exact sum", (16, 48), ("llama",), residual=True, fields={"residual_rounding": "after"}),
    Case("channels", (3, 6, 5, 7), ("lasagne",), options={"axis": (2, 3), "feature_axis": 1}),
    Case("middle axis", (4, 6, 5), ("keras",), options={"axis": 1}),
    Case("groups", (6, 4, 12), ("standard",), options=_GROUPS),
    Case("gate", (16, 48), ("apex",), gate=("silu", "after")),
    Case("sigmoid gate of x", (16, 48), ("standard",), gate=("sigmoid", "before")),
    Case("gate of x, masked sum", (6, 4, 12), ("llama",), mask=True, residual=True, gate=("silu", "before"),
         options=_GROUPS),
)  # fmt: skip


def selected(variants: Sequence[str] = (), types: Sequence[str] = ()) -> Iterator[tuple[Case, str, str]]:
    """Every case in the variants and the dtypes that are named.

    Without variants, each in its own. Without both, ordinary rows in every dtype, and of the others one dtype after
    the other.
    """
    for number, case in enumerate(CASES):
        own = [dtype for dtype in case.dtypes if dtype in (types or FLOATS)]
        if not (variants or types or case.name == "rows"):
            own = [own[number % len(own)]]
        yield from ((case, variant, dtype) for variant in variants or case.variants for dtype in own)


def compare(
    backend: str,
    *,
    variants: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    device: str = "cpu",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Run:
    """Compare a backend with the golden, on the cases that are ``selected``.

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
    calls = list(selected(variants, dtypes))
    for case, variant, dtype in calls:
        run.records += labelled(judge(implementation, make(case, variant, dtype)), variant, dtype, case.name)
        run.cases += 1
        on_progress(run.cases, len(calls))
    run.conclude()
    run.seconds = time.monotonic() - began
    return run


def keep_what_jax_compiles() -> None:
    """Compiling takes most of the time: JAX keeps the results on disk. It reads this when it is imported."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rmsnorm" / "xla"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
