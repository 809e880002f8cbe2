"""How long a step takes with each norm: forward, backward and whole, in turns, in one process.

Each model trains on its first batch again and again. Of all turns the least counts: what other programs do only adds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from benchmarks.timing.machine import environment
from experiments.experiment import Experiment, Options
from experiments.norms import KINDS, has
from rmsnorm.files import write_text

PARTS: Final = ("forward", "backward", "step")
_IDEAL: Final = "none"
Seconds = Mapping[str, float]


class Progress(Protocol):
    """What shows how far the turns are."""

    def __enter__(self) -> Any: ...
    def __exit__(self, *error: Any) -> None: ...
    def begin(self, total: int, done: int) -> None: ...
    def advance(self) -> None: ...


def times_of(
    experiment: Experiment, options: Options, norms: Sequence[str], turns: int, data: Path | None, out: Path,
    progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    """The seconds of a step with each norm, by kind of operations: what times.json in a folder then says.

    A model without a norm is the same with all kinds, and shows what a norm of no cost would take.
    """
    trainers = {}
    for kind in KINDS:
        task = experiment.open(replace(options, operations=kind), data)
        for norm in norms:
            if has(kind, norm) and (norm != _IDEAL or kind == KINDS[0]):
                trainers[kind, norm] = task.trainer(norm, 1)
                trainers[kind, norm].seconds()  # compiles
    least = {key: dict.fromkeys(PARTS, np.inf) for key in trainers}
    keys, draw = list(trainers), np.random.default_rng(0)
    with progress:
        progress.begin(turns, 0)
        for _ in range(turns):
            for index in draw.permutation(len(keys)):
                own = least[keys[index]]
                for part, value in trainers[keys[index]].seconds().items():
                    own[part] = min(own[part], value)
            progress.advance()
    seconds: dict[str, dict[str, Seconds]] = {kind: {} for kind in KINDS}
    for kind in KINDS:
        for norm in norms:
            key = (KINDS[0] if norm == _IDEAL else kind, norm)
            if key in least:
                seconds[kind][norm] = {part: round(value, 7) for part, value in least[key].items()}
    result = {"experiment": experiment.name, "turns": turns, "seconds": seconds}
    result |= {"paper": dict(experiment.paper), "environment": environment()}
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "times.json", json.dumps(result, indent=1, allow_nan=False) + "\n")
    return result


def of_programs(forward: Callable[[], Any], both: Callable[[], Any], step: Callable[[], Any]) -> dict[str, float]:
    """The seconds of compiled programs: the loss; the loss and its gradients; a whole step."""
    ends = [time.perf_counter()]
    for program in (forward, both, step):
        program()
        ends.append(time.perf_counter())
    first, second, third = (end - begin for begin, end in pairwise(ends))
    return {"forward": first, "backward": second - first, "step": third}


def compiled_apart(programs: Sequence[Callable[..., Any]], *arguments: Any) -> list[Any]:
    """JAX's programs, compiled anew: what JAX keeps of a cell was traced with other operations, perhaps."""
    import jax

    jax.clear_caches()
    return [jax.jit(program).lower(*arguments).compile() for program in programs]
