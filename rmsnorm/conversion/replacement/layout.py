"""Where a layer takes its statistic and along which axes its gain runs, measured, for x of one to five axes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rmsnorm.accuracy.bounds import CONSTANT, FORMULA
from rmsnorm.conversion.replacement.report import NoNorm, Unproven
from rmsnorm.identify import Target, TargetError
from rmsnorm.variants import Variant

_OTHERS: Final = (2, 3, 5, 4, 6, 7)  # sizes of the axes of x that have nothing to do with the gain
_WIDTH: Final = 16  # of a layer without a gain

Array = npt.NDArray[Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Norm:
    """What a replaced layer computes when it is called with x alone, or with x and a gate if it has one.

    Attributes:
        axes: the normalised axes.
        gain_axes: the axes along which gain and bias run.
        shapes: for each number of axes that was tried a shape of x.
        scale, bias: the layer's names of its gain and bias, None where it has none.
        x: its name of x.
        width: the only number of normalised elements that was proven, None for any.
        variant: None as long as it is not known.
        gate: its name of the gate, which follows x.
        group: the number of neighbours along the last axis that are normalised together, None for all.
        offset: what is added to a gain that is one number.
        keeps_order: whether the axes of y have the order of those of x in memory; else y is contiguous. Of PyTorch.
    """

    axes: Shape
    gain_axes: Shape
    shapes: tuple[Shape, ...]
    scale: str | None
    bias: str | None
    x: str
    width: int | None = None
    variant: Variant | None = None
    gate: str | None = None
    group: int | None = None
    offset: float = 0.0
    keeps_order: bool = False

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether x has a number of axes that was tried, and as many normalised elements as were."""
        ranks, sizes = map(len, self.shapes), [shape[axis] for axis in self.axes]  # a list: Dynamo takes no generator
        return len(shape) in ranks and self.width in (None, math.prod(sizes))

    @property
    def known(self) -> Variant:
        """The variant, once it was recognised."""
        assert self.variant is not None  # noqa: S101
        return self.variant

    def with_variant(self, variant: Variant) -> Norm:
        """With another variant, but what the layer does with its gate and adds to a gain of one number."""
        if self.variant is not None and self.gate is not None:
            gate = {"gate_function": self.variant.gate_function, "gate_position": self.variant.gate_position}
            variant = variant.replace(**gate)
        if self.offset:
            variant = variant.replace(scale_offset=self.offset)
        return replace(self, variant=variant)


def find_layout(target: Target, x: str) -> Norm:
    """The layout of a layer.

    Raises:
        NoNorm: it normalises no axes.
    """
    offset = _offset(target)
    measured, width = {}, _implied_width(target, offset)
    target = replace(target, width=width or target.width)
    for rank in range(1, 6):
        for shape in _shapes(target, rank):
            axes = _normalised(target, shape)
            if axes and _is_so_at_twice_the_size(target, shape, axes):
                measured[shape] = axes
                break
    if not measured:
        raise NoNorm("it computes something else")
    layouts: dict[tuple[Shape, Shape], list[Shape]] = {}
    for shape, axes in measured.items():
        gain = _gain_axes(target, shape, axes)
        for shift in (len(shape), 0):  # counted from the last axis, and from the first
            key = tuple(axis - shift for axis in axes), tuple(axis - shift for axis in gain)
            layouts.setdefault(key, []).append(shape)
    (axes, gain), shapes = max(layouts.items(), key=_likely)
    scale, bias = (target.names.get(argument) for argument in ("scale", "bias"))
    return Norm(axes, gain, tuple(shapes), scale, bias, x, width, offset=offset)


def grouped_layout(target: Target, x: str, gate: str | None, group: int | None) -> Norm:
    """The layout of a layer over the last axis or groups of it, with a gate or not, for the shapes of x it takes."""
    shapes, width = [], target.width or (2 * group if group else _WIDTH)  # it may have a size of groups, or a number
    for rank in range(1, 6):
        ones = np.ones(shape := (*_OTHERS[: rank - 1], width), np.float32)
        gates = {} if gate is None else {"gate": ones}
        try:
            target.forward(ones, **gates, **parameters(target, ones, scale=np.ones, bias=np.zeros))
        except TargetError:
            continue
        shapes.append(shape)
    if not shapes:
        raise Unproven(f"it takes no x of {width} features")
    scale, bias = (target.names.get(argument) for argument in ("scale", "bias"))
    return Norm((-1,), (-1,), tuple(shapes), scale, bias, x, width if group else None, gate=gate, group=group)


