"""Runs the comparison. Each backend has a process of its own, so one that crashes, hangs or is absent stops no other.

A worker (``python -m rmsnorm.parity.run NAME ...``) writes one JSON object on each line: first its version, then the
records of one case after the other, then that it is done.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rmsnorm import errors
from rmsnorm.parity.comparison import Comparison, Run, labelled
from rmsnorm.processes import follow, messenger, stop

NO_LARGE: Final = ("numpy",)  # backends that make a matrix for each row, as the paper does
PATIENCE: Final = 240.0  # seconds without output after which a worker counts as hung


def run(
    commands: Mapping[str, Sequence[str]],
    *,
    asked: Mapping[str, int],
    patience: float = PATIENCE,
    workers: int = 2,
    on_progress: Callable[[Run], None] = lambda run: None,
) -> list[Run]:
    """Run worker commands, several at a time, and gather their records.

    Args:
        commands: by the name of the backend, as ``worker_command`` makes them.
        asked: the number of cases of each backend: one whose process reports another number has crashed.
        patience: seconds without output after which a worker is killed and reported as hung.
        workers: how many commands run at a time.
        on_progress: called after every case and once at the end of a backend.

    Returns:
        One Run for every command, in their order.
    """
    runs = {name: Run(name, asked=asked.get(name, 0)) for name in commands}
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in commands:
        waiting.put(name)

    def drain() -> None:
        while True:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            _follow(runs[name], commands[name], patience, on_progress)

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


def worker_command(
    backend: str,
    *,
    variants: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    device: str = "cpu",
    brief: bool = False,
) -> list[str]:
    """The command line of a worker."""
    options = {"variants": list(variants), "dtypes": list(dtypes), "device": device, "brief": brief}
    return [sys.executable, "-m", "rmsnorm.parity.run", backend, json.dumps(options)]


def _follow(state: Run, command: Sequence[str], patience: float, on_progress: Callable[[Any], None]) -> None:
    def take(message: Mapping[str, Any]) -> None:
        if "records" in message:
            state.cases += 1
            state.records += [Comparison(**record) for record in message["records"]]
        if state.status == "done":
            state.conclude()
        on_progress(state)

    follow(
        state,
        command,
        take,
        patience=patience,
        silence=lambda: f"no output for {patience:g} s after {state.cases} cases",
    )
    on_progress(state)


def _work(backend: str, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    from rmsnorm.parity.backends import open_backend
    from rmsnorm.parity.cases import make, select
    from rmsnorm.parity.differences import differences
    from rmsnorm.parity.judge import judge

    try:
        version, implementation = open_backend(backend, options["device"])
    except ModuleNotFoundError as error:
        yield {"status": "absent", "message": str(error)}
        return
    except errors.InputError as error:
        yield {"status": "refused", "message": str(error)}
        return
    yield {"hello": version, "device": options["device"]}
    asked = tuple(options["variants"]), tuple(options["dtypes"])
    for case, variant, dtype in select(*asked, brief=options["brief"], large=backend not in NO_LARGE):
        data = make(case, variant, dtype)
        comparisons = judge(implementation, data)
        if backend == "numpy" and dtype == "float64":
            comparisons += differences(data)
        yield {"records": [asdict(record) for record in labelled(comparisons, variant, dtype, case.name)]}
    yield {"status": "done"}


def keep_what_jax_compiles() -> None:
    """Compiling takes most of the time: JAX keeps the results on disk. It reads this when it is imported."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rmsnorm" / "xla"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")


def main() -> None:
    write = messenger()
    keep_what_jax_compiles()
    backend, options = sys.argv[1], json.loads(sys.argv[2])
    for message in _work(backend, options):
        write(**message)


if __name__ == "__main__":
    main()
