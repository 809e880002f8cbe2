"""One cell: an op at a shape in a dtype. First what is right, then how fast, then how much memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rmsnorm.bench.candidates import COPY, COPY_INTO, Candidate, Workbench
from rmsnorm.bench.measure import Timing, alternate, used_by_others
from rmsnorm.bench.problem import OPS, Accuracy, Problem
from rmsnorm.variants import Variant


@dataclass
class Record:
    """A candidate in a cell; what could not be told is None.

    Attributes:
        status: ``timed``; ``wrong`` is one of ours beyond the bounds of the parity kit, ``failed`` one that raised:
            neither is timed.
        detail: in which way wrong or failed.
        bits, max_ulp: for every result the share of right bits, and the largest distance to the truth.
        first_call: seconds, the compiler's among them.
        peak_bytes: what a call adds to what is allocated, at most.
        saved_bytes: what the forward keeps for the backward.
        moved_bytes: what must be read and written at least.
        speedup: how many times faster than the built-in, run likewise.
        over_copy, over_copy_into: how many times slower than a copy to new memory, and to old.
        others: cores that other processes kept busy meanwhile.
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
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    moved_bytes: int = 0
    speedup: float | None = None
    over_copy: float | None = None
    over_copy_into: float | None = None
    others: float | None = None

    @property
    def bandwidth(self) -> float | None:
        """Of the bytes that must be moved, in GB/s."""
        return self.moved_bytes / self.timing.median / 1e9 if self.timing else None


def measure(
    workbench: Workbench,
    problem: Problem,
    op: str,
    variant: Variant,
    *,
    seconds: float,
    seed: int = 0,
    time_all: Callable[..., Mapping[str, Timing]] = alternate,
) -> list[Record]:
    """Judge the candidates of a cell, time those that may be, and compare.

    >>> from rmsnorm.bench.backends import BACKENDS
    >>> from rmsnorm.bench.problem import make
    >>> numpy = BACKENDS["numpy"]
    >>> found = measure(numpy.open("cpu"), make((2, 64), "float32"), "fwd", numpy.variant, seconds=0.0)
    >>> [record.candidate for record in found]
    ['ours', 'built-in', 'LayerNorm', 'copy', 'copy into']
    """
    candidates = workbench.candidates(problem, op, variant)
    records = {
        each.name: Record(
            op, list(problem.x.shape), problem.dtype, each.variant.name if each.variant else None, each.name,
            each.is_ours, moved_bytes=problem.moved(op),
        )
        for each in candidates
    }  # fmt: skip
    for each in candidates:
        _try_once(workbench, problem, each, records[each.name])
    fit = [each for each in candidates if records[each.name].status == "timed"]
    others = used_by_others()
    timings = time_all({each.name: each.call for each in fit}, seconds=seconds, seed=seed, ready=workbench.ready)
    busy = others()
    for each in fit:
        record = records[each.name]
        record.others = None if math.isnan(busy) else busy
        record.timing, record.peak_bytes, record.saved_bytes = timings[each.name], each.peak(), each.saved()
        own = timings[each.name].median
        for attribute, other in (("over_copy", COPY), ("over_copy_into", COPY_INTO)):
            if other in timings and each.against:
                setattr(record, attribute, own / timings[other].median)
        if each.against in timings and each.against != each.name:
            record.speedup = timings[each.against].median / own
    return list(records.values())


def _try_once(workbench: Workbench, problem: Problem, candidate: Candidate, record: Record) -> None:
    began = time.perf_counter()
    try:
        results = candidate.call()
        workbench.ready()
        record.first_call = time.perf_counter() - began
        if candidate.variant is not None:
            accuracy = _judge(workbench, problem, candidate.variant, OPS[record.op], results)
            record.bits, record.max_ulp = accuracy.bits, accuracy.max_ulp
            if candidate.is_ours and accuracy.wrong:
                record.status, record.detail = "wrong", accuracy.wrong
    except Exception as error:  # whatever a framework raises is what the report must say
        record.status, record.detail = "failed", f"{type(error).__name__}: {error}".splitlines()[0]


def _judge(
    workbench: Workbench, problem: Problem, variant: Variant, quantities: tuple[str, ...], results: Any
) -> Accuracy:
    fetched: Iterator[Any] = (workbench.fetch(result) for result in results)
    return problem.judge(dict(zip(quantities, fetched, strict=False)), variant)
