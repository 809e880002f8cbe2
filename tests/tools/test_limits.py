"""Declared limits of a kernel, and what is refused: what `check` says of a kernel that takes few shapes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import zoo

from rmsnorm.identify import identify
from rmsnorm.parity import check
from rmsnorm.targets.limits import Limits

few = pytest.mark.usefixtures("few_circumstances")
ASKED: dict[str, Any] = {"dtypes": "float32", "gradients": False, "framework": "numpy"}


def where(condition: Any, factor: float = 1.0) -> Any:
    """A kernel that refuses every other call; of matrices and more axes, y is ``factor`` times what it must be."""

    def norm(x: Any, weight: Any) -> Any:
        if not condition(x, weight):
            raise ValueError("another shape, please")
        return zoo.standard(x, weight) * x.dtype.type(1 if x.ndim == 1 else factor)

    return norm


@pytest.mark.usefixtures("small_circumstances")
def test_what_is_refused_is_named_by_the_options_that_declare_it() -> None:
    """A kernel for dense x of two axes whose width 8 divides, and a gain of its dtype."""
    kernel = where(lambda x, w: x.ndim == 2 and not x.shape[-1] % 8 and x.flags.c_contiguous and w.dtype == x.dtype)
    report = check(kernel, **ASKED)
    assert (report.run.status, report.passed) == ("refuses", False)
    found = re.search(r"--rank 2 --multiple-of (\d+) --contiguous --same-dtype\n", report.text)
    assert found, report.text
    assert int(found[1]) % 8 == 0, "as narrow as the widths that were answered"
    limits = Limits(rank=2, multiple_of=8, contiguous=True, same_dtype=True)
    assert limits.options == "--rank 2 --multiple-of 8 --contiguous --same-dtype"
    declared = check(kernel, **ASKED, limits=limits)
    assert declared.passed
    assert declared.run.cases > report.run.cases  # cases get other shapes, and are not left out


def test_identify_says_how_a_width_is_named_which_is_the_only_one() -> None:
    kernel = where(lambda x, w: x.shape[-1] == 128)
    (defect,) = identify(kernel, framework="numpy").defects
    assert defect.endswith("another shape, please; it takes rows of 128 elements, so name that width: --width 128")
    assert identify(kernel, framework="numpy", width=128).recognised
    asked: list[Any] = []
    refuses = where(lambda x, w: asked.append(x.dtype.name))
    assert len(identify(refuses, framework="numpy", time_limit=0.0).defects) == 1
    assert {*asked} == {"float32"}, "when the time is over, no other dtype and no other width is tried"


@few
@pytest.mark.parametrize(("condition", "factor", "said", "limits", "holds"), [
    (lambda x, w: x.shape[-1] <= 1024, 1, r"declare them: (--width \d+ )+--width 1024\n", None, True),
    (lambda x, w: x.shape[-1] == 8192, 1, r"declare them: --width 8192\n", [8192], True),  # only some circumstances
    (lambda x, w: x.size <= 100_000, 1, None, None, None),  # no option helps
    # of a width that is not asked, where y is right or wrong
    (lambda x, w: x.shape[-1] == 64, 1, r"\A.*declare it: --width N", [64], True),
    (lambda x, w: x.shape[-1] == 64, 2, r"\A.*declare it: --width N", [64], False),
], ids=["up to a width", "one width", "a size", "another width", "another width, wrong"])  # fmt: skip
def test_the_options_that_are_named_are_those_with_which_nothing_is_refused(
    condition: Any, factor: float, said: str | None, limits: Any, holds: bool
) -> None:
    report = check(where(condition, factor), **ASKED)
    assert not report.passed
    if said is None:
        assert (report.run.status, report.run.limits) == ("refuses", "")
        assert "declare" not in report.text
        return
    assert re.search(said, report.text), report.text
    widths = limits or [*map(int, re.findall(r"\d+", report.run.limits))]
    limited = check(where(condition, factor), **ASKED, limits={"widths": widths})
    assert limited.passed == holds, limited.text


@pytest.mark.usefixtures("small_circumstances")
def test_a_refusal_is_an_edge() -> None:
    kernel = where(lambda x, w: x.shape[-1] <= 10000)
    report = check(kernel, **ASKED)
    assert report.passed
    refused = "66001) is refused: ValueError: another shape, please; it fails with extremes=True"
    for text in (report.text, report.details):
        assert "edge: '66001': x of shape (" in " ".join(text.split())
        assert refused in " ".join(text.split())
    assert not check(kernel, **ASKED, extremes=True).passed


@pytest.mark.parametrize(("limits", "words"), [
    ({"rank": 0}, "rank is .*expected a positive integer"),
    ({"multiple_of": 2.0}, "multiple_of is .*expected a positive integer"),
    ({"max_rows": True}, "max_rows is .*expected a positive integer"),
    ({"ranks": 2}, "a limit is 'ranks', expected 'rank', 'multiple_of'"),
    ({"widths": [64, 96], "multiple_of": 48}, r"check: widths is \[64\], expected multiples of 48"),
])  # fmt: skip
def test_limits_that_cannot_be_are_refused(limits: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(zoo.standard, framework="numpy", limits=limits)
