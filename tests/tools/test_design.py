"""The circumstances of a call: every pair of levels occurs, and norms that are wrong in one are found."""

from __future__ import annotations

import math
from itertools import combinations, product
from typing import Any

import pytest

from rmsnorm.identify import identify
from rmsnorm.parity import asking
from rmsnorm.parity.design import AXES, FACTORS, MOST, ROWS, allows, circumstances, lead_of
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import open_target

torch = pytest.importorskip("torch")
from zoo_circumstances import EPS, WRONG  # noqa: E402

STANDARD = Variant.get("standard").replace(eps=EPS)


def test_every_pair_of_levels_occurs_in_a_case() -> None:
    cases = circumstances(FACTORS)
    there = {frozenset(pair) for case in cases for pair in combinations(case.levels.items(), 2)}
    missing = [
        pair
        for one, other in combinations(FACTORS, 2)
        for pair in product(((one, level) for level in FACTORS[one]), ((other, level) for level in FACTORS[other]))
        if allows(dict(pair)) and frozenset(pair) not in there and not _is_impossible(dict(pair))
    ]
    assert missing == []
    assert len(cases) < 220
    for case in cases:
        lead = lead_of(case.levels)
        assert allows(case.levels)
        assert len(lead) + 1 == AXES[case["axes"]]
        assert math.prod(lead) >= ROWS.get(case["rows"], int(case["width"]))
        assert math.prod(lead) * int(case["width"]) < 1.1 * MOST


def _is_impossible(pair: dict[str, str]) -> bool:
    """Whether some other factor has no level that goes with both."""
    return any(
        not any(allows({**pair, name: level}) for level in levels)
        for name, levels in FACTORS.items()
        if name not in pair
    )


def framework_of(norm: Any) -> str | None:
    return None if isinstance(norm, type) else "torch"


@pytest.mark.parametrize("name", WRONG)
def test_a_norm_that_is_wrong_in_one_circumstance_is_rejected(name: str) -> None:
    target = open_target(WRONG[name].norm, framework=framework_of(WRONG[name].norm))
    answers = asking.in_circumstances(target, STANDARD, WRONG[name].dtypes, gradients=True, group_size=None)
    assert not all(comparison.passed for _, _, comparisons in answers for comparison in comparisons)


@pytest.mark.parametrize("name", [name for name, wrong in WRONG.items() if wrong.identify])
def test_the_first_sentence_of_identify_says_the_cause(name: str) -> None:
    norm = WRONG[name].norm
    identity = identify(norm, framework=framework_of(norm))
    assert not identity.recognised
    assert identity.defects[0] == WRONG[name].identify, identity.text
