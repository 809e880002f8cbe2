"""The circumstances of a call: every pair of levels occurs, a right norm holds in all, and wrong ones in none."""

from __future__ import annotations

import math
import re
import sys
from itertools import combinations, product
from pathlib import Path

import pytest

from rmsnorm.parity import asking, check
from rmsnorm.parity.circumstances import AXES, FACTORS, MOST, ROWS, allows, circumstances, lead_of
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import open_target
from rmsnorm.targets.limits import Facts, Limits, explaining

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))
from wrong_circumstances import EPS, WRONG, gated, masked, right  # noqa: E402

STANDARD = Variant.get("standard").replace(eps=EPS)


def test_every_pair_of_levels_occurs_in_a_case():
    cases = circumstances(FACTORS)
    there = {frozenset(pair) for case in cases for pair in combinations(case.levels.items(), 2)}
    missing = [
        pair
        for one, other in combinations(FACTORS, 2)
        for pair in product(((one, level) for level in FACTORS[one]), ((other, level) for level in FACTORS[other]))
        if allows(dict(pair)) and frozenset(pair) not in there and not _is_impossible(dict(pair))
    ]
    assert missing == []
    assert len(cases) < 200
    for case in cases:
        lead = lead_of(case.levels)
        assert allows(case.levels)
        assert len(lead) + 1 == AXES[case["axes"]]
        assert math.prod(lead) >= ROWS.get(case["rows"], int(case["width"]))
        assert math.prod(lead) * int(case["width"]) < 1.1 * MOST


def _is_impossible(pair):
    """Whether some other factor has no level that goes with both."""
    return any(
        not any(allows({**pair, name: level}) for level in levels)
        for name, levels in FACTORS.items()
        if name not in pair
    )


def first_difference(function):
    """The name of the first circumstance in which a function differs."""
    target = open_target(function, framework="torch")
    answers = asking.in_circumstances(target, STANDARD, ("float32",), gradients=True, group_size=None)
    for circumstance, _, comparisons in answers:
        assert not isinstance(comparisons, str), comparisons
        if not all(comparison.passed for comparison in comparisons):
            return circumstance.name
    return None


@pytest.mark.parametrize("name", WRONG)
def test_a_norm_that_is_wrong_in_one_circumstance_is_rejected(name):
    assert first_difference(WRONG[name])


