"""Identifies targets in a process of their own, so that one that hangs, crashes or prints does no harm."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from rmsnorm.identify.identity import Identity
from rmsnorm.specification import errors
from rmsnorm.targets.processes import Worker, call, look_in_current_folder

_IMPORTS: Final = 300.0  # seconds to import a target, which do not count in its limit
_JOB: Final = "rmsnorm.identify.worker:identify_job"


def identities(targets: Sequence[str], *, time_limit: float, **options: Any) -> Iterator[tuple[str, Identity | str]]:
    """Each target with its identity, or with the sentence on why there is no such target.

    Args:
        targets: names, as open_target takes them.
        time_limit: in seconds, for each target, without its imports; one that takes longer is killed, and the next
            ones have a new process.
        options: of identify; and ``compiled``, whether what the compiler of its framework makes of it is identified.
    """
    for name, message in answers(targets, time_limit=time_limit, **options):
        yield name, message.get("refused") or Identity.from_json(message["identity"])


def answers(
    targets: Sequence[str], *, time_limit: float, job: str = _JOB, **options: Any
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each target with the message on it: its ``identity``, why it is ``refused``, or what else the job writes of it.

    job: ``module:function`` of a job that takes what ``identify_job`` does, and writes one such message for a target.
    """
    remaining = deque(targets)
    while remaining:
        worker = Worker("identify")
        asked = {"targets": list(remaining), "time_limit": time_limit, "options": options}
        for message in call(worker, job, asked, patience=_IMPORTS):
            if not {"refused", "identity", "norms"}.isdisjoint(message):
                yield remaining.popleft(), message
        if worker.status == "stopped":
            raise KeyboardInterrupt
        if remaining:  # the process ended with this target, or was killed because of it
            target, why = remaining.popleft(), errors.printable(worker.message)
            why = f"was ended: {why}" if worker.status == "hung" else f"ended its process ({why})"
            yield target, {"identity": Identity(target, "", defects=(f"{target} {why}",)).json}


def identify_job(
    job: dict[str, Any], write: Callable[..., None], of_model: Callable[[Any], dict[str, Any]] | None = None
) -> None:
    """Identify the targets of the job, and write a message for each.

    of_model: makes the message of a whole model, which is refused without it.
    """
    from rmsnorm.identify.solve import identify_opened
    from rmsnorm.targets.locate import locate
    from rmsnorm.targets.open import open_target
    from rmsnorm.targets.target import NoTarget, refused_by

    options, limit = job["options"], job["time_limit"]
    compiled = options.pop("compiled", False)
    asked = {"gradients": options.pop("gradients", True), "width": options.get("width"), "time_limit": limit}
    for name in job["targets"]:
        write(patience=_IMPORTS, doing="its import")
        look_in_current_folder(name)
        try:
            if not name.endswith(".onnx"):
                with refused_by("identify"):
                    locate(name)
            write(patience=limit + 2, doing=f"what it was asked, in {limit:g} s at most,")
            target = open_target(name, **options)
            target = target.compiled if compiled else target
        except errors.InputError as error:
            model = error.model if isinstance(error, NoTarget) else None
            if model is None or of_model is None:
                write(refused=str(error))
            else:
                write(patience=_IMPORTS, doing="one of its norms")
                write(**of_model(model))
        else:
            write(identity=identify_opened(target, **asked).json)
