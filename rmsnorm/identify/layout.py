"""Where the rows are: which axes of x a target normalises together, and what its parameters run along."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import Shape, Target, TargetError

ROWS = 80  # in one call, so that a library compiles for one shape
_CHANGED = 0.05  # of the largest |y|: far above rounding, far below what a tenfold statistic does


@dataclass(frozen=True)
class Layout:
    """How a matrix of rows, each normalised by itself, lies in x.

    Attributes:
        sizes: shape of x, with None for the axis that counts examples; without it, x is one example.
        axes: the normalised axes.
        feature_axes: those that the parameters run along.
        group: elements of the last axis that are normalised together, None for all.
    """

    sizes: tuple[int | None, ...]
    axes: tuple[int, ...]
    feature_axes: tuple[int, ...]
    group: int | None = None

    @property
    def n(self) -> int:
        """Number of elements in a row."""
        return self.group or math.prod(self.sizes[axis] or 1 for axis in self.axes)

    @property
    def multiple(self) -> int:
        """Rows in one example."""
        outer = [size or 1 for axis, size in enumerate(self.sizes) if axis not in self.axes]
        groups = self.sizes[-1] // self.group if self.group and self.sizes[-1] else 1
        return math.prod(outer) * groups

    @property
    def endless(self) -> bool:
        """Whether one call takes any number of rows."""
        return None in self.sizes

    def shape(self, count: int) -> Shape:
        return tuple(-(-count // self.multiple) if size is None else size for size in self.sizes)

    def place(self, rows: Array) -> Array:
        """Rows as x; the last example is filled up with rows that were there."""
        shape = self.shape(len(rows))
        rows = np.resize(rows, (math.prod(shape) // self.n, rows.shape[1]))
        if self.group:
            return rows.reshape(shape)
        outer = [axis for axis in range(len(shape)) if axis not in self.axes]
        order = [*outer, *self.axes]
        return np.ascontiguousarray(rows.reshape([shape[axis] for axis in order]).transpose(np.argsort(order)))

    def take(self, x: Array, count: int) -> Array:
        """The rows of what is shaped as x."""
        if self.group:
            return x.reshape(-1, self.group)[:count]
        outer = [axis for axis in range(x.ndim) if axis not in self.axes]
        return x.transpose([*outer, *self.axes]).reshape(-1, self.n)[:count]

    def spread(self, parameter: Array, count: int) -> Array:
        """What a parameter is at each element of the rows."""
        shape = self.shape(count)
        if parameter.size > 1:
            parameter = parameter.reshape([s if axis in self.feature_axes else 1 for axis, s in enumerate(shape)])
        return self.take(np.broadcast_to(parameter, shape), count)

    @property
    def story(self) -> str:
        """In words, counted from the last axis where that says more."""
        rank = len(self.sizes)
        if self.group:
            return f"last, in groups of {self.group}"
        if len(self.axes) == rank - 1 and self.axes[-1] == rank - 1 and rank > 2:
            return f"last {len(self.axes)}"
        if self.axes == (rank - 1,):
            return "last"
        return f"{', '.join(map(str, self.axes))} of {rank}"


def find_layout(target: Target, width: int, dtype: str) -> Layout:
    """Find the axes by what changes when one element does.

    Raises:
        TargetError: the target takes no shape that was tried.
    """
    failure: TargetError | None = None
    for sizes in _candidates(target, width):
        try:
            moved = _axes(target, sizes, dtype)
        except TargetError as error:
            failure = failure or error
            continue
        axes = moved or (len(sizes) - 1,)
        fixed = tuple(size or 16 for size in sizes) if any(sizes[axis] is None for axis in axes) else sizes
        return Layout(fixed, axes, _feature_axes(target, fixed, axes))
    assert failure is not None  # noqa: S101  (there is always a candidate)
    raise failure


def _candidates(target: Target, width: int) -> list[tuple[int | None, ...]]:
    trailing = _trailing(target, width)
    shapes: list[tuple[int | None, ...]] = [(None, *trailing)]
    if len(trailing) == 1:
        shapes += [(None, 3, width), (None, 3, 4, width), (width, None)]
    return shapes


def _trailing(target: Target, width: int) -> Shape:
    """The shape of the parameters where they have several axes."""
    for role in ("scale", "bias"):
        if role in target.arguments:
            try:
                shape = tuple(target.shape_of(role, (4, width)))
            except Exception:  # of a layer that is built for more axes
                continue
            if len(shape) > 1 and math.prod(shape) == width:
                return shape
    return (width,)


def _axes(target: Target, sizes: tuple[int | None, ...], dtype: str) -> tuple[int, ...]:
    """Along which axes y changes when the first, or the last, element of x does."""
    shape = tuple(size or (ROWS if target.bridge.compiles else 4) for size in sizes)
    random = np.random.default_rng(1)
    base = random.uniform(0.5, 1.5, shape) * random.choice([-1, 1], shape)
    y = call(target, base, dtype)
    found: set[int] = set()
    for place in (tuple(0 for _ in shape), tuple(size - 1 for size in shape)):
        moved = base.copy()
        moved[place] = 4 * math.sqrt(math.prod(shape)) * np.sign(base[place])
        changed = np.argwhere(np.abs(call(target, moved, dtype) - y) > _CHANGED * np.max(np.abs(y)))
        found |= {int(axis) for axis in np.argwhere((changed != place).any(axis=0))[:, 0]}
    return tuple(sorted(found))


def call(target: Target, x: Array, dtype: str) -> Array:
    """y in float64 for neutral parameters in the dtype of x."""
    x = x.astype(dtype)
    given = {}
    for role in target.arguments:
        if role in ("scale", "bias", "gate_vector"):
            shape = target.shape_of(role, x.shape)
            given[role] = np.full(shape, {"scale": 0.5, "bias": 0.25, "gate_vector": 0.0}[role], dtype)
        if role == "gate":
            given[role] = np.full(x.shape, 2.0, dtype)
    return target.forward(x, **given).astype(np.float64)


def _feature_axes(target: Target, sizes: tuple[int | None, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """The axes along which the gain, or the bias, runs: those whose sizes it has, normalised ones first."""
    role = next((role for role in ("scale", "bias") if role in target.arguments), None)
    if role is None:
        return axes
    shape = tuple(size or 4 for size in sizes)
    wanted = tuple(target.shape_of(role, shape))
    if wanted == tuple(shape[axis] for axis in axes) or math.prod(wanted) == 1:
        return axes
    rest = [axis for axis in range(len(shape)) if axis not in axes]
    for axis in (*axes, *rest):
        if wanted == (shape[axis],):
            return (axis,)
    raise TargetError(
        f"{target.name} has a {role} of shape {wanted}, expected sizes of x {shape} along some of its axes"
    )


def with_group(layout: Layout, group: int) -> Layout:
    return replace(layout, group=group)
