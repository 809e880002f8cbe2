"""Identifies targets in a process of their own, so that one that hangs, crashes or prints does no harm.

``python -m rmsnorm.identify.worker`` reads a job as JSON from its standard input and writes a line of JSON for each
event; what the targets print goes to standard error.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from rmsnorm.identify.identity import Identity
from rmsnorm.processes import end_with_parent, reading, start

_IMPORTS: Final = 300.0  # seconds to open a target: imports do not count in its limit


class _Ended(Exception):
    """The process ended with this target, or was killed because of it: the message is the sentence for the report."""


def identities(targets: Sequence[str], *, time_limit: float, **options: Any) -> Iterator[tuple[str, Identity | str]]:
    """Each target with its identity, or with the sentence on why there is no such target.

    Args:
        targets: names, as open_target takes them.
        time_limit: in seconds, for each target, without its imports; one that takes longer is killed, and the next
            ones have a new process.
        options: of identify.
    """
    remaining = deque(targets)
    while remaining:
        process = _start({"targets": list(remaining), "time_limit": time_limit, "options": options})
        with reading(process) as next_line:
            running = True
            while remaining and running:
                target = remaining.popleft()
                try:
                    result = _result(next_line, target, time_limit)
                except _Ended as reason:
                    result = Identity(target, "", "none", None, False, False, (), (str(reason),), ())
                    running = False
                yield target, result


def _start(job: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rmsnorm.identify.worker"]
    process = start(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin  # noqa: S101  (it is a pipe)
    with process.stdin as pipe:
        json.dump(job, pipe)
    return process


def _result(next_line: Callable[[float], str | None], target: str, time_limit: float) -> Identity | str:
    """The identity of the next target, or why there is no such target."""
    deadline, opened = time.monotonic() + _IMPORTS, False
    while True:
        try:
            line = next_line(max(0.1, deadline - time.monotonic()))
        except queue.Empty:
            took = f"took more than its limit of {time_limit:g} s" if opened else f"was not imported in {_IMPORTS:g} s"
            raise _Ended(f"{target} {took}, and was ended") from None
        if line is None:
            raise _Ended(f"{target} ended its process")
        event = json.loads(line)
        if "opened" in event:
            deadline, opened = time.monotonic() + time_limit + 2, True
        elif "refused" in event:
            return str(event["refused"])
        else:
            return Identity.from_json(event["identity"])


def main() -> None:
    """Identify the targets of the job, and write what happens."""
    end_with_parent()
    job = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a target prints is not part of the report
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from rmsnorm.identify.solve import identify_opened
    from rmsnorm.targets.open import locate, open_target
    from rmsnorm.targets.target import NoTarget

    def write(**event: Any) -> None:
        print(json.dumps(event), file=out, flush=True)

    options = job["options"]
    gradients = options.pop("gradients", True)
    for name in job["targets"]:
        try:
            if not name.endswith(".onnx"):
                locate(name)
            write(opened=name)
            target = open_target(name, **options)
        except NoTarget as error:
            write(refused=str(error))
            continue
        identity = identify_opened(
            target, gradients=gradients, width=options.get("width"), time_limit=job["time_limit"]
        )
        write(identity=identity.json)


if __name__ == "__main__":
    main()
