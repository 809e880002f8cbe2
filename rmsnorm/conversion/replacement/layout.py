"""What a replaced layer computes, and where: the layout that it has for x of one to five axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rmsnorm.conversion.replacement.report import NoNorm, Unproven
from rmsnorm.conversion.replacement.settings import Settings
from rmsnorm.identify import Target, TargetError
from rmsnorm.identify.layout import Layout, feature_axes, normalised_axes
from rmsnorm.specification.variants import Variant
from rmsnorm.targets.open import WIDTH
from rmsnorm.targets.target import Shape

_OTHERS: Final = (2, 3, 5, 4, 6, 7)  # sizes of the axes of x that have nothing to do with the gain
_OTHERS_OF_WIDE: Final = (2, 3, 2, 2)  # the same where a row is long, which costs time: a fifth of the rows
_WIDE: Final = 512


@dataclass(frozen=True)
class Norm:
    """What a replaced layer computes when it is called with x alone, or with x and a gate if it has one.

    Attributes:
        axes: the normalised axes.
        gain_axes: the axes along which gain and bias run.
        shapes: for each number of axes that was tried a shape of x; in a proof, of those at which the results agree.
        unlike: the other numbers of axes that were tried, at which the layer runs its own code.
        scale, bias: the layer's names of its gain and bias, None where it has none.
        x: its name of x.
        width: the only number of normalised elements that was proven, None for any.
        variant: None as long as it is not known.
        gate: its name of the gate, which follows x.
        group: the number of neighbours along the last axis that are normalised together, None for all.
        offset: what is added to a gain that is one number.
        settings: the values of the attributes for which it was proven; with others the layer runs its own code.
        copied: the dtypes of x, and of the gate, in which a model may write into it before the backward pass, as the
            layer keeps a copy. Of PyTorch.
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
    settings: Settings = Settings()  # noqa: RUF009  (it is immutable)
    copied: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ())
    keeps_order: bool = False
    unlike: tuple[int, ...] = ()

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether x has a number of axes that was tried, and as many normalised elements as were."""
        ranks, sizes = map(len, self.shapes), [shape[axis] for axis in self.axes]  # a list: Dynamo takes no generator
        return len(shape) in ranks and self.width in (None, math.prod(sizes))

    def layout(self, shape: Shape) -> Layout:
        """How the rows lie in x of a shape."""
        axes, gain = (tuple(axis % len(shape) for axis in entry) for entry in (self.axes, self.gain_axes))
        return Layout(shape, axes, gain, self.group)

    @property
    def example(self) -> Layout:
        """The layout to identify the layer with: of x with few axes, the first of which that may count rows does.

        Raises:
            NoNorm: there is none.
        """
        for shape in sorted(self.shapes, key=len):
            layout = self.layout(shape)
            first = next((axis for axis in range(len(shape)) if axis not in layout.axes), None)
            if first is not None and first not in layout.feature_axes:
                return replace(layout, sizes=(*shape[:first], None, *shape[first + 1 :]))
        raise NoNorm("it takes one row alone")

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


def find_layout(target: Target, x: str, gate: str | None) -> Norm:
    """The axes of a layer that are the same, counted from the last one or the first one, for the most shapes of x.

    Raises:
        NoNorm: it normalises no axes, or cannot be called.
    """
    layouts: dict[tuple[Shape, Shape], list[Shape]] = {}
    failure, answered = None, False
    for rank in range(1, 6):
        for shape in _shapes(target, rank):
            try:
                axes = normalised_axes(target, shape, "float32")
                gain = feature_axes(target, shape, axes)
            except TargetError as error:
                failure = failure or error
                continue
            answered = True
            if axes and (len(axes) < rank or rank == 1):
                for shift in (rank, 0):  # counted from the last axis, and from the first
                    key = tuple(axis - shift for axis in axes), tuple(axis - shift for axis in gain)
                    layouts.setdefault(key, []).append(shape)
                break
    if target.returned:
        raise (NoNorm if gate is None else Unproven)(f"it returns {' and '.join(sorted(target.returned))}")
    if not layouts:
        raise NoNorm("it computes something else" if answered else f"it cannot be called: {failure}")
    (axes, gain), shapes = max(layouts.items(), key=_likely)
    scale, bias = (target.names.get(argument) for argument in ("scale", "bias"))
    return Norm(axes, gain, tuple(shapes), scale, bias, x, gate=gate)


def _likely(entry: tuple[tuple[Shape, Shape], list[Shape]]) -> tuple[Any, ...]:
    """The gain runs along the normalised axes; then, the layout of the most shapes."""
    (axes, gain), shapes = entry
    return set(axes) <= set(gain), len(shapes), len(shapes[-1]), axes[0] < 0


def size_of_gain(target: Target, shape: Shape) -> Shape:
    """The shape of its gain, or else of its bias, for x of a shape; none if it is one number, or is not there."""
    argument = next((entry for entry in ("scale", "bias") if entry in target.arguments), None)
    gain = target.shape_of(argument, shape) if argument else ()
    return gain if math.prod(gain) > 1 else ()


def _shapes(target: Target, rank: int) -> Iterator[Shape]:
    """Shapes of x that suit the gain: at the end of x, and along axis 1."""
    try:
        gain = size_of_gain(target, (*_OTHERS[: rank - 1], WIDTH)) or (target.width or WIDTH,)
    except Exception:  # a layer may refuse a number of axes in any way
        return
    others = [size for size in _OTHERS if size not in gain]
    if math.prod(gain) == max(gain) >= _WIDE:
        others = list(_OTHERS_OF_WIDE)
    if len(gain) <= rank:
        yield (*others[: rank - len(gain)], *(size if size > 1 else others[-1] for size in gain))
    if rank > 2 and sum(size > 1 for size in gain) == 1:
        yield (others[0], max(gain), *others[1 : rank - 1])
