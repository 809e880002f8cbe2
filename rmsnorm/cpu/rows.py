"""Rows of x and of a mask, as kernels take them: the order of the axes, and steps through a mask. No array library.

A function of a framework passes its own ``transpose`` of an array and an order of axes, and broadcasts a mask itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any, TypeAlias

from rmsnorm.specification.call import Call, Shape

Order: TypeAlias = tuple[int, ...] | None  # of the axes of x; None if it is the order that they have


def order_of(call: Call) -> Order:
    """The axes of x in the order in which kernels take them.

    First come axes that are shared by all, then those of the parameters, then others that are normalised.
    """
    if call.has_last_axes and call.has_neighbours:
        return None
    others = tuple(axis for axis in call.axes if axis not in call.feature_axes)
    if others and call.variant.partial is not None:  # which counts the elements in the order of x
        return None
    return (*(axis for axis in call.shared_axes if axis not in others), *call.feature_axes, *others)


def axes_last(call: Call) -> Call:
    """The call on x whose axes are in the order that ``order_of`` says."""
    order = order_of(call)
    if order is None:
        return call
    axes, feature_axes = (tuple(sorted(map(order.index, part))) for part in (call.axes, call.feature_axes))
    return replace(call, shape=tuple(call.shape[axis] for axis in order), axes=axes, feature_axes=feature_axes)


def moved(order: Order, transpose: Callable[[Any, Any], Any], *arrays: Any) -> list[Any]:
    """The arrays with their axes in that order. Each has as many axes as x, or is None."""
    return [*arrays] if order is None else [None if array is None else transpose(array, order) for array in arrays]


def moved_back(order: Order, transpose: Callable[[Any, Any], Any], *arrays: Any) -> list[Any]:
    """Arrays whose axes are in that order, with the axes in the order of x again."""
    return moved(order and tuple(map(order.index, range(len(order)))), transpose, *arrays)


def with_all_axes(mask: Shape, rank: int) -> Shape:
    """The shape of a mask with as many axes as x: new ones of size 1 come first, as in a broadcast.

    >>> with_all_axes((7, 1), 4)
    (1, 1, 7, 1)
    """
    return (*(1 for _ in range(rank - len(mask))), *mask)


def mask_steps(mask: Shape, shape: Shape, first: int) -> tuple[Shape, int, int]:
    """The shape to which a mask is broadcast, without gaps; and the steps in it to the next row and the next element.

    A row of x has the axes from ``first`` on. A mask that is the same in all elements of a row, or in all rows, is read
    again and again by a step of 0, and not written out.

    >>> mask_steps((7, 1), (2, 7, 16), first=2), mask_steps((16,), (2, 7, 16), first=2)
    (((2, 7, 1), 1, 0), ((1, 1, 16), 0, 1))
    >>> mask_steps((2, 1, 16), (2, 7, 16), first=2)
    ((2, 7, 16), 16, 1)
    """
    mask = with_all_axes(mask, len(shape))
    if prod(mask[first:]) == 1:
        return (*shape[:first], *mask[first:]), 1, 0
    if prod(mask[:first]) == 1:
        return (*mask[:first], *shape[first:]), 0, 1
    return shape, prod(shape[first:]), 1