def _implied_width(target: Target, offset: float) -> int | None:
    """The width of a layer that multiplies by the root of a fixed one and has no vector that shows it, else None."""
    widths = {width: _measured_width(target, width, offset) for width in (_WIDTH, 24)}
    return next((width for asked, width in widths.items() if width not in (None, asked)), None)


def _measured_width(target: Target, width: int, offset: float) -> int | None:
    y = _of_one_number(target, width, 1.0 - offset)
    square = math.inf if y is None else float(np.mean(y**2))
    implied = round(width * square) if np.isfinite(square) else 0
    return implied if implied > 1 and abs(width * square / implied - 1) < FORMULA else None


def _offset(target: Target) -> float:
    """What the layer adds to a gain of one number, 0 for another gain or none.

    Raises:
        Unproven: y is not proportional to the sum.
    """
    zero, one = (_of_one_number(target, _WIDTH, gain) for gain in (0.0, 1.0))
    if "scale" not in target.arguments or zero is None or one is None or not np.any(zero):
        return 0.0
    slope = one - zero
    with np.errstate(all="ignore"):
        ratio = float(np.median(zero / slope))
    if not (math.isfinite(ratio) and np.allclose(zero, round(ratio) * slope, rtol=FORMULA, atol=1e-6)):
        raise Unproven("y is not proportional to its gain, which is one number, or to that and an offset")
    return float(round(ratio))


def _of_one_number(target: Target, width: int, gain: float) -> npt.NDArray[Any] | None:
    """y for a gain of one number, without a bias; None where the layer has a vector, or takes no such x."""
    x = np.random.default_rng(0).normal(size=(4, width)).astype(np.float32)
    try:
        arrays = parameters(target, x, scale=lambda shape: np.full(shape, gain), bias=np.zeros)
        if any(array.size > 1 for array in arrays.values()):
            return None
        y = target.forward(x, **arrays)
    except (TargetError, ValueError):
        return None
    return y.astype(np.float64) if y.dtype.kind == "f" else None


def _likely(entry: tuple[tuple[Shape, Shape], list[Shape]]) -> tuple[Any, ...]:
    """The gain runs along the normalised axes; then, the layout of the most shapes."""
    (axes, gain), shapes = entry
    return set(axes) <= set(gain), len(shapes), len(shapes[-1]), axes[0] < 0


def _gain_axes(target: Target, shape: Shape, axes: Shape) -> Shape:
    argument = next((entry for entry in ("scale", "bias") if entry in target.arguments), None)
    gain = target.shape_of(argument, shape) if argument else ()
    if math.prod(gain) <= 1:
        return axes
    own = [axis - len(gain) + len(shape) for axis, size in enumerate(gain) if size > 1]
    if len(own) == 1 and shape[own[0]] != max(gain):  # per channel, without axes of size 1 for the others
        return (1,)
    return tuple(own)


def _shapes(target: Target, rank: int) -> Iterator[Shape]:
    """Shapes of x that suit the gain: at the end of x, and along axis 1."""
    argument = next((entry for entry in ("scale", "bias") if entry in target.arguments), None)
    try:
        gain = target.shape_of(argument, (*_OTHERS[: rank - 1], _WIDTH)) if argument else ()
    except Exception:  # a layer may refuse a number of axes in any way
        return
    if math.prod(gain) <= 1:
        gain = (target.width or _WIDTH,)
    others = [size for size in _OTHERS if size not in gain]
    if len(gain) <= rank:
        yield (*others[: rank - len(gain)], *(size if size > 1 else others[-1] for size in gain))
    if rank > 2 and sum(size > 1 for size in gain) == 1:
        yield (others[0], max(gain), *others[1 : rank - 1])


def _normalised(target: Target, shape: Shape) -> Shape:
    """The axes along which y / x is constant, with a constant gain: none for what is no RMSNorm."""
    random = np.random.default_rng(len(shape))
    x = random.uniform(0.5, 1.5, shape) * np.where(random.random(shape) < 0.5, -1, 1)
    for axis, size in enumerate(shape):
        sizes = [size if entry == axis else 1 for entry in range(len(shape))]
        x = x * np.exp(random.permutation(np.linspace(-1, 1, size))).reshape(sizes)
    x = x.astype(np.float32)
    try:
        y = target.forward(x, **parameters(target, x, scale=np.ones, bias=np.zeros))
    except TargetError:
        return ()
    if target.returned:
        raise NoNorm(f"it returns {' and '.join(sorted(target.returned))}")
    if y.dtype.kind not in "fV" or y.shape != shape:
        return ()
    ratio = y.astype(np.float64) / x
    largest = np.abs(ratio).max()
    if not 0 < largest < np.inf:
        return ()
    constant = tuple(axis for axis in range(len(shape)) if np.ptp(ratio, axis=axis).max() <= CONSTANT * largest)
    return constant if len(constant) < len(shape) or len(shape) == 1 else ()


