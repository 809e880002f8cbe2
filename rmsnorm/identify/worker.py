"""Identifies targets in a process of its own, so that one that hangs, crashes or prints does no harm.

``python -m rmsnorm.identify.worker`` reads a job as JSON from its standard input and writes a line of JSON for each
event; what the targets print goes to standard error.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from rmsnorm.identify.identity import Identity

_IMPORTS: Final = 300.0  # seconds to open a target: imports are not counted in its limit


def identities(targets: Sequence[str], *, time_limit: float, **options: Any) -> Iterator[tuple[str, Identity | str]]:
    """Each target with its identity, or with the sentence on why there is no such target.

    Args:
        targets: names, as open_target takes them.
        time_limit: in seconds, for each target, without its imports; one that takes longer is ended.
        options: of identify.
    """
    rest = list(targets)
    while rest:
        done = 0
        for found in _process(rest, time_limit, options):
            yield rest[done], found
            done += 1
        rest = rest[done:]


def _process(targets: Sequence[str], limit: float, options: dict[str, Any]) -> Iterator[Identity | str]:
    """Those that one process gets through; the last of them may have ended it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rmsnorm.identify.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line)
        lines.put("")  # the end

    reader = threading.Thread(target=read, daemon=True)
    try:
        assert process.stdin  # noqa: S101  (it is a pipe)
        process.stdin.write(json.dumps({"targets": list(targets), "time_limit": limit, "options": options}))
        process.stdin.close()
        reader.start()
        for target in targets:
            found = _await(lines, target, limit)
            yield found
            if isinstance(found, Identity) and found.framework == "":
                return
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _await(lines: queue.Queue[str], target: str, limit: float) -> Identity | str:
    deadline, opened = time.monotonic() + _IMPORTS, False
    while True:
        try:
            line = lines.get(timeout=max(0.1, deadline - time.monotonic()))
        except queue.Empty:
            what = f"took more than its limit of {limit:g} s" if opened else f"was not imported in {_IMPORTS:g} s"
            return _ended(target, f"{target} {what}, and was ended")
        if not line:
            return _ended(target, f"{target} ended its process")
        event = json.loads(line)
        if "opened" in event:
            deadline, opened = time.monotonic() + limit + 2, True
        elif "refused" in event:
            return str(event["refused"])
        else:
            return Identity.from_json(event["identity"])


def _ended(target: str, sentence: str) -> Identity:
    return Identity(target, "", "none", None, False, False, (), (sentence,), ())


def main() -> None:
    job = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a target prints is not ours
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from rmsnorm.identify.solve import identify_opened
    from rmsnorm.targets.open import locate, open_target
    from rmsnorm.targets.target import NoTarget

    def tell(**event: Any) -> None:
        print(json.dumps(event), file=out, flush=True)

    options = job["options"]
    gradients = options.pop("gradients", True)
    for name in job["targets"]:
        try:
            if not name.endswith(".onnx"):
                locate(name)
            tell(opened=name)
            target = open_target(name, **options)
        except NoTarget as error:
            tell(refused=str(error))
            continue
        found = identify_opened(target, gradients=gradients, width=options.get("width"), time_limit=job["time_limit"])
        tell(identity=found.json)


if __name__ == "__main__":
    main()
