"""Does a function obey the eps that is an argument of it?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from rmsnorm.parity.cases import Case
from rmsnorm.parity.comparison import Comparison
from rmsnorm.parity.fitting import adapted_data, expect_in_groups
from rmsnorm.parity.judge import Outcome, compare, failed
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import Target, TargetError
from rmsnorm.targets.calling import with_values

ASKED: Final = (0.25, 2.0**-6)  # which change every row of ordinary numbers
_CASE: Final = Case("eps", (16, 48), ("standard",), "eps as an argument")


def of_eps(target: Target, variant: Variant, types: Sequence[str], group_size: int | None) -> list[Comparison]:
    """The comparisons of y with two values of eps, in the first dtype that it takes; none where eps is no argument."""
    if "eps" not in target.asks:
        return []
    for dtype in types:
        results, comparisons = [], []
        try:
            for eps in ASKED:
                called = with_values(target, optional=True, eps=eps)
                sized, data = adapted_data(called, _CASE, variant.replace(eps=eps), dtype, group_size)
                y = sized.forward(data.x, data.scale, data.bias, **data.arrays)
                results.append(y)
                expected = expect_in_groups(data, ("y",), group_size)
                comparisons += [(eps, one) for one in compare(Outcome({"y": [y]}), expected)]
        except TargetError:  # it refuses this dtype
            continue
        if np.array_equal(results[0], results[1], equal_nan=True):
            return [failed("y", f"it ignores its eps: y is the same with eps {ASKED[0]:g} and {ASKED[1]:g}")]
        return [
            one if one.passed else failed("y", f"called with eps={eps:g}: {one.detail}") for eps, one in comparisons
        ]
    return []
