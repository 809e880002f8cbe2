"""One cell: an op at a shape in a dtype. Checks each candidate, then times it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rmsnorm.specification.variants import Variant
from timing.candidates import BUILTIN, COPY, COPY_INTO, LAYER_NORM, OURS, Candidate, Workbench
from timing.measure import Timing, alternate, used_by_others
from timing.problem import OPS, Accuracy, Problem


@dataclass
class Record:
    """A candidate in a cell; None means not known.

    Attributes:
        status: ``timed``, or not timed: ``wrong`` is one of ours beyond the bounds of the parity kit, ``failed`` is a
            candidate that raised.
        detail: how it was wrong, or what it raised.
        bits: for every result the share of right bits.
        max_ulp: for every result the largest distance to the right result in ulps.
        first_call: seconds, with the compilation.
        moved_bytes: the least that must be read and written.
        speedup: how many times faster than the built-in layer, run in the same way.
        layer_norm_speedup: how many times faster than LayerNorm, run in the same way.
        over_copy: how many times slower than a copy to new memory.
        over_copy_into: how many times slower than a copy to memory in use.
        others: cores that other processes used meanwhile.
    """

    op: str
    shape: list[int]
    dtype: str
    variant: str | None
    candidate: str
    ours: bool
    status: str = "timed"
    detail: str = ""
    bits: Mapping[str, float] = field(default_factory=dict)
    max_ulp: Mapping[str, float] = field(default_factory=dict)
    first_call: float | None = None
    timing: Timing | None = None
    moved_bytes: int = 0
    speedup: float | None = None
    layer_norm_speedup: float | None = None
    over_copy: float | None = None
    over_copy_into: float | None = None
    others: float | None = None

    @property
    def bandwidth(self) -> float | None:
        """GB/s of the bytes that must be moved."""
        return self.moved_bytes / self.timing.median / 1e9 if self.timing else None


def measure(
    workbench: Workbench,
    problem: Problem,
    op: str,
    variant: Variant,
    *,
    seconds: float,
    eager_only: bool = False,
    seed: int = 0,
    time_all: Callable[..., Mapping[str, Timing]] = alternate,
) -> list[Record]:
    """Check the candidates of a cell, time those that are right, and compare them.

    ``eager_only`` leaves out the layers that run in a compiler or a graph.

    >>> from timing.backends import open_backend
    >>> from rmsnorm.specification.variants import PRESETS
    >>> from timing.problem import make
    >>> problem = make((2, 64), "float32")
    >>> records = measure(open_backend("numpy", "cpu"), problem, "fwd", PRESETS["standard"], seconds=0.0)
    >>> [record.candidate for record in records]
    ['ours', 'built-in', 'LayerNorm', 'copy', 'copy into']
    """
    candidates = [
        candidate for candidate in workbench.candidates(problem, op, variant) if not (eager_only and candidate.mode)
    ]
    records = {
        candidate.name: Record(
            op, list(problem.x.shape), problem.dtype, candidate.variant.name if candidate.variant else None,
            candidate.name, candidate.kind == OURS, moved_bytes=problem.moved(op),
        )
        for candidate in candidates
    }  # fmt: skip
    for candidate in candidates:
        _try_once(workbench, problem, candidate, records[candidate.name])
    right = [candidate for candidate in candidates if records[candidate.name].status == "timed"]
    calls = {candidate.name: candidate.call for candidate in right}
    others = used_by_others()
    timings = time_all(calls, seconds=seconds, seed=seed, synchronise=workbench.synchronise)
    busy = others()
    for candidate in right:
        name, record = candidate.name, records[candidate.name]
        record.others = None if math.isnan(busy) else busy
        record.timing = timings[name]
        if candidate.mode is None:
            continue
        record.speedup = _ratio(timings, candidate.like(BUILTIN), name)
        record.layer_norm_speedup = _ratio(timings, candidate.like(LAYER_NORM), name)
        record.over_copy = _ratio(timings, name, COPY)
        record.over_copy_into = _ratio(timings, name, COPY_INTO)
    return list(records.values())


def _ratio(timings: Mapping[str, Timing], name: str, other: str) -> float | None:
    """The time of one over that of another; None of one over itself, and if one was not timed."""
    if name == other or not {name, other} <= timings.keys():
        return None
    return timings[name].median / timings[other].median


def _try_once(workbench: Workbench, problem: Problem, candidate: Candidate, record: Record) -> None:
    began = time.perf_counter()
    try:
        results = candidate.call()
        workbench.synchronise()
        record.first_call = time.perf_counter() - began
        if candidate.variant is not None:
            accuracy = _judge(workbench, problem, candidate.variant, OPS[record.op], results)
            record.bits, record.max_ulp = accuracy.bits, accuracy.max_ulp
            if record.ours and accuracy.wrong:
                record.status, record.detail = "wrong", accuracy.wrong
    except Exception as error:  # the report names what a framework raised
        record.status, record.detail = "failed", f"{type(error).__name__}: {error}".splitlines()[0]


def _judge(
    workbench: Workbench, problem: Problem, variant: Variant, quantities: tuple[str, ...], results: Any
) -> Accuracy:
    fetched: Iterator[Any] = (workbench.fetch(result) for result in results)
    return problem.judge(dict(zip(quantities, fetched, strict=False)), variant)