def by_vector_norm(x, weight):
    """The norm of a library, which adds the elements of a row one after the other where they are apart in memory."""
    wide = x.float()
    size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return (wide * torch.rsqrt(size**2 / x.shape[-1] + EPS) * weight.float()).to(x.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("function", [right, gated, masked, by_vector_norm])
def test_a_right_norm_holds_in_every_circumstance(function):
    assert first_difference(function) is None


def of_kernels(x, weight):
    """A kernel for dense x of two axes whose width 8 divides, and a gain of its dtype."""
    if x.ndim != 2 or x.shape[-1] % 8 or not x.is_contiguous() or weight.dtype != x.dtype:
        raise ValueError("x must be dense, of two axes and a multiple of 8, and weight of its dtype")
    return right(x, weight)


def test_what_is_refused_is_named_by_the_options_that_declare_it():
    report = check(of_kernels, STANDARD, dtypes=("float32", "bfloat16"), gradients=False)
    assert (report.run.status, report.passed) == ("refuses", False)
    found = re.search(r"--rank 2 --multiple-of (\d+) --contiguous --same-dtype\n", report.text)
    assert found, report.text
    assert int(found[1]) % 8 == 0, "as narrow as the widths that were answered"
    assert re.match(r"\S+ is standard.* where it answers: ", report.text)
    limits = Limits(rank=2, multiple_of=8, contiguous=True, same_dtype=True)
    assert limits.options == "--rank 2 --multiple-of 8 --contiguous --same-dtype"
    declared = check(of_kernels, STANDARD, dtypes=("float32", "bfloat16"), gradients=False, limits=limits)
    assert declared.passed
    assert declared.run.cases > report.run.cases  # cases get other shapes, and are not left out


def test_a_most_number_of_columns_is_a_limit():
    def up_to_1024(x, weight):
        if x.shape[-1] > 1024:
            raise ValueError("at most 1,024 columns")
        return right(x, weight)

    report = check(up_to_1024, STANDARD, dtypes="float32", gradients=False)
    assert report.run.status == "refuses"
    widths = re.findall(r"--width (\d+)", report.run.limits)
    assert report.run.limits == " ".join(f"--width {width}" for width in widths)
    assert (len(widths), widths[-1]) == (4, "1024")
    limited = check(up_to_1024, STANDARD, dtypes="float32", gradients=False, limits={"widths": [*map(int, widths)]})
    assert limited.passed, limited.text


@pytest.mark.parametrize(("width", "axes", "options"), [
    (8192, (1, 2, 3, 4, 5, 6), "--width 8192"),  # only some circumstances have it
    (1531, (1,), "--rank 1 --width 1531"),
])  # fmt: skip
def test_the_options_that_are_named_are_those_with_which_nothing_is_refused(width, axes, options):
    def of_one_width(x, weight):
        if x.shape[-1] != width or x.ndim not in axes:
            raise ValueError("another shape, please")
        return right(x, weight)

    asked = {"dtypes": "float32", "gradients": False, "framework": "torch"}
    report = check(of_one_width, STANDARD, **asked)
    assert report.run.limits == options
    assert f"mend: if these are its limits, declare them: {options}\n" in report.text
    limits = {"widths": [width], "rank": axes[0] if len(axes) == 1 else None}
    assert check(of_one_width, STANDARD, **asked, limits=limits).passed


@pytest.mark.parametrize("factor", [1, 2])
def test_a_kernel_of_a_width_that_is_not_asked_is_told_to_declare_it(factor):
    def of_64(x, weight):
        if x.shape[-1] != 64:
            raise ValueError("64 columns, please")
        return right(x, weight) * (1 if x.ndim == 1 else factor)

    asked = {"dtypes": "float32", "gradients": False, "framework": "torch"}
    report = check(of_64, STANDARD, **asked)
    assert re.search(r"it raised in all \d+ calls, such as: .*64 columns, please", report.text)
    assert "declare it: --width N" in report.text.splitlines()[0]
    assert check(of_64, STANDARD, **asked, limits={"widths": [64]}).passed == (factor == 1)


def test_no_options_are_named_where_none_help():
    def of_few_elements(x, weight):
        if x.numel() > 100_000:
            raise ValueError("too many elements")
        return right(x, weight)

    report = check(of_few_elements, STANDARD, dtypes="float32", gradients=False)
    assert (report.run.status, report.run.limits) == ("refuses", "")
    assert "declare them" not in report.text


@pytest.mark.parametrize(("limits", "width", "near"), [
    (Limits(multiple_of=8), 1531, 1536), (Limits(multiple_of=64), 33, 64),
    (Limits(widths=(768, 4096)), 3000, 4096), (Limits(), 33, 33),
])  # fmt: skip
def test_the_width_near_another_one_is_within_the_limits(limits, width, near):
    assert limits.width_near(width) == near
    assert limits.allow(Facts(2, near, 4, True, True))


def test_limits_that_no_answer_supports_are_not_found():
    there = [Facts(2, 72, 5, True, True), Facts(3, 33, 5, True, True)]
    assert explaining(there, [Facts(2, 40, 5, True, False)]).options == "--contiguous"
    assert explaining([*there, Facts(2, 40, 7, True, False)], [Facts(2, 40, 5, True, False)]).options == ""


@pytest.mark.parametrize("limits", [{"rank": 0}, {"multiple_of": 2.0}, {"max_rows": True}])
def test_a_limit_is_a_positive_integer(limits):
    with pytest.raises(ValueError, match=f"{next(iter(limits))} is .*expected a positive integer"):
        check(right, limits=limits)


def test_another_limit_is_named():
    with pytest.raises(ValueError, match="a limit is 'ranks', expected 'rank', 'multiple_of'"):
        check(right, limits={"ranks": 2})
