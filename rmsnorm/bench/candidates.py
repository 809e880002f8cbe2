"""What is timed, and what does not depend on the framework: the copies, the memory of the process."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rmsnorm import errors
from rmsnorm.bench.problem import Array, Problem
from rmsnorm.variants import Variant

OURS, BUILTIN, COPY, COPY_INTO = "ours", "built-in", "copy", "copy into"
Call = Callable[[], Any]


@dataclass(frozen=True)
class Candidate:
    """One thing to time.

    Attributes:
        name: as in the table.
        call: returns (y,) or (y, dx, dscale) in arrays of the framework, ready or underway.
        against: the candidate that it is compared with, the framework's own layer run likewise; empty for a copy.
        variant: whose truth its results are held to; None where they are not RMSNorm.
        saved: bytes that its forward keeps for its backward, x among them, if that can be told.
        peak: bytes that a call adds to what is allocated, results among them, if that can be told.
    """

    name: str
    call: Call
    against: str = ""
    variant: Variant | None = None
    saved: Callable[[], int | None] = lambda: None
    peak: Callable[[], int | None] = lambda: None

    @property
    def is_ours(self) -> bool:
        return self.name.split()[0] == OURS


@dataclass(frozen=True)
class Workbench:
    """An opened framework: its version, the name of the device, and what makes the candidates of a cell.

    ``fetch`` turns a result into a NumPy array; ``ready`` returns when the device has done what it was told.
    """

    version: str
    device: str
    candidates: Callable[[Problem, str, Variant], list[Candidate]]
    fetch: Callable[[Any], Array] = np.asarray
    ready: Callable[[], None] = lambda: None


def resident_peak(call: Call) -> int | None:
    """Bytes by which a call raises the resident memory of the process at most; None where Linux does not tell.

    Allocators keep small blocks: below some MiB the number is that of pages, not of arrays.
    """
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    try:
        ctypes.CDLL(None).malloc_trim(0)
        reset.write_text("5")
        before = _field(status.read_text(), "VmRSS")
        call()
        return max(0, _field(status.read_text(), "VmHWM") - before)
    except (OSError, AttributeError, StopIteration):
        return None


def _field(status: str, name: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{name}:"))


def on_host(name: str, call: Call, against: str, variant: Variant | None = None) -> Candidate:
    return Candidate(name, call, against, variant, peak=lambda: resident_peak(call))


def copy(problem: Problem, op: str) -> Call:
    x, dy = _as_numbers(problem)
    return lambda: x.copy() if op == "fwd" else (x.copy(), x + dy)


def copy_into(problem: Problem, op: str) -> Candidate:
    x, dy = _as_numbers(problem)
    y, dx = np.zeros_like(x), np.zeros_like(x)

    def call() -> None:
        np.copyto(y, x)
        if op != "fwd":
            np.add(x, dy, out=dx)

    return Candidate(COPY_INTO, call)


def _as_numbers(problem: Problem) -> tuple[Array, Array]:
    """x and dy; in 16 bits as integers, which NumPy adds at the speed of memory, unlike bfloat16."""
    narrow = problem.x.dtype.itemsize == 2
    return (problem.x.view(np.int16), problem.dy.view(np.int16)) if narrow else (problem.x, problem.dy)


def processor() -> str:
    """The model of the CPU, as Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def only(backend: str, device: str, known: Sequence[str]) -> None:
    if device not in known:
        raise errors.not_a_choice(backend, "device", device, known)
