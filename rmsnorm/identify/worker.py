"""Identifies targets in a process of their own, so that one that hangs, crashes or prints does no harm."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from rmsnorm.identify.identity import Identity
from rmsnorm.specification import errors
from rmsnorm.targets.processes import Worker, call, look_in_current_folder

_IMPORTS: Final = 300.0  # seconds to import a target, which do not count in its limit


def identities(targets: Sequence[str], *, time_limit: float, **options: Any) -> Iterator[tuple[str, Identity | str]]:
    """Each target with its identity, or with the sentence on why there is no such target.

    Args:
        targets: names, as open_target takes them.
        time_limit: in seconds, for each target, without its imports; one that takes longer is killed, and the next
            ones have a new process.
        options: of identify; and ``compiled``, whether what the compiler of its framework makes of it is identified.
    """
    remaining = deque(targets)
    while remaining:
        worker = Worker("identify")
        job = {"targets": list(remaining), "time_limit": time_limit, "options": options}
        for message in call(worker, "rmsnorm.identify.worker:identify_job", job, patience=_IMPORTS):
            if "refused" in message or "identity" in message:
                refused = message.get("refused")
                yield remaining.popleft(), refused or Identity.from_json(message["identity"])
        if worker.status == "stopped":
            raise KeyboardInterrupt
        if remaining:  # the process ended with this target, or was killed because of it
            target, why = remaining.popleft(), errors.printable(worker.message)
            why = f"was ended: {why}" if worker.status == "hung" else f"ended its process ({why})"
            yield target, Identity(target, "", defects=(f"{target} {why}",))


def identify_job(job: dict[str, Any], write: Callable[..., None]) -> None:
    """Identify the targets of the job, and write a message for each."""
    from rmsnorm.identify.solve import identify_opened
    from rmsnorm.targets.locate import locate
    from rmsnorm.targets.open import open_target
    from rmsnorm.targets.target import refused_by

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
            write(refused=str(error))
        else:
            write(identity=identify_opened(target, **asked).json)
