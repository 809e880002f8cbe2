"""Checks a target in a process of its own: one that hangs, exits, crashes or prints harms neither report nor status.

``python -m rmsnorm.parity.worker`` reads a job as JSON from its standard input. It writes a line of JSON from time to
time while it calls the target, and the report at the end; what the target prints goes to standard error.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from rmsnorm import errors
from rmsnorm.parity.run import PATIENCE, BackendRun, Record, Skip
from rmsnorm.processes import follow, job_of_worker
from rmsnorm.variants import PRESETS, Variant

_BEAT: Final = 1.0  # seconds between two signs of life
_LARGE: Final = 15.0  # times as much patience where y has 2^31 elements


@dataclass(frozen=True)
class Judgement:
    """What a report of ``rmsnorm.parity.check`` says: its run, its text and its page (empty if there is no report)."""

    run: BackendRun
    text: str
    page: str = ""


def check_apart(target: str, variant: Variant, *, patience: float = PATIENCE, **options: Any) -> Judgement:
    """``rmsnorm.parity.check`` of a target by its name, in a process of its own.

    variant: a preset, with its own eps or another one.
    patience: seconds without a call of the target, or of its import, after which the process is ended.

    Raises:
        ValueError: there is no such target, or no case can be compared.
    """
    run, calls = BackendRun(target), 0
    events: dict[str, Any] = {}

    def take(message: Mapping[str, Any]) -> None:
        nonlocal calls
        calls = message.get("calls", calls)
        events.update(message)

    job = {"target": target, "variant": variant.name, "eps": variant.eps, "options": options}
    patience *= _LARGE if options.get("large") else 1
    command = [sys.executable, "-m", "rmsnorm.parity.worker"]
    follow(run, command, take, patience=patience, progress=lambda: f"{calls} calls of it", job=job)
    if "refused" in events:
        raise errors.InputValueError(events["refused"])
    if "report" not in events:
        run.message = errors.printable(run.message)
        begun = f" after {calls} calls of it" if calls and run.status == "crashed" else ""
        what = {"crashed": "its process ended", "hung": "it was ended"}.get(run.status, "it was stopped")
        return Judgement(run, f"{target} was not compared: {what}{begun} ({run.message})")
    fields = events["report"]
    fields["records"] = [Record(**record) for record in fields["records"]]
    fields["skipped"] = [Skip(*skip) for skip in fields["skipped"]]
    return Judgement(BackendRun(**fields), events["text"], events["page"])


def main() -> None:
    """Check the target of the job, and write what happens."""
    job, write = job_of_worker()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        _work(job["target"], PRESETS[job["variant"]].replace(eps=job["eps"]), job["options"], write)
    except errors.InputError as error:
        write(refused=str(error))
    except Exception:
        write(mistake=traceback.format_exc())


def _work(name: str, variant: Variant, options: dict[str, Any], write: Callable[..., None]) -> None:
    from rmsnorm.parity.checking import check
    from rmsnorm.targets import open_target

    opened = open_target(name, framework=options.pop("framework", None), device=options["device"])
    beat = _Beat(write)
    report = check(_beating(opened, beat), variant, **options)
    write(report=asdict(report.run), text=report.text, page=report.page)


class _Beat:
    """Writes how many calls there were, at most once a second."""

    def __init__(self, write: Callable[..., None]) -> None:
        self.write, self.calls, self.last = write, 0, 0.0

    def __call__(self) -> None:
        if time.monotonic() - self.last > _BEAT:
            self.write(calls=self.calls)
            self.last = time.monotonic()
        self.calls += 1


def _beating(target: Any, beat: _Beat) -> Any:
    function, resized = target.function, target.resized

    def call(arrays: Any) -> Any:
        beat()
        return function(arrays)

    again = None if resized is None else lambda size: _beating(resized(size), beat)
    return replace(target, function=call, resized=again)


if __name__ == "__main__":
    main()
