"""Identifies targets in a process of their own, so that one that hangs, crashes or prints does no harm.

``python -m rmsnorm.identify.worker`` reads a job as JSON from its standard input and writes a line of JSON for each
event; what the targets print goes to standard error.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

from rmsnorm import errors
from rmsnorm.identify.identity import Identity
from rmsnorm.processes import Worker, job_of_worker, messages

_IMPORTS: Final = 300.0  # seconds to open a target: imports do not count in its limit


def identities(targets: Sequence[str], *, time_limit: float, **options: Any) -> Iterator[tuple[str, Identity | str]]:
    """Each target with its identity, or with the sentence on why there is no such target.

    Args:
        targets: names, as open_target takes them.
        time_limit: in seconds, for each target, without its imports; one that takes longer is killed, and the next
            ones have a new process.
        options: of identify.
    """
    command = [sys.executable, "-m", "rmsnorm.identify.worker"]
    remaining, deadline = deque(targets), 0.0

    def patience() -> float:
        return max(0.1, deadline - time.monotonic())

    while remaining:
        deadline, opened = time.monotonic() + _IMPORTS, False
        worker = Worker("identify")
        job = {"targets": list(remaining), "time_limit": time_limit, "options": options}
        for event in messages(worker, command, patience, job=job):
            if "opened" in event:
                deadline, opened = time.monotonic() + time_limit + 2, True
            elif "refused" in event or "identity" in event:
                result = event["refused"] if "refused" in event else Identity.from_json(event["identity"])
                yield remaining.popleft(), result
                deadline, opened = time.monotonic() + _IMPORTS, False
        if remaining:  # the process ended with this target, or was killed because of it
            target = remaining.popleft()
            took = f"took more than its limit of {time_limit:g} s" if opened else f"was not imported in {_IMPORTS:g} s"
            why = (
                f"{took}, and was ended"
                if worker.status == "hung"
                else f"ended its process ({errors.printable(worker.message)})"
            )
            yield target, Identity(target, "", defects=(f"{target} {why}",))


def main() -> None:
    """Identify the targets of the job, and write what happens."""
    job, write = job_of_worker()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from rmsnorm.identify.solve import identify_opened
    from rmsnorm.targets.locate import locate
    from rmsnorm.targets.open import open_target
    from rmsnorm.targets.target import refused_by

    options = job["options"]
    gradients = options.pop("gradients", True)
    for name in job["targets"]:
        try:
            if not name.endswith(".onnx"):
                with refused_by("identify"):
                    locate(name)
            write(opened=name)
            target = open_target(name, **options)
        except errors.InputError as error:
            write(refused=str(error))
            continue
        except Exception:
            write(mistake=traceback.format_exc())
            return
        try:
            identity = identify_opened(
                target, gradients=gradients, width=options.get("width"), time_limit=job["time_limit"]
            )
        except Exception:
            write(mistake=traceback.format_exc())
            return
        write(identity=identity.json)


if __name__ == "__main__":
    main()
