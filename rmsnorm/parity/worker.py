"""Checks a target in a process of its own: one that hangs, exits, crashes or prints harms neither report nor status."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, Final

from rmsnorm.identify import Identity
from rmsnorm.parity.comparison import Comparison, Run, Skip
from rmsnorm.parity.report import Report
from rmsnorm.parity.run import PATIENCE
from rmsnorm.specification import errors
from rmsnorm.specification.variants import PRESETS, Variant
from rmsnorm.targets.processes import call
from rmsnorm.targets.target import Shape, Target

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
    patience *= _LARGE if options.get("large") else 1
    job = {"target": target, "variant": variant.name, "eps": variant.eps, "options": options, "patience": patience}
    for message in call(run, "rmsnorm.parity.worker:check_job", job, patience=patience):
        calls = message.get("calls", calls)
        if "result" in message:
            return _report(message["result"], variant)
    if run.status == "refused":
        raise errors.InputValueError(run.message)
    what = {"crashed": "its process ended", "hung": "it was ended"}.get(run.status, "it was stopped")
    begun = f" in call {calls} of it" if calls and run.status == "crashed" else ""
    run.message = f"{what}{begun} ({errors.printable(run.message)})"
    return Report(target, variant, run)


def check_job(job: dict[str, Any], write: Callable[..., None]) -> dict[str, Any]:
    """The report on the target of the job, as JSON has it. Each call of the target begins and ends with a message."""
    from rmsnorm.parity.checking import check
    from rmsnorm.targets import open_target

    options, variant = job["options"], PRESETS[job["variant"]].replace(eps=job["eps"])
    write(patience=job["patience"], doing="opening it")
    how = {name: options.pop(name, None) for name in ("framework", "init", "call")}
    opened = open_target(job["target"], **how, device=options["device"], op="check")
    report = check(announced(opened, write, job["patience"]), variant, **options)
    identity = report.run.identity
    run = asdict(replace(report.run, identity=None))
    return {"target": report.target, "run": run, "identity": identity and identity.json, "options": report.options}


def _report(result: Mapping[str, Any], variant: Variant) -> Report:
    """The report that ``check_job`` returned."""
    fields, identity = result["run"], result["identity"]
    fields["records"] = [Comparison(**record) for record in fields["records"]]
    fields["skipped"] = [Skip(*skip) for skip in fields["skipped"]]
    fields["identity"] = None if identity is None else Identity.from_json(identity)
    return Report(result["target"], variant, Run(**fields), tuple(result["options"]))


def announced(target: Target, write: Callable[..., None], patience: float) -> Target:
    """The target, whose calls, and the building of the same layer for another shape, begin and end with a message."""
    calls = 0

    @contextlib.contextmanager
    def around(count: int = 1) -> Iterator[None]:
        nonlocal calls
        calls += count
        write(calls=calls, patience=patience, doing="one of its calls")
        try:
            yield
        finally:
            write(patience=patience * _LARGE, doing="the comparison with the golden")

    def over(target: Target) -> Target:
        resized: Any = target.resized
        shape_of = target.shape_of

        def again(size: int) -> Target:
            with around(0):
                fresh = resized(size)
            return over(fresh)

        def shape(argument: str, of_x: Shape) -> Shape:
            with around(0):
                return shape_of(argument, of_x)

        return replace(target, around=around, resized=None if resized is None else again, shape_of=shape)

    return over(target)