def _is_so_at_twice_the_size(target: Target, shape: Shape, axes: Shape) -> bool:
    """Whether all elements along these axes count where there are more of them; True where it takes no more."""
    longer = tuple(2 * size if axis in axes else size for axis, size in enumerate(shape))
    ones = np.ones(longer, np.float32)
    try:
        target.forward(ones, **parameters(target, ones, scale=np.ones, bias=np.zeros))
    except TargetError:
        return True
    return _normalised(target, longer) == axes


def parameters(target: Target, x: Array, **make: Callable[[Shape], Any]) -> dict[str, Array]:
    """The parameters that the layer takes, made by functions of a shape, in the dtype of x.

    Raises:
        TargetError: it has none for such an x.
    """
    try:
        shapes = {argument: target.shape_of(argument, x.shape) for argument in make if argument in target.arguments}
    except Exception as error:  # a layer may refuse a number of axes in any way
        raise TargetError(f"{target.name} has no parameters for x of shape {x.shape}") from error
    return {argument: np.asarray(make[argument](shape)).astype(x.dtype) for argument, shape in shapes.items()}


@dataclass(kw_only=True)
class Rows(Target):
    """A layer called with a matrix of rows, each normalised by itself, and with vectors as parameters.

    Attributes:
        inner: the layer.
        norm: its layout.
        shape: of x; the axis along which the rows are counted has another size in each call.
    """

    inner: Target
    norm: Norm
    shape: Shape

    @classmethod
    def of(cls, target: Target, norm: Norm) -> Rows:
        shape = max((shape for shape in norm.shapes if len(shape) < 5), key=len, default=norm.shapes[0])
        axes, gain = ({axis % len(shape) for axis in entry} for entry in (norm.axes, norm.gain_axes))
        if not set(range(len(shape))) - axes - gain:
            raise Unproven("it takes one row alone")
        arguments = tuple(
            entry for entry in ("scale", "bias")
            if entry in target.arguments and axes <= gain and math.prod(target.shape_of(entry, shape)) > 1
        )  # fmt: skip
        return cls._with_shape(target, norm, shape, arguments)

    @classmethod
    def _with_shape(cls, target: Target, norm: Norm, shape: Shape, arguments: tuple[str, ...]) -> Rows:
        width = math.prod(shape[axis] for axis in norm.axes)

        def resized(other: int) -> Rows:
            axis = norm.axes[-1] % len(shape)
            size, rest = divmod(other * shape[axis], width)
            if rest or not size:
                raise ValueError(f"{target.name} has no rows of {other} elements")
            return cls._with_shape(target, norm, (*shape[:axis], size, *shape[axis + 1 :]), arguments)

        any_width = not arguments and norm.width is None
        return cls(
            target.name,
            target.framework,
            target.bridge,
            target.function,
            arguments,
            width=width,
            rank=2,
            resized=resized if any_width else None,
            inner=target,
            norm=norm,
            shape=shape,
        )

    def forward(self, x: Array, scale: Array | None = None, bias: Array | None = None, **others: Any) -> Array:
        rank = len(self.shape)
        axes, gain = ([axis % rank for axis in entry] for entry in (self.norm.axes, self.norm.gain_axes))
        outer = [axis for axis in range(rank) if axis not in axes]
        counted = next(axis for axis in outer if axis not in gain)
        order, sizes = [*outer, *axes], [self.shape[axis] if axis in gain else 1 for axis in outer]
        wide = x.reshape([len(x) if axis == counted else 1 if axis in outer else self.shape[axis] for axis in order])
        sizes[outer.index(counted)] = len(x)
        wide = np.broadcast_to(wide, (*sizes, *wide.shape[len(outer) :]))
        inputs = np.ascontiguousarray(wide.transpose(np.argsort(order)))
        neutral = functools.partial(np.full, fill_value=1.0 - self.norm.offset)
        arrays = parameters(self.inner, inputs, scale=neutral, bias=np.zeros)
        for argument, vector in (("scale", scale), ("bias", bias)):
            if vector is not None:
                shape = arrays[argument].shape
                if vector.size != math.prod(shape):
                    vector = vector.reshape([size if axis in axes else 1 for axis, size in enumerate(self.shape)])
                    vector = np.broadcast_to(vector.reshape(vector.shape[-len(shape) :]), shape)
                arrays[argument] = np.ascontiguousarray(vector.reshape(shape))
        y = self.inner.forward(inputs, **arrays).transpose(order)
        return np.ascontiguousarray(y[tuple(slice(None) if axis == counted else 0 for axis in outer)]).reshape(x.shape)
