"""The cases of the parity kit for the tests of every framework: one judge, and one set of bounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import Any

from rmsnorm.engines import refusal
from rmsnorm.parity.cases import CASES, Case, make
from rmsnorm.parity.judge import Implementation, expect, judge
from rmsnorm.specification import dtypes

Combinations = Iterable[tuple[Case, str, str]]
BY_NAME = {case.name: case for case in CASES}
# For what compiles each call anew: every option beside every other, and in every dtype, rounding and place of eps. Then
# every result_dtype, and x of other ranks, without a row, and with squares beyond float32.
FEW = [
    (BY_NAME[case], variant, dtype)
    for dtype, calls in {
        "float16": ("drawn 6", "drawn 7", "drawn 15", "drawn 10", "out f32", "drawn 12"),
        "bfloat16": ("drawn 9", "gain f32 equinox", "drawn 23", "gate of x, masked sum llama", "no rows", "huge gemma"),
        "float32": ("drawn 13", "drawn 21", "drawn 1", "rows llama", "vector", "huge"),
        "float64": ("drawn 4", "drawn 8", "drawn 14", "gate", "constant"),
    }.items()
    for call in calls
    for case, _, variant in [(call, "", "standard") if call in BY_NAME else call.rpartition(" ")]
]


def named(run: tuple[Case, str, str]) -> str:
    """The id of a call as a parameter of a test."""
    return f"{run[0].name}, {run[1]}, {run[2]}"


@cache
def _expected(case: str, variant: str, dtype: str) -> dict[str, Any]:
    """The golden's results, which take longer than those of the frameworks that are compared with them."""
    return expect(make(BY_NAME[case], variant, dtype))


def failures(implementation: Implementation, combinations: Combinations) -> tuple[list[str], dict[Any, list[float]]]:
    """The failed verdicts, and for every variant the number of compared y, how many differ, and by how much."""
    failed: list[str] = []
    tally: defaultdict[Any, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for case, variant, dtype in combinations:
        data = make(case, variant, dtype)
        for verdict in judge(implementation, data, _expected(case.name, variant, dtype)):
            if not verdict.passed:
                failed.append(f"{case.name}, {variant}, {dtype}, {verdict.quantity}: {verdict.detail}")
            # f(z) errs by 5; a sum that is not rounded first, and 32 bits without a kernel, are computed in that of y
            is_half = data.call.result_dtype in dtypes.HALF
            exact = data.gate is None and (
                not data.call.exact_sum or (is_half and data.call.x_dtype != data.call.sum_dtype)
            )
            exact = exact and (is_half or refusal(data.call.in_rows, "cpu") is None)
            if verdict.quantity == "y" and data.out_dtype is None and exact:
                counted = tally[variant, data.call.result_dtype]
                counted[0] += data.x.size
                counted[1] += (1 - verdict.bit_identical) * data.x.size
                counted[2] = max(counted[2], verdict.max_ulp)
    return failed, tally


def hold(name: str, implementation: Implementation, combinations: Combinations) -> None:
    """Every quantity within the bounds of the kit, and y up to 32 bits within those of an arithmetic of more bits.

    16 bits: at least 99.9 % of y bit-identical, never more than 1 ulp; 32 bits: 2 ulp.
    """
    failed, tally = failures(implementation, combinations)
    assert not failed, "\n".join([f"{len(failed)} verdicts of {name}:", *failed[:20]])
    for (variant, dtype), (count, different, most) in tally.items():
        seen = f"{name}, {variant}, {dtype}: {different:.0f} of {count} elements of y differ, at most {most} ulp"
        if dtype == "float32":
            assert most <= 2, seen
        elif dtype != "float64":
            assert most <= 1, seen
            assert different <= 0.001 * count, seen
