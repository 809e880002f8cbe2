"""What x a kernel takes: limits that its user declares, or that explain what it refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple

from rmsnorm.specification import errors

_FEW: Final = 4  # widths, which one writes as options


class Facts(NamedTuple):
    """What limits may forbid of a call: numbers of axes, columns and rows, dtypes and memory."""

    axes: int
    width: int
    rows: int
    same_dtype: bool
    contiguous: bool


@dataclass(frozen=True)
class Limits:
    """Limits of a kernel. A call outside of them is asked in another shape, or left out.

    Attributes:
        rank: the only number of axes of x; None for any.
        multiple_of: a number that divides the width.
        widths: the only widths; empty for any.
        contiguous: whether all tensors must be dense in memory.
        same_dtype: whether the gain must have the dtype of x.
        max_rows: the largest number of rows; None for any.

    Example:
        >>> Limits(rank=2, multiple_of=8).options
        '--rank 2 --multiple-of 8'
    """

    rank: int | None = None
    multiple_of: int = 1
    widths: tuple[int, ...] = ()
    contiguous: bool = False
    same_dtype: bool = False
    max_rows: int | None = None

    def __post_init__(self) -> None:
        for name in ("rank", "multiple_of", "max_rows"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise errors.out_of_domain("check", name, value, "a positive integer", "leave it out for no limit")
        if odd := [width for width in self.widths if width % self.multiple_of]:
            wanted = f"multiples of {self.multiple_of}, as multiple_of says"
            raise errors.out_of_domain("check", "widths", odd, wanted, "leave out one of the two limits")

    @property
    def options(self) -> str:
        """As options of ``rmsnorm check``."""
        parts = [f"--rank {self.rank}"] if self.rank else []
        parts += [f"--multiple-of {self.multiple_of}"] if self.multiple_of > 1 else []
        parts += [f"--width {width}" for width in self.widths]
        parts += ["--contiguous"] * self.contiguous + ["--same-dtype"] * self.same_dtype
        parts += [f"--max-rows {self.max_rows}"] if self.max_rows else []
        return " ".join(parts)

    def allow(self, facts: Facts) -> bool:
        """Whether a call is within the limits."""
        return (
            self.rank in (None, facts.axes) and facts.width % self.multiple_of == 0
            and (not self.widths or facts.width in self.widths) and facts.contiguous >= self.contiguous
            and facts.same_dtype >= self.same_dtype and facts.rows <= (self.max_rows or facts.rows)
        )  # fmt: skip

    def width_near(self, width: int) -> int:
        """The width within the limits to ask with in place of another one."""
        if self.widths:
            return min(self.widths, key=lambda allowed: abs(allowed - width))
        return -(-width // self.multiple_of) * self.multiple_of


def limits_of(op: str, declared: Limits | Mapping[str, Any] | None) -> Limits:
    """The limits that a user declared, by their names.

    Raises:
        ValueError: there is no such limit, it is no number, or two of them contradict each other.
    """
    if not isinstance(declared, Mapping):
        return declared or Limits()
    names = [field.name for field in fields(Limits)]
    for name in declared:
        if name not in names:
            raise errors.not_a_choice(op, "a limit", name, names)
    known = {name: value for name, value in declared.items() if value is not None}
    return Limits(**{**known, "widths": tuple(known.get("widths", ()))})


def explaining(answered: Sequence[Facts], refused: Sequence[Facts], declared: Limits = Limits()) -> Limits:
    """Limits beside the declared ones that forbid as many refused calls as possible, and no more than that needs.

    They allow every answered call. Where such limits allow refused calls, too, they name a few of many widths.

    Example:
        >>> there = [Facts(2, 72, 5, True, True), Facts(2, 768, 1, True, True)]
        >>> explaining(there, [Facts(3, 72, 5, True, True), Facts(2, 33, 5, True, True)]).options
        '--rank 2 --multiple-of 8'
        >>> vectors = [Facts(1, 64, 1, True, True)], [Facts(1, 33, 1, True, True), Facts(2, 33, 5, True, True)]
        >>> explaining(*vectors).options
        '--width 64'
    """
    ranks, widths = {facts.axes for facts in answered}, sorted({facts.width for facts in answered})
    powers = [width & -width for width in widths if width]
    narrow: dict[str, Any] = {  # each as narrow as the answers allow, and those first that are left out first
        "max_rows": max((facts.rows for facts in answered), default=1),
        "contiguous": all(facts.contiguous for facts in answered),
        "same_dtype": all(facts.same_dtype for facts in answered),
        "rank": min(ranks) if len(ranks) == 1 else declared.rank,
        "multiple_of": math.lcm(declared.multiple_of, min([*powers, 256])),
    }
    limits = replace(declared, **narrow)
    if len(widths) == 1 or any(map(limits.allow, refused)):
        places = range(_FEW) if len(widths) > _FEW else ()
        narrow["widths"] = tuple([widths[place * (len(widths) - 1) // (_FEW - 1)] for place in places] or widths)
        limits = replace(limits, **narrow)
    for name in narrow:
        wider = replace(limits, **{name: getattr(declared, name)})
        if sum(map(wider.allow, refused)) == sum(map(limits.allow, refused)):
            limits = wider
    return limits


def dense(strides: Sequence[int], shape: Sequence[int], itemsize: int) -> bool:
    """Whether memory is in the order of the axes, without gaps."""
    expected = [itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    pairs = zip(shape, strides, expected, strict=True)
    return 0 in shape or all(size == 1 or stride == want for size, stride, want in pairs)
