"""What is timed, and what is the same in every framework: the copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rmsnorm.specification.variants import Variant
from timing.problem import Array, Problem

OURS, BUILTIN, LAYER_NORM, COPY, COPY_INTO = "ours", "built-in", "LayerNorm", "copy", "copy into"
Call = Callable[[], Any]


@dataclass(frozen=True)
class Candidate:
    """One thing to time.

    Attributes:
        kind: which layer, or copy.
        call: returns (y,) or (y, dx, dscale) as arrays of the framework, which a device may still be computing.
        mode: how the layer is run: eagerly, or ``compiled``, ``graph`` or ``jit``. Layers are compared with those that
            are run in the same way. None for a copy. The empty one is eager.
        variant: the variant that its results must agree with; None if they are not RMSNorm.
    """

    kind: str
    call: Call
    mode: str | None = None
    variant: Variant | None = None

    @property
    def name(self) -> str:
        """Its name in the table."""
        return self.like(self.kind)

    def like(self, kind: str) -> str:
        """The name of another layer that is run in the same way."""
        return f"{kind} {self.mode or ''}".strip()


@dataclass(frozen=True)
class Workbench:
    """A loaded framework: its version, the name of the device, and the function that makes the candidates of a cell.

    ``fetch`` turns a result into a NumPy array; ``synchronise`` returns when the device has finished its work.
    """

    version: str
    device: str
    candidates: Callable[[Problem, str, Variant], list[Candidate]]
    fetch: Callable[[Any], Array] = np.asarray
    synchronise: Callable[[], None] = lambda: None


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
    """x and dy; 16-bit ones as integers, which NumPy adds at the speed of memory. It adds bfloat16 slowly."""
    narrow = problem.x.dtype.itemsize == 2
    return (problem.x.view(np.int16), problem.dy.view(np.int16)) if narrow else (problem.x, problem.dy)
