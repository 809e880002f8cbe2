"""A right norm holds in every circumstance of a call."""

import pytest

from rmsnorm.parity import check
from rmsnorm.specification.variants import Variant

pytest.importorskip("torch")
from zoo_circumstances import EPS, RIGHT


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_norm_holds_in_every_circumstance(name):
    framework = None if isinstance(RIGHT[name], type) else "torch"
    report = check(RIGHT[name], Variant.get("standard").replace(eps=EPS), dtypes="float32", framework=framework)
    assert report.passed, report.text
