"""How rows lie in x: which axes a target normalises together, and along which axes its parameters run."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rmsnorm.accuracy.bounds import CHANGED
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import Shape, Target, TargetError

Sizes = tuple[int | None, ...]  # a shape with None for the axis that counts examples
ROWS: Final = 80  # in one call, so that a library compiles for one shape
NEUTRAL: Final[Mapping[str, float]] = {"scale": 1.0, "bias": 0.25, "gate_vector": 0.0, "gate": 2.0}


@dataclass(frozen=True)
class Layout:
    """How a matrix of rows, each normalised by itself, lies in x.

    Attributes:
        sizes: shape of x, with None for the axis that counts examples; without a None, x is one example.
        axes: the normalised axes.
        feature_axes: the axes along which the parameters run.
        group: elements of the last axis that are normalised together, None for all.
        groups: how many of them there are at every width, None where every width has groups of the same size.
    """

    sizes: Sizes
    axes: tuple[int, ...]
    feature_axes: tuple[int, ...]
    group: int | None = None
    groups: int | None = None

    @property
    def n(self) -> int:
        """Number of elements in a row."""
        return self.group or math.prod(self.sizes[axis] or 1 for axis in self.axes)

    @property
    def rows_per_example(self) -> int:
        """Rows in one example."""
        outer = [size or 1 for axis, size in enumerate(self.sizes) if axis not in self.axes]
        groups = self.sizes[-1] // self.group if self.group and self.sizes[-1] else 1
        return math.prod(outer) * groups

    @property
    def unlimited(self) -> bool:
        """Whether one call takes any number of rows."""
        return None in self.sizes

    def shape(self, count: int) -> Shape:
        return tuple(-(-count // self.rows_per_example) if size is None else size for size in self.sizes)

    @property
    def last(self) -> bool:
        """Whether the normalised axes are the last ones."""
        rank = len(self.sizes)
        all_but_first = rank > 2 and len(self.axes) == rank - 1 and self.axes[-1] == rank - 1
        return bool(self.group) or self.axes == (rank - 1,) or all_but_first

    @property
    def description(self) -> str:
        """In words, counted from the last axis where that says more."""
        if self.group:
            return f"last, in groups of {self.group}"
        if not self.last:
            return f"{', '.join(map(str, self.axes))} of {len(self.sizes)}"
        return "last" if len(self.axes) == 1 else f"last {len(self.axes)}"


def find_layout(target: Target, width: int, dtype: str) -> Layout:
    """Find the axes: change one element of x and see where y changes.

    Raises:
        TargetError: the target takes none of the shapes that were tried.
    """
    sizes, axes = _first_taken(target, _candidates(target, width), dtype)
    axes = axes or (len(sizes) - 1,)
    if sizes == (None, width) and axes == (1,) and target.x_shape is None:  # of two, axis 1 is the last
        three = ((None, 3, width), (None, width, 3), (None, width, width))  # the last one for a gain along axis 1
        with contextlib.suppress(TargetError):
            more, others = _first_taken(target, three, dtype)
            sizes, axes = (more, others) if others and others != (2,) else (sizes, axes)
    count = target.x_shape[0] if target.x_shape else 16 + (16 in sizes)  # no size of another axis
    fixed = tuple(size or count for size in sizes) if any(sizes[axis] is None for axis in axes) else sizes
    return Layout(fixed, axes, feature_axes(target, fixed, axes))


def _first_taken(target: Target, shapes: Iterable[Sizes], dtype: str) -> tuple[Sizes, Shape]:
    """Of these shapes of x the first one that the target takes, and the axes that it normalises there.

    Raises:
        TargetError: it takes none of them.
    """
    failure: TargetError | None = None
    for sizes in shapes:
        try:
            return sizes, normalised_axes(target, sizes, dtype)
        except TargetError as error:
            failure = failure or error
    assert failure is not None  # noqa: S101  (there is always a shape)
    raise failure


def _candidates(target: Target, width: int) -> list[Sizes]:
    if target.x_shape is not None:
        return [(None, *target.x_shape[1:]) if len(target.x_shape) > 1 else target.x_shape]
    shape = _parameter_shape(target, width)
    trailing = tuple(size if size > 1 else 3 + axis for axis, size in enumerate(shape)) or (width,)
    shapes: list[Sizes] = [(None, *trailing)]
    if shape[:1] == (1,) and len(trailing) > 1:  # its first axis is that of examples
        shapes.insert(0, (None, *trailing[1:]))
    if len(trailing) == 1:
        shapes += [(None, 3, width), (None, 3, 4, width), (width, None), (None, width, 3), (None, width, 3, 2)]
    return shapes


def _parameter_shape(target: Target, width: int) -> Shape:
    """The shape of the gain or bias where it has several axes, else none."""
    for argument in ("scale", "bias"):
        if argument in target.arguments:
            try:
                shape = tuple(target.shape_of(argument, (4, width)))
            except Exception:  # a layer for more axes may raise anything
                continue
            if len(shape) > 1 and math.prod(shape) == width:
                return shape
    return ()


def normalised_axes(target: Target, sizes: Sizes, dtype: str) -> tuple[int, ...]:
    """Along which axes y changes when the first, or the last, element of x does: none if nothing is normalised.

    Raises:
        TargetError: it takes no such x.
    """
    shape = tuple(size or (ROWS if target.bridge.compiles else 4) for size in sizes)
    random = np.random.default_rng(1)
    base = random.uniform(0.5, 1.5, shape) * random.choice([-1, 1], shape)
    y = call(target, base, dtype)
    axes: set[int] = set()
    for index in (tuple(0 for _ in shape), tuple(size - 1 for size in shape)):
        moved = base.copy()
        moved[index] = 4 * math.sqrt(math.prod(shape)) * np.sign(base[index])
        changed = np.argwhere(np.abs(call(target, moved, dtype) - y) > CHANGED * np.max(np.abs(y)))
        axes |= {int(axis) for axis in np.argwhere((changed != index).any(axis=0))[:, 0]}
    return tuple(sorted(axes))


def call(target: Target, x: Array, dtype: str) -> Array:
    """y in float64 for ordinary parameters in the dtype of x."""
    x = x.astype(dtype)
    ordinary = {argument: functools.partial(np.full, fill_value=value) for argument, value in NEUTRAL.items()}
    return target.forward(x, **parameters(target, x, **ordinary)).astype(np.float64)


def parameters(target: Target, x: Array, **make: Callable[[Shape], Any]) -> dict[str, Array]:
    """Those of these arguments that the target takes, made by functions of a shape, in the dtype of x.

    Raises:
        TargetError: it has none for such an x.
    """
    shapes = {}
    for argument in target.arguments:
        if argument in make:
            try:
                shapes[argument] = x.shape if argument == "gate" else target.shape_of(argument, x.shape)
            except Exception as error:  # a layer may refuse a number of axes in any way
                raise TargetError(f"{target.name} has no parameters for x of shape {x.shape}") from error
    return {argument: np.asarray(make[argument](shape)).astype(x.dtype) for argument, shape in shapes.items()}


def feature_axes(target: Target, sizes: Sizes, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The axes along which the gain, or the bias, runs: those of its sizes, normalised ones first, later ones first."""
    argument = next((argument for argument in ("scale", "bias") if argument in target.arguments), None)
    if argument is None:
        return axes
    shape = tuple(size or 4 for size in sizes)
    wanted = tuple(target.shape_of(argument, shape))
    if wanted == tuple(shape[axis] for axis in axes) or math.prod(wanted) == 1:
        return axes
    long = tuple(axis - len(wanted) + len(shape) for axis, size in enumerate(wanted) if size > 1)
    if len(wanted) > 1 and all(shape[axis] == wanted[axis - len(shape)] for axis in long):
        return long  # the other axes of the parameter have size 1
    rest = [axis for axis in range(len(shape)) if axis not in axes]
    for axis in (*axes[::-1], *rest[::-1]):
        if wanted == (shape[axis],):
            return (axis,)
    raise TargetError(
        f"{target.name} has a {argument} of shape {wanted}, expected sizes of x {shape} along some of its axes"
    )
