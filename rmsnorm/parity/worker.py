"""Checks a target in a process of its own: one that hangs, exits, crashes or prints harms neither report nor status."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, Final

from rmsnorm.identify import Identity
from rmsnorm.parity.comparison import Comparison, Refusal, Run, Skip
from rmsnorm.parity.report import Report
from rmsnorm.parity.run import PATIENCE
from rmsnorm.specification import errors
from rmsnorm.specification.quantisation import get_quantisation
from rmsnorm.specification.variants import PRESETS, Variant
from rmsnorm.targets.processes import call, look_in_current_folder
from rmsnorm.targets.target import Shape, Target

_LARGE: Final = 15.0  # times as much patience where y has 2^31 elements, and with the golden


def check_apart(target: str, variant: Variant, *, patience: float = PATIENCE, **options: Any) -> Report:
    """``check`` of a target by its name, or ``check_quantised`` with that option, in a process of its own.

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
        if "compared" in message:  # each case as it comes, so that a crash keeps those before it
            run.records += [Comparison(**record) for record in message["compared"]]
            run.name, run.version, run.cases = message["name"], message["version"], message["cases"]
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
    options, variant = job["options"], PRESETS[job["variant"]].replace(eps=job["eps"])
    patience = job["patience"] * (_LARGE if "quantisation" in options else 1)  # whose calls are not announced
    write(patience=patience, doing="opening it")
    look_in_current_folder(job["target"])
    if "quantisation" in options:
        from rmsnorm.parity.quantised import check_quantised

        quantised = check_quantised(job["target"], **options)
        more = {"quantisation": options["quantisation"], "counts": quantised.counts, "instead": quantised.instead}
        return _json(quantised) | {"quantised": more}
    from rmsnorm.parity.checking import check
    from rmsnorm.targets import open_target

    how = {name: options.pop(name, None) for name in ("framework", "init", "call")}
    opened = open_target(job["target"], **how, device=options["device"], op="check")
    sent = 0

    def send(run: Run) -> None:
        nonlocal sent
        records = [asdict(record) for record in run.records[sent:]]
        sent = len(run.records)
        write(compared=records, name=run.name, version=run.version, cases=run.cases)

    return _json(check(announced(opened, write, job["patience"]), variant, on_progress=send, **options))


def _json(report: Report) -> dict[str, Any]:
    identity = report.run.identity
    run = asdict(replace(report.run, identity=None))
    return {
        "target": report.target, "run": run, "identity": identity and identity.json, "options": report.options,
        "label": report.label,
    }  # fmt: skip


def _report(result: Mapping[str, Any], variant: Variant) -> Report:
    """The report of which that is the ``_json``."""
    fields, identity = result["run"], result["identity"]
    fields["records"] = [Comparison(**record) for record in fields["records"]]
    fields["refusals"] = [Refusal(*refusal) for refusal in fields["refusals"]]
    fields["skipped"] = [Skip(*skip) for skip in fields["skipped"]]
    fields["identity"] = None if identity is None else Identity.from_json(identity)
    parts = result["target"], variant, Run(**fields), tuple(result["options"]), result["label"]
    if quantised := result.get("quantised"):
        from rmsnorm.parity.quantised import QuantisedReport

        more = {**quantised, "quantisation": get_quantisation("check", quantised["quantisation"])}
        return QuantisedReport(*parts, **{**more, "instead": tuple(more["instead"])})
    return Report(*parts)


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
