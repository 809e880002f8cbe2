"""Runs the benchmark, one backend after the other, each in a process of its own.

A worker (``python -m rmsnorm.bench.run NAME ...``) writes one JSON object a line: first what it is, then the records
of one cell after the other, then that it is done.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any, Final

from rmsnorm.variants import PRESETS

PATIENCE: Final = 900.0  # seconds without a word after which a worker counts as hung


@dataclass
class BackendRun:
    """How a backend fared: ``done``, ``absent``, ``refused``, ``crashed`` or ``hung``, and its records."""

    name: str
    status: str = "running"
    message: str = ""
    version: str = ""
    device: str = ""
    cores: int = 0
    cells: int = 0
    seconds: float = 0.0
    records: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Records of ours that are wrong or failed."""
        return [record for record in self.records if record["ours"] and record["status"] != "timed"]


def worker_command(
    backend: str,
    *,
    ops: Sequence[str],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[str],
    variant: str | None = None,
    device: str = "cpu",
    seconds: float = 1.0,
    threads: int | None = None,
) -> list[str]:
    """The command line of a worker."""
    options = {
        "ops": list(ops), "shapes": [list(shape) for shape in shapes], "dtypes": list(dtypes), "variant": variant,
        "device": device, "seconds": seconds, "threads": threads,
    }  # fmt: skip
    return [sys.executable, "-m", "rmsnorm.bench.run", backend, json.dumps(options)]


def run(
    name: str,
    command: Sequence[str],
    *,
    patience: float = PATIENCE,
    on_progress: Callable[[BackendRun], None] = lambda run: None,
) -> BackendRun:
    """Run the worker of a backend and gather its records; it is killed where it says nothing for so many seconds."""
    state, began, silent = BackendRun(name), time.monotonic(), threading.Event()
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):

        def give_up() -> None:
            silent.set()
            process.kill()

        watch = threading.Timer(patience, give_up)
        watch.start()
        try:
            for line in process.stdout or ():
                watch.cancel()
                watch = threading.Timer(patience, give_up)
                watch.start()
                _take(state, line)
                on_progress(state)
            code = process.wait()
        finally:
            watch.cancel()
            process.kill()
        if silent.is_set():
            state.status, state.message = "hung", f"no word in {patience:g} s after {state.cells} cells"
        elif state.status == "running":
            reason = f"signal {-code}" if code < 0 else f"exit status {code}"
            state.status, state.message = "crashed", f"{reason}; {_last_words(errors)}"
    state.seconds = time.monotonic() - began
    return state


def _take(state: BackendRun, line: str) -> None:
    try:
        message = json.loads(line)
    except ValueError:
        return  # a framework's own chatter
    if not isinstance(message, dict):
        return
    if "hello" in message:
        state.version, state.device, state.cores = message["hello"], message["device"], message["cores"]
    elif "records" in message:
        state.cells += 1
        state.records += message["records"]
    elif "status" in message:
        state.status, state.message = message["status"], message.get("message", "")


def _last_words(errors: IO[str]) -> str:
    errors.seek(0)
    said = [line.strip() for line in errors if line.strip()]
    return said[-1] if said else "it said nothing"


def _work(name: str, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if options["threads"]:
        _limit(options["threads"])
    from rmsnorm.bench.backends import BACKENDS
    from rmsnorm.bench.cell import measure
    from rmsnorm.bench.problem import make

    backend = BACKENDS[name]
    try:
        workbench = backend.open(options["device"])
    except ModuleNotFoundError as error:
        yield {"status": "absent", "message": str(error)}
        return
    except ValueError as error:
        yield {"status": "refused", "message": str(error)}
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield {"hello": workbench.version, "device": workbench.device, "cores": cores}
    variant = PRESETS[options["variant"]] if options["variant"] else backend.variant
    for shape in options["shapes"]:
        for dtype in options["dtypes"]:
            problem = make(shape, dtype)
            for op in options["ops"]:
                records = measure(workbench, problem, op, variant, seconds=options["seconds"])
                yield {"records": [{**asdict(record), "gb_per_s": record.bandwidth} for record in records]}
    yield {"status": "done"}


def _limit(threads: int) -> None:
    """So many cores for this process: every framework makes as many threads as it has cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = str(threads)


def main() -> None:
    for message in _work(sys.argv[1], json.loads(sys.argv[2])):
        print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
