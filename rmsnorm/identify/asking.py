"""Asks a target: rows go in with parameters, and y and gradients come out in a shape that the golden takes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.identify.findings import Findings
from rmsnorm.identify.layout import NEUTRAL, ROWS, Layout, call, find_layout
from rmsnorm.specification import dtypes
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import Target, TargetError

LIKE_X: Final = ("x", "gate", "residual", "mask")
_PARAMETERS: Final = ("scale", "bias", "gate_vector")
_ELEMENTS: Final = 2**18  # of a call, where a row is wide


class Answer(NamedTuple):
    """The arrays of a call in the shapes of the golden, and the target's y."""

    arrays: dict[str, Array]
    y: Array

    @property
    def dtype(self) -> str:
        return str(self.arrays["x"].dtype.name)

    @property
    def gain(self) -> str | None:
        """The dtype of the gain, None without one."""
        return str(self.arrays["scale"].dtype.name) if "scale" in self.arrays else None


@dataclass(frozen=True)
class Probe:
    """A target with the place of its rows in x, and the arguments that are passed.

    Attributes:
        target: what is asked.
        layout: how rows lie in x.
        findings: the record of what is learned.
        deadline: on time.monotonic; time_limit: the seconds until then from the start.
        passes: the parameters that a call gets, and the gate where a call must have one.
        wide: the widest dtype in which it computes.
        accepts: dtypes of x with parameters of the same dtype.
    """

    target: Target
    layout: Layout
    findings: Findings
    deadline: float
    time_limit: float
    passes: tuple[str, ...] = ()
    wide: str = "float32"
    accepts: tuple[str, ...] = ()

    @property
    def n(self) -> int:
        """Elements in a row."""
        return self.layout.n

    @property
    def axes(self) -> tuple[int, ...]:
        """The normalised axes in the golden's shapes, where groups have an axis of their own."""
        return (len(self.layout.sizes),) if self.layout.group else self.layout.axes

    @property
    def feature_axes(self) -> tuple[int, ...]:
        """The axes of the parameters in the golden's shapes."""
        rank = len(self.layout.sizes)
        return (rank - 1, rank) if self.layout.group else self.layout.feature_axes

    @property
    def is_short_of_time(self) -> bool:
        """Whether a library that compiles every shape has had half of its time: then what need not be asked is not."""
        return self.target.bridge.compiles and time.monotonic() > self.deadline - self.time_limit / 2

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise TargetError(f"{self.target.name} took more than its limit of {self.time_limit:g} s")

    def shape(self, rows: int = ROWS) -> tuple[int, ...]:
        """The shape of x in the golden's shapes, with about so many rows, or fewer where they are wide."""
        shape = self.layout.shape(min(rows, max(8, _ELEMENTS // self.n)))
        return (*shape[:-1], shape[-1] // self.n, self.n) if self.layout.group else shape

    def of_rows(self, values: Array, x: Array) -> Array:
        """A value for each row, in a shape that broadcasts against x."""
        return np.resize(values, [1 if axis in self.axes else size for axis, size in enumerate(x.shape)])

    def count(self, x: Array) -> int:
        """The rows of x."""
        return x.size // self.n

    def matrix(self, array: Array) -> Array:
        """An array in the golden's shape as a matrix of rows, in float64."""
        moved = np.moveaxis(array, self.axes, range(-len(self.axes), 0))
        return moved.reshape(-1, self.n).astype(np.float64)

    def random(
        self,
        seed: int,
        dtype: str,
        gain: str | None = None,
        *,
        rows: int = ROWS,
        sizes: tuple[float, float] = (-0.5, 1.5),
        far: bool = False,
        fixed: Mapping[str, float] = MappingProxyType({}),
    ) -> dict[str, Array]:
        """Rows of very different size, some with an outlier, and random parameters.

        Args:
            seed: of the random numbers.
            dtype: of x and of what has its shape; gain: of the parameters, None for the same.
            rows: how many, at most.
            sizes: the powers of ten between which the sizes of the rows are.
            far: whether some gates are far from 0, and some are 0.
            fixed: a number for all elements of an argument.
        """
        random, shape = np.random.default_rng(seed), self.shape(rows)
        count = math.prod(shape) // self.n
        x = random.normal(0.1, 1.0, shape)
        x *= self.of_rows(10.0 ** random.uniform(*sizes, count), x)
        has_outlier = self.of_rows(np.arange(count) % 4 == 1, x) & (random.random(x.shape) < 1.5 / self.n)
        x = np.where(has_outlier, 20 * x, x)
        with np.errstate(over="ignore"):
            arrays = {"x": x.astype(dtype)}
        for name in self.passes:
            if name in LIKE_X:
                value = random.uniform(-3, 3, shape)
                if far:
                    value *= self.of_rows(np.where(np.arange(count) % 4 == 3, 21.0, 1.0), x)
                    value = np.where(random.random(shape) < 0.02, 0.0, value)
                arrays[name] = (np.full(shape, fixed[name]) if name in fixed else value).astype(dtype)
            else:
                arrays[name] = self._parameter(name, shape, random, fixed.get(name)).astype(gain or dtype)
        return arrays

    def _parameter(self, name: str, shape: Sequence[int], random: np.random.Generator, fixed: float | None) -> Array:
        sizes = [shape[axis] for axis in self.feature_axes]
        is_one = math.prod(self.target.shape_of(name, self._of_target(shape))) == 1
        value = random.uniform(-1.5, 1.5, 1 if is_one else sizes)
        return np.broadcast_to(value if fixed is None else np.asarray(fixed), sizes)

    def _of_target(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*shape[:-2], shape[-2] * shape[-1]) if self.layout.group else tuple(shape)

    def sent(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """The arrays in the shapes that the target takes."""
        shape, sent = self._of_target(arrays["x"].shape), {}
        for name, array in arrays.items():
            own = shape if name in LIKE_X else tuple(self.target.shape_of(name, shape))
            is_one = name not in LIKE_X and math.prod(own) == 1
            if not is_one and math.prod(own) != array.size:
                raise TargetError(f"{self.target.name} has no {name} for x of shape {shape}")
            sent[name] = np.ascontiguousarray((array.ravel()[:1] if is_one else array).reshape(own))
        return sent

    def y(self, arrays: Mapping[str, Array]) -> Array:
        """The target's y, in the golden's shape."""
        self.check_time()
        return (
            self.target.forward(**self.sent(arrays)).reshape(arrays["x"].shape).copy()
        )  # the next one may write there

    def answer(self, seed: int, dtype: str, gain: str | None = None, **options: Any) -> Answer:
        """y of random rows."""
        arrays = self.random(seed, dtype, gain, **options)
        return Answer(arrays, self.y(arrays))

    def gradients(self, arrays: Mapping[str, Array], dy: Array) -> dict[str, Array | None]:
        """The gradients by their names, in the golden's shapes where they have as many elements."""
        self.check_time()
        sent = self.sent(arrays)
        got = self.target.all_gradients(dy.reshape(sent["x"].shape), **sent)
        gradients: dict[str, Array | None] = {}
        for name, array in arrays.items():
            of_name = got.get(name)
            same = of_name is not None and of_name.size == array.size
            gradients[f"d{name}"] = of_name.reshape(array.shape) if of_name is not None and same else of_name
        return gradients

    def rows(self, rows: Array) -> Array:
        """y of a matrix of rows in the widest dtype, with ``NEUTRAL`` for all other arguments, in float64."""
        arrays = self.random(0, self.wide, fixed=NEUTRAL)
        shape = arrays["x"].shape
        count = math.prod(shape) // self.n
        moved = [*(size for axis, size in enumerate(shape) if axis not in self.axes), *(shape[a] for a in self.axes)]
        parts = []
        for start in range(0, len(rows), count):
            x = np.resize(rows[start : start + count], (count, self.n)).reshape(moved)
            arrays["x"] = np.moveaxis(x, range(-len(self.axes), 0), self.axes).astype(self.wide)
            parts.append(self.matrix(self.y(arrays)))
        return np.concatenate(parts)[: len(rows)]

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
            if time.monotonic() > deadline:
                raise failure from None
    else:
        assert failure is not None  # noqa: S101  (every dtype failed)
        raise failure
    passes = tuple(name for name in _PARAMETERS if name in target.arguments)
    probe = Probe(target, known, findings, deadline, time_limit, passes, wide=dtype)
    if "gate" in target.arguments:
        try:
            probe.answer(17, dtype)
        except TargetError:  # it must have one
            probe = replace(probe, passes=(*passes, "gate"))
    wide, accepts = dtype, []
    for name in dtypes.FLOATS:
        try:
            arrays, y = probe.answer(17, name)
        except TargetError as error:
            findings.add(f"{name} x", "refused", str(error))
            continue
        accepts.append(name)
        narrow = {**arrays, "x": arrays["x"].astype(np.float32).astype(name)}
        if name == y.dtype.name == "float64" and not np.array_equal(y, probe.y(narrow), equal_nan=True):
            wide = name
    return replace(probe, wide=wide, accepts=tuple(accepts))
