"""Runs the benchmark, one backend after the other, each in a process of its own.

A worker (``compare.py worker NAME ...``, say) writes one JSON object a line: first its version and device, then the
records of one cell after the other, then its status.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rmsnorm.targets.processes import Worker, messages, messenger, stop

PATIENCE: Final = 900.0  # seconds without output after which a worker counts as hung


@dataclass
class BenchRun(Worker):
    """The outcome of a backend: ``done``, ``absent``, ``refused``, ``crashed`` or ``hung``; and its records."""

    cores: int = 0
    cells: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Records of ours that are wrong or failed."""
        return [record for record in self.records if record["ours"] and record["status"] != "timed"]


def run(
    name: str,
    command: Sequence[str],
    *,
    asked: int,
    patience: float = PATIENCE,
    on_progress: Callable[[BenchRun], None] = lambda run: None,
) -> BenchRun:
    """Run the worker of a backend and collect its records, of so many cells as are asked for.

    Kill a worker that is silent for ``patience`` seconds.
    """
    state = BenchRun(name, asked=asked)

    try:
        for message in messages(state, command, patience=patience):
            state.cores = message.get("cores", state.cores)
            if "records" in message:
                state.cells += 1
                state.records += message["records"]
            on_progress(state)
    except KeyboardInterrupt:  # what is finished counts
        stop(state)
    if state.status == "hung":
        state.message = f"no output for {patience:g} s after {state.cells} cells"
    return state


def limit(threads: int) -> None:
    """Limit this process to so many cores: every framework makes as many threads as it has cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "RMSNORM_NUM_THREADS"):
        os.environ[name] = str(threads)


def hello(workbench: Any) -> dict[str, Any]:
    """The first message of a worker."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"hello": workbench.version, "device": workbench.device, "cores": cores}


def serve(work: Callable[[str, Mapping[str, Any]], Iterator[dict[str, Any]]]) -> None:
    """The program of a worker: its last arguments are the backend and the options, and it writes each message."""
    write = messenger()
    name, options = sys.argv[-2], json.loads(sys.argv[-1])
    if options["threads"]:
        limit(options["threads"])
    for message in work(name, options):
        write(**message)
