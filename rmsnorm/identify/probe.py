"""Asks a target: rows go in and come out, whatever the shapes, with the parameters that a probe leaves neutral."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.accuracy.rounding import rounded
from rmsnorm.identify.findings import Findings
from rmsnorm.identify.layout import ORDINARY, ROWS, Layout, call, find_layout
from rmsnorm.identify.model import Inputs
from rmsnorm.specification import dtypes
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import Target, TargetError

Value = float | Array | None


_SPANS: Final = {"scale": 1.5, "bias": 1.0, "gate_vector": 2.0}  # of random parameters, of either sign


class Answer(NamedTuple):
    """Rows with their parameters and gate, and the target's y."""

    at: Inputs
    y: Array


@dataclass(frozen=True)
class Probe:
    """A target with its layout, and what makes its parameters neutral. A step that learns more returns a new one.

    Attributes:
        findings: the record of what is learned, one for all probes of a target.
        deadline: on time.monotonic; time_limit: the seconds until then from the start.
        wide: the widest dtype in which it computes.
        accepts: dtypes of x with parameters of the same dtype.
        neutral_parameters: for each argument the value that leaves x / rho; None where it is left out.
        left_out: arguments of the target that are not passed.
        gate_scale, factor: what the neutral gate multiplies x and y by, powers of two.
        centred: whether y is x less its mean over rho, with neutral parameters.
    """

    target: Target
    layout: Layout
    findings: Findings
    deadline: float
    time_limit: float
    wide: str = "float32"
    accepts: tuple[str, ...] = dtypes.FLOATS
    neutral_parameters: Mapping[str, float | None] = field(default_factory=lambda: ORDINARY)
    left_out: frozenset[str] = frozenset()
    gate_scale: float = 1.0
    factor: float = 1.0
    centred: bool = False

    @property
    def step(self) -> int:
        """Rows in one call."""
        rows = self.layout.rows_per_example
        return max(ROWS, rows) if self.layout.unlimited else rows

    @property
    def n(self) -> int:
        """Elements in a row."""
        return self.layout.n

    def row_count(self, wanted: int) -> int:
        """So many rows, or fewer where they are wide."""
        return max(4, min(wanted, 2**14 // self.n))

    def takes(self, argument: str) -> bool:
        return argument in self.target.arguments and argument not in self.left_out

    def leaving_out(self, *arguments: str) -> Probe:
        """The probe that passes none of these arguments."""
        return replace(self, left_out=frozenset(arguments))

    def with_neutral(self, **values: float | None) -> Probe:
        return replace(self, neutral_parameters={**self.neutral_parameters, **values})

    def resized(self, width: int) -> Probe | None:
        """The probe of the same target with another size of the normalised axis, None where that is impossible."""
        target, layout = self.target, self.layout
        of_gain = set(layout.axes) & set(layout.feature_axes)  # else its width is that of other axes
        if len(layout.axes) != 1 or (of_gain and target.width is not None and target.resized is None):
            return None
        if target.width is not None and target.resized is not None:
            try:
                target = target.resized(width)
            except ValueError:
                return None
        sizes = tuple(width if axis in layout.axes else size for axis, size in enumerate(layout.sizes))
        group = width // layout.groups if layout.groups else layout.group
        return replace(self, target=target, layout=replace(layout, sizes=sizes, group=group))

    def other_widths(self, multiples: Sequence[float]) -> Iterator[tuple[int, Probe]]:
        """Probes at multiples of the width that can be had."""
        sizes = [self.layout.sizes[axis] for axis in self.layout.axes]
        for multiple in multiples:
            width = int(multiple * (sizes[0] or self.n))
            resized = self.resized(width) if width > 1 else None
            if resized is not None:
                yield width, resized

    def rows(self, rows: Array, dtype: str | None = None, parameters: str | None = None, **values: Value) -> Array:
        """y of rows, in its own dtype; a value is a number, or an array in the shape of the parameter (gate: rows)."""
        step, gate = self.step, values.get("gate")
        parts = []
        for start in range(0, len(rows), step):
            count = min(step, len(rows) - start)
            size = step if self.target.bridge.compiles else count
            part = np.resize(rows[start : start + step], (size, rows.shape[1]))
            if isinstance(gate, np.ndarray):
                values["gate"] = np.resize(gate[start : start + step], part.shape)
            x, arrays = self.prepare(part, dtype, parameters, **values)
            self.check_time()
            parts.append(self.layout.to_rows(self.target.forward(x, **arrays), count))
        return np.concatenate(parts)

    def unit(self, rows: Array, dtype: str | None = None, **values: Value) -> Array:
        """rows / rho in float64: y with neutral parameters, without the factors of a gate."""
        y = self.rows(rows / self.gate_scale, dtype, None, **values)
        with np.errstate(invalid="ignore"):  # of a NaN that signals
            return y.astype(np.float64) / self.factor

    def inverse_rms(self, rows: Array) -> Array:
        """1 / rho of rows, by least squares."""
        h = rows - rows.mean(-1, keepdims=True) if self.centred else rows
        largest = np.max(np.abs(h), axis=-1, keepdims=True)
        unit = np.where(largest > 0, largest, 1.0)
        scaled = h / unit
        return np.asarray((scaled * self.unit(rows)).sum(-1) / (scaled**2).sum(-1) / unit[:, 0])

    def answer(self, rows: Array, pair: tuple[str, str], values: Mapping[str, Any]) -> Answer:
        """y of rows with parameters and a gate, in a dtype of x and of the gate and in one of the parameters."""
        x, values = rounded(rows, pair[0]), dict(values)
        if "gate" in values:
            values["gate"] = rounded(values["gate"], pair[0])
        y = self.rows(x, *pair, **values)
        scale, bias, vector = (
            self.spread(values[name].astype(pair[1]), len(x)) if name in values else None for name in _SPANS
        )
        return Answer(Inputs(x.astype(pair[0]), scale, bias, values.get("gate", vector)), y)

    @property
    def is_short_of_time(self) -> bool:
        """Whether a library that compiles every shape has had half of its time: then what need not be asked is not."""
        return self.target.bridge.compiles and time.monotonic() > self.deadline - self.time_limit / 2

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise TargetError(f"{self.target.name} took more than its limit of {self.time_limit:g} s")

    def prepare(
        self, rows: Array, dtype: str | None = None, parameters: str | None = None, **values: Value
    ) -> tuple[Array, dict[str, Array]]:
        """x and the parameters as the target takes them."""
        dtype = dtype or self.wide
        x = self.layout.to_x(rows.astype(dtype))
        arrays: dict[str, Array] = {}
        for argument in ("scale", "bias", "gate_vector", "gate"):
            value = values.get(argument, self.neutral_parameters.get(argument))
            if not self.takes(argument) or value is None:
                continue
            if argument == "gate":
                arrays[argument] = self.layout.to_x(np.broadcast_to(value, rows.shape)).astype(dtype)
            else:
                shape = self.target.shape_of(argument, x.shape)
                arrays[argument] = np.broadcast_to(np.asarray(value, np.float64), shape).astype(parameters or dtype)
        return x, arrays

    def parameter(self, argument: str, random: np.random.Generator, low: float, high: float) -> Array:
        """Random values in the shape of a parameter."""
        return random.uniform(low, high, self.target.shape_of(argument, self.layout.shape(self.step)))

    def draw(self, random: np.random.Generator, *arguments: str) -> dict[str, Any]:
        """Random values of those of these parameters that it takes; of all three, where none is named."""
        return {
            name: self.parameter(name, random, -span, span)
            for name, span in _SPANS.items()
            if self.takes(name) and name in (arguments or _SPANS)
        }

    def spread(self, parameter: Array, count: int) -> Array:
        """A parameter at each element of the rows, in its dtype."""
        values = self.layout.spread(parameter, self.step)
        return np.resize(values, (count, values.shape[1]))


def open_probe(
    target: Target,
    width: int,
    deadline: float,
    time_limit: float,
    findings: Findings,
    layout: Layout | None = None,
) -> Probe:
    """Find the layout, where it is not known, and the dtypes that the target takes.

    Raises:
        TargetError: it takes none.
    """
    failure: TargetError | None = None
    for dtype in ("float32", "float64", "bfloat16", "float16"):
        try:
            known = layout or find_layout(target, width, dtype)
            if layout:
                call(target, np.ones(layout.shape(1)), dtype)
            break
        except TargetError as error:
            failure = failure or error
    else:
        assert failure is not None  # noqa: S101  (every dtype failed)
        raise failure
    probe = Probe(target, known, findings, deadline, time_limit, wide=dtype)
    wide, accepts = dtype, []
    rows = np.random.default_rng(17).normal(size=(4, probe.n))
    for name in dtypes.FLOATS:
        try:
            y = probe.rows(rows, name)
            accepts.append(name)
        except TargetError as error:
            findings.add(f"{name} x", "refused", str(error))
            continue
        if name == "float64" and not np.array_equal(y, probe.rows(rows.astype(np.float32).astype(np.float64), name)):
            wide = name if y.dtype == np.float64 else wide
    return replace(probe, wide=wide, accepts=tuple(accepts))
