"""Runs the benchmark, one backend after the other, each in a process of its own.

A worker (``compare.py worker NAME ...``, say) writes one JSON object a line: first its version and device, then the
records of one cell after the other, then its status.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rmsnorm.targets.apart import import_triton_before_tensorflow

PATIENCE: Final = 900.0  # seconds without output after which a worker counts as hung


@dataclass
class BenchRun:
    """What a backend did: ``done``, ``absent``, ``refused``, ``crashed``, ``hung`` or ``stopped``; and its records."""

    name: str
    status: str = "running"
    message: str = ""
    version: str = ""
    device: str = ""
    seconds: float = 0.0
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
    state, began, heard = BenchRun(name), time.monotonic(), time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as errors, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
    ) as process:  # fmt: skip

        def watch() -> None:
            while process.poll() is None:
                if time.monotonic() - heard > patience:
                    state.status = "hung"
                    process.kill()
                time.sleep(0.1)

        threading.Thread(target=watch, daemon=True).start()
        try:
            for message in _messages(process.stdout or ()):
                heard = time.monotonic()
                state.version, state.device = message.get("hello", state.version), message.get("device", state.device)
                state.cores, state.seconds = message.get("cores", state.cores), time.monotonic() - began
                state.status, state.message = message.get("status", state.status), message.get("message", "")
                if "records" in message:
                    state.cells += 1
                    state.records += message["records"]
                on_progress(state)
            code = process.wait()
        except KeyboardInterrupt:  # what is finished counts
            state.status, state.message = "stopped", "by Ctrl-C"
        finally:
            process.kill()
        if state.status == "hung":
            state.message = f"no output for {patience:g} s after {state.cells} cells"
        elif state.status == "running":
            errors.seek(0)
            said = [line.strip() for line in errors if line.strip()] or ["no output"]
            state.status = "crashed"
            state.message = f"{f'signal {-code}' if code < 0 else f'exit status {code}'}; {said[-1]}"
        elif state.status == "done" and state.cells != asked:
            state.status, state.message = "crashed", f"{state.cells} results came, expected {asked}"
    return state


def _messages(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects among the lines that a worker prints."""
    for line in lines:
        with contextlib.suppress(ValueError):
            message = json.loads(line)
            if isinstance(message, dict):
                yield message


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
    import_triton_before_tensorflow()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed goes to standard error
    name, options = sys.argv[-2], json.loads(sys.argv[-1])
    if options["threads"]:
        limit(options["threads"])
    for message in work(name, options):
        print(json.dumps(message, default=float), file=out, flush=True)
