"""Asks a target: rows go in and come out, whatever the shapes, with the parameters that a probe leaves neutral."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rmsnorm import dtypes
from rmsnorm.identify.layout import ROWS, Layout
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import Target, TargetError

Value = float | Array | None


@dataclass
class Session:
    """A target with its layout, and what makes its parameters neutral.

    Attributes:
        neutral: for each role the value that leaves x / rho; None where the role is left out.
        wide: the widest dtype in which it computes.
        accepts: dtypes of x with parameters of the same dtype.
        deadline: on time.monotonic.
        lift, factor: what the neutral gate multiplies x and y by, powers of two.
        calls: how many there were.
    """

    target: Target
    layout: Layout
    wide: str = "float32"
    accepts: tuple[str, ...] = dtypes.FLOATS
    neutral: dict[str, float | None] = field(default_factory=dict)
    deadline: float = float("inf")
    limit: float = float("inf")
    lift: float = 1.0
    factor: float = 1.0
    calls: int = 0

    @property
    def step(self) -> int:
        """Rows in one call."""
        return max(ROWS, self.layout.multiple) if self.layout.endless else self.layout.multiple

    @property
    def n(self) -> int:
        return self.layout.n

    def few(self, count: int) -> int:
        """So many rows, or fewer where they are wide."""
        return max(4, min(count, 2**14 // self.n))

    def has(self, role: str) -> bool:
        return role in self.target.arguments

    def rows(self, rows: Array, dtype: str | None = None, parameters: str | None = None, **values: Value) -> Array:
        """y of rows, in its own dtype; a value is a number, or an array in the shape of the parameter (gate: rows)."""
        step = self.step
        found = []
        for start in range(0, len(rows), step):
            count = min(step, len(rows) - start)
            size = step if self.target.bridge.compiles else count
            part = np.resize(rows[start : start + step], (size, rows.shape[1]))
            here: dict[str, Any] = dict(values)
            if isinstance(here.get("gate"), np.ndarray):
                here["gate"] = np.resize(here["gate"][start : start + step], part.shape)
            x, given = self.arguments(part, dtype, parameters, **here)
            self.check_time()
            found.append(self.layout.take(self.target.forward(x, **given), count))
        return np.concatenate(found)

    def unit(self, rows: Array, dtype: str | None = None, **values: Value) -> Array:
        """rows / rho in float64: y with neutral parameters, without the factors of a gate."""
        given: dict[str, Any] = dict(values)
        y = self.rows(rows / self.lift, dtype, **given)
        return y.astype(np.float64) / self.factor

    def check_time(self) -> None:
        self.calls += 1
        if time.monotonic() > self.deadline:
            raise TargetError(f"{self.target.name} took more than the {self.limit:g} s that it was given")

    def arguments(
        self, rows: Array, dtype: str | None = None, parameters: str | None = None, **values: Value
    ) -> tuple[Array, dict[str, Array]]:
        """x and the parameters as the target takes them."""
        dtype = dtype or self.wide
        x = self.layout.place(rows.astype(dtype))
        given: dict[str, Array] = {}
        for role in ("scale", "bias", "gate_vector", "gate"):
            value = values.get(role, self.neutral.get(role))
            if not self.has(role) or value is None:
                continue
            if role == "gate":
                given[role] = self.layout.place(np.broadcast_to(value, rows.shape)).astype(dtype)
            else:
                shape = self.target.shape_of(role, x.shape)
                given[role] = np.broadcast_to(np.asarray(value, np.float64), shape).astype(parameters or dtype)
        return x, given

    def parameter(self, role: str, random: np.random.Generator, low: float, high: float) -> Array:
        """Random values in the shape of a parameter."""
        return random.uniform(low, high, self.target.shape_of(role, self.layout.shape(self.step)))

    def spread(self, parameter: Array, count: int) -> Array:
        """A parameter over the rows, in its dtype."""
        found = self.layout.spread(parameter, self.step)
        return np.resize(found, (count, found.shape[1]))
