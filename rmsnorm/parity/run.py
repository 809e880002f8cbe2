"""Runs the comparison. Each backend has a process of its own, so one that crashes, hangs or is absent stops no other.

A worker (``compare_backend``) writes its version, then the records of one case after the other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rmsnorm.parity.comparison import Comparison, Run, labelled
from rmsnorm.targets.processes import call, stop

NO_LARGE: Final = ("numpy",)  # backends that make a matrix for each row, as the paper does
PATIENCE: Final = 240.0  # seconds that a case may take
_FUNCTION: Final = "rmsnorm.parity.run:compare_backend"


def run(
    jobs: Mapping[str, Mapping[str, Any]],
    *,
    asked: Mapping[str, int],
    function: str = _FUNCTION,
    patience: float = PATIENCE,
    workers: int = 2,
    on_progress: Callable[[Run], None] = lambda run: None,
) -> list[Run]:
    """Compare backends, several at a time, each in a process of its own, and gather their records.

    Args:
        jobs: by the name of the backend, as ``job_of`` makes them.
        asked: the number of cases of each backend: one whose process reports another number has crashed.
        function: what each process calls with its job.
        patience: seconds of a case after which a worker is killed and reported as hung.
        workers: how many run at a time.
        on_progress: called after every case and once at the end of a backend.

    Returns:
        One Run for every job, in their order.
    """
    runs = {name: Run(name, asked=asked.get(name, 0)) for name in jobs}
    waiting = iter(list(jobs))  # each thread takes the next one

    def drain() -> None:
        for name in waiting:
            _follow(runs[name], function, jobs[name], patience, on_progress)

    threads = [threading.Thread(target=drain, daemon=True) for _ in range(max(1, workers))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:  # what is finished counts
        for state in runs.values():
            if state.status == "running":
                stop(state)
    return list(runs.values())


def job_of(
    backend: str, *, variants: Sequence[str] = (), dtypes: Sequence[str] = (), device: str = "cpu", brief: bool = False
) -> dict[str, Any]:
    """The job of a worker."""
    options = {"variants": list(variants), "dtypes": list(dtypes), "device": device, "brief": brief}
    return {"backend": backend, **options}


def _follow(
    state: Run, function: str, job: Mapping[str, Any], patience: float, on_progress: Callable[[Run], None]
) -> None:
    try:
        for message in call(state, function, job, patience=patience):
            if "records" in message:
                state.cases += 1
                state.records += [Comparison(**record) for record in message["records"]]
            on_progress(state)
    except RuntimeError as error:  # a mistake of this package: the other backends go on
        state.status, state.message = "crashed", str(error).strip().splitlines()[-1]
    if state.status == "done":
        state.conclude()
    on_progress(state)


def compare_backend(job: Mapping[str, Any], write: Callable[..., None]) -> None:
    """Compare the backend of the job with the golden, and write the records of each case."""
    keep_what_jax_compiles()
    from rmsnorm.parity.backends import open_backend
    from rmsnorm.parity.cases import make, select
    from rmsnorm.parity.differences import differences
    from rmsnorm.parity.judge import judge

    backend = job["backend"]
    try:
        version, implementation = open_backend(backend, job["device"])
    except ModuleNotFoundError as error:
        write(status="absent", message=str(error))
        return
    write(hello=version, device=job["device"])
    asked = tuple(job["variants"]), tuple(job["dtypes"])
    selected = select(*asked, brief=job["brief"], large=backend not in NO_LARGE)
    for case, variant, dtype in selected:
        write(doing=f"the case {case.name!r} of {variant} in {dtype}")
        data = make(case, variant, dtype)
        comparisons = judge(implementation, data)
        if backend == "numpy" and dtype == "float64":
            comparisons += differences(data)
        write(records=[asdict(record) for record in labelled(comparisons, variant, dtype, case.name)])


def keep_what_jax_compiles() -> None:
    """Compiling takes most of the time: JAX keeps the results on disk. It reads this when it is imported."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rmsnorm" / "xla"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
