"""Checks a target in a process of its own: one that hangs, exits, crashes or prints harms neither report nor status.

``python -m rmsnorm.parity.worker`` reads a job as JSON from its standard input. It writes a line of JSON every second
but where a call of the target takes longer, and the report at the end; what the target prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, Final

from rmsnorm import errors
from rmsnorm.identify import Identity
from rmsnorm.parity.comparison import Comparison, Run, Skip
from rmsnorm.parity.report import Report
from rmsnorm.parity.run import PATIENCE
from rmsnorm.processes import follow, job_of_worker
from rmsnorm.targets.target import Shape, Target
from rmsnorm.variants import PRESETS, Variant

_BEAT: Final = 1.0  # seconds between two signs of life
_LARGE: Final = 15.0  # times as much patience where y has 2^31 elements, and with the golden


def check_apart(target: str, variant: Variant, *, patience: float = PATIENCE, **options: Any) -> Report:
    """``rmsnorm.parity.check`` of a target by its name, in a process of its own.

    variant: a preset, with its own eps or another one.
    patience: seconds of one call of the target, or of its import, after which the process is ended. The comparison
        with the golden between two calls may take 15 times as long.

    Raises:
        ValueError: there is no such target, or no case can be compared.
    """
    run, calls = Run(target), 0
    events: dict[str, Any] = {}

    def take(message: Mapping[str, Any]) -> None:
        nonlocal calls
        calls = message.get("calls", calls)
        events.update(message)

    patience *= _LARGE if options.get("large") else 1
    job = {"target": target, "variant": variant.name, "eps": variant.eps, "options": options, "patience": patience}
    command = [sys.executable, "-m", "rmsnorm.parity.worker"]

    def silence() -> str:
        return f"{'one of its calls' if 'calls' in events else 'opening it'} took more than {patience:g} s"

    follow(run, command, take, patience=patience, silence=silence, job=job)
    if "refused" in events:
        raise errors.InputValueError(events["refused"])
    if "report" not in events:
        begun = f" after {calls} calls of it" if calls and run.status == "crashed" else ""
        what = {"crashed": "its process ended", "hung": "it was ended"}.get(run.status, "it was stopped")
        run.message = f"{what}{begun} ({errors.printable(run.message)})"
        return Report(target, variant, run)
    fields = events["report"]
    fields["records"] = [Comparison(**record) for record in fields["records"]]
    fields["skipped"] = [Skip(*skip) for skip in fields["skipped"]]
    identity = events["identity"]
    fields["identity"] = None if identity is None else Identity.from_json(identity)
    return Report(events["target"], variant, Run(**fields), tuple(events["options"]))


def main() -> None:
    """Check the target of the job, and write what happens."""
    job, write = job_of_worker()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        _work(job["target"], PRESETS[job["variant"]].replace(eps=job["eps"]), job["options"], job["patience"], write)
    except errors.InputError as error:
        write(refused=str(error))
    except Exception:
        write(mistake=traceback.format_exc())


def _work(name: str, variant: Variant, options: dict[str, Any], patience: float, write: Callable[..., None]) -> None:
    from rmsnorm.parity.checking import check
    from rmsnorm.targets import open_target

    opened = open_target(name, framework=options.pop("framework", None), device=options["device"], op="check")
    watch = Watch(write, patience * _LARGE)
    threading.Thread(target=watch.beat, daemon=True).start()
    report = check(watch.over(opened), variant, **options)
    identity = report.run.identity
    run = asdict(replace(report.run, identity=None))
    write(report=run, identity=identity and identity.json, target=report.target, options=report.options)


class Watch:
    """Writes how many calls of a target began, every second but within a call that takes longer.

    It ends the process where there is no call for ``limit`` seconds.
    """

    def __init__(self, write: Callable[..., None], limit: float) -> None:
        self.write, self.limit = write, limit
        self.calls, self.written, self.inside, self.since = 0, -1, False, time.monotonic()

    def beat(self) -> None:
        while self.tick():
            time.sleep(_BEAT)
        os._exit(1)

    def tick(self) -> bool:
        """What is written now, and whether the process may go on."""
        calls, inside = self.calls, self.inside
        if not inside or calls != self.written:
            self.write(calls=calls)
            self.written = calls
        if inside or time.monotonic() - self.since <= self.limit:
            return True
        self.write(status="hung", message=f"the comparison with the golden took more than {self.limit:g} s")
        return False

    @contextlib.contextmanager
    def call(self, count: int = 1) -> Iterator[None]:
        self.calls, self.inside = self.calls + count, True
        try:
            yield
        finally:
            self.inside, self.since = False, time.monotonic()

    def over(self, target: Target) -> Target:
        """The target, whose calls are watched, and the building of the same layer for another shape."""
        resized: Any = target.resized
        shape_of = target.shape_of

        def again(size: int) -> Target:
            with self.call(0):
                fresh = resized(size)
            return self.over(fresh)

        def shape(argument: str, of_x: Shape) -> Shape:
            with self.call(0):
                return shape_of(argument, of_x)

        return replace(target, around=self.call, resized=None if resized is None else again, shape_of=shape)


if __name__ == "__main__":
    main()
