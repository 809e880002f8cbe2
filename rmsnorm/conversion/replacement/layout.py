"""What a replaced layer computes, and where: one record from the first question to the module that computes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rmsnorm.conversion.replacement.report import NoNorm
from rmsnorm.identify.layout import Axes, Layout
from rmsnorm.specification.variants import Variant
from rmsnorm.targets.target import Shape


@dataclass(frozen=True)
class Norm(Axes):
    """What a replaced layer computes when it is called with x alone, or with x and a gate if it has one.

    Attributes:
        shapes: in a proof, those at which the results agree.
        unlike: the other numbers of axes that were tried, at which the layer runs its own code.
        scale, bias: the layer's names of its gain and bias, None where it has none.
        x: its name of x.
        width: the only number of normalised elements that was proven, None for any.
        variant: None as long as it is not known.
        gate: its name of the gate, which follows x.
        group: the number of neighbours along the last axis that are normalised together, None for all.
        of_eps: the layer's names of the attributes that hold its eps.
        keeps_order: whether the axes of y have the order of those of x in memory; else y is contiguous. Of PyTorch.
    """

    scale: str | None
    bias: str | None
    x: str
    width: int | None = None
    variant: Variant | None = None
    gate: str | None = None
    group: int | None = None
    of_eps: tuple[str, ...] = ()
    keeps_order: bool = False
    unlike: tuple[int, ...] = ()

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether x has a number of axes that was tried, and as many normalised elements as were."""
        ranks, sizes = map(len, self.shapes), [shape[axis] for axis in self.axes]  # a list: Dynamo takes no generator
        return len(shape) in ranks and self.width in (None, math.prod(sizes))

    def layout(self, shape: Shape) -> Layout:
        """How the rows lie in x of a shape."""
        return replace(super().layout(shape), group=self.group)

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
        """With another variant, but what the layer does with its gate."""
        if self.variant is not None and self.gate is not None:
            gate = {"gate_function": self.variant.gate_function, "gate_position": self.variant.gate_position}
            variant = variant.replace(**gate)
        return replace(self, variant=variant)
