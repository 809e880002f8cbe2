"""One row of RMSNorm, step by step: each number as it is, and as the variant rounds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rmsnorm.numpy_impl.arithmetic import Rows, affine, blocks, forward, product_of, scaled, sum_of
from rmsnorm.numpy_impl.double_double import Array
from rmsnorm.numpy_impl.functional import ArrayLike, arrays, resolved
from rmsnorm.specification.variants import Preset, Variant, derive


class Step(NamedTuple):
    """A number of every element, in float64: exact, and rounded to ``dtype``, or None where nothing is rounded."""

    name: str
    exact: Array
    rounded: Array | None
    dtype: str


@dataclass(frozen=True)
class Steps:
    """The steps of a variant from x to y; as a text they are those of the first element."""

    variant: Variant
    steps: tuple[Step, ...]

    def beside(self, *others: Steps, element: int = 0) -> str:
        """A table of the steps of several variants, for one element of the row."""
        table = [[f"element {element}"], *([step.name] for step in self.steps)]
        for column in (self, *others):
            table[0] += [f"{column.variant.label}, exact", "rounded"]
            for line, (_, exact, rounded, dtype) in zip(table[1:], column.steps, strict=True):
                line += [f"{exact[element]:.9g}", "" if rounded is None else f"{rounded[element]:.9g} {dtype}"]
        widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
        return "\n".join("   ".join(map(str.ljust, line, widths)).rstrip() for line in table)

    def __str__(self) -> str:
        return self.beside()


def steps(
    x: ArrayLike, scale: ArrayLike | None = None, bias: ArrayLike | None = None, *,
    variant: Preset | Variant = "standard", eps: float | None = None,
) -> Steps:  # fmt: skip
    """Every number between x and y, exact and as the variant rounds it. The arguments are those of rms_norm.

    Raises:
        TypeError, ValueError: as rms_norm; also when x has more than one axis.

    Example:
        >>> import numpy as np
        >>> x, g = np.float16([1.5, -2.25, 0.75]), np.float16([2.1, 0.7, 1.3])
        >>> print(steps(x, g, variant="llama").beside(steps(x, g)))
        element 0     llama, exact   rounded              standard, exact   rounded
        mean square   2.625                               2.625
        rho           1.62018548                          1.62018548
        h / rho       0.925819923    0.92578125 float16   0.925819923
        o + gain      2.09960938     2.09960938 float16   2.09960938
        product       1.94386019     1.94335938 float16   1.94386019
        y             1.94386019     1.94335938 float16   1.94386019        1.94433594 float16
    """
    x, scale, bias = arrays("steps", x=x, scale=scale, bias=bias)
    if x.ndim > 1:
        raise ValueError(f"steps: x has shape {x.shape}, expected one row; pass one of them, such as x[0]")
    call = resolved("steps", x, scale, bias, None, None, None, None, variant=derive("steps", variant, eps, None))
    with np.errstate(all="ignore"):
        ((_, data),) = blocks(Rows(call), call, scaled(x), scale, bias, None)
        root, gain, normalised = (data.root, data.size), data.gain.fraction(), data.quotient()
        product = product_of(normalised, gain)
        sums = product if data.bias is None else sum_of(product, scaled(data.bias))
        exact = product_of(root, root), (data.rho, data.exponent), normalised, gain, product, sums
        rounded: list[Array | None] = [None, None, None, None, None, forward(call, data)]
        if call.norm is not None:
            rounded[2] = normalised[0].round(call.norm, normalised[1])
            if scale is not None:  # the product in the golden's own words
                rounded[3:5] = data.gain.round(call.product), affine(call, data._replace(bias=None))[0].hi
    names = "mean square", "rho", "h / rho", "o + gain", "product", "y"
    formats = "", "", call.norm or "", call.product, call.product, call.result
    parts = [np.broadcast_to(number.round("float64", exponent), (1, x.size))[0] for number, exponent in exact]
    values = [None if array is None else array.reshape(-1).astype(np.float64) for array in rounded]
    return Steps(call.variant, tuple(map(Step, names, parts, values, formats)))
