"""What a replaced layer computes, and for which x: one record from the first question to the new module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rmsnorm.specification.variants import Variant
from rmsnorm.targets.target import Shape

_OTHERS = (2, 3, 5, 4)  # sizes of the axes of x that are not normalised


@dataclass(frozen=True)
class Norm:
    """What a replaced layer computes when it is called with x alone, or with x and a gate if it has one.

    Attributes:
        axes: the normalised axes, of a norm that is replaced the last ones.
        gain_axes: the axes along which gain and bias run, of a norm that is replaced the same ones.
        scale, bias: the layer's names of its gain and bias, None where it has none.
        x: its name of x.
        variant: None as long as it is not known.
        sizes: of the normalised axes, as they were tried.
        ranks: in a proof, the numbers of axes of x for which it holds.
        gate: its name of the gate, which follows x.
        group: the number of neighbours along the last axis that are normalised together, None for all.
        of_eps: the layer's names of the attributes that hold its eps.
    """

    axes: Shape
    gain_axes: Shape
    scale: str | None
    bias: str | None
    x: str
    variant: Variant | None = None
    sizes: Shape = ()
    ranks: tuple[int, ...] = ()
    gate: str | None = None
    group: int | None = None
    of_eps: tuple[str, ...] = ()

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether x has a number of axes that was tried, and if it is split in groups, as many elements as were."""
        return len(shape) in self.ranks and (self.group is None or shape[-1] == self.sizes[-1])

    @property
    def example(self) -> Shape:
        """A shape of x that it takes."""
        return (*_OTHERS[: max(self.ranks) - len(self.sizes)], *self.sizes)

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
