"""Every framework agrees with the golden in random calls."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from golden.oracle import FORMATS
from golden.random_calls import FLUSHED, PROFILE, calls
from hypothesis import Phase, assume, given, seed, settings

from rmsnorm.parity.cases import Data
from rmsnorm.parity.judge import golden, judge

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # from forward_ad
EXAMPLES = {"numpy": 40, "torch": 20, "tf": 20, "flax": 8}
PHASES = {"flax": [Phase.generate]}  # each example is compiled: a failure is not shrunk


def _subnormal(result, flushed):
    wide = np.abs(result.astype(np.float64))
    return result.dtype.name in flushed and bool(np.any((wide > 0) & (wide < 2.0 ** FORMATS[result.dtype.name][1])))


def test_a_framework_agrees_with_the_golden(framework):
    @settings(PROFILE, max_examples=EXAMPLES[framework.name], phases=PHASES.get(framework.name, PROFILE.phases))
    @given(data=calls(framework.name))
    def agree(data: Data) -> None:
        if framework.name in FLUSHED:  # a flushed result is no disagreement
            assume(not any(_subnormal(result, FLUSHED[framework.name]) for result in golden(data).values()))
        failed = [verdict for verdict in judge(framework.outcome, data) if not verdict.passed]
        assert not failed, failed[0]

    agree()


@pytest.mark.parametrize("framework", ["numpy"], indirect=True)
def test_the_random_calls_can_tell(framework):
    """The property fails for a golden with another eps.

    Of 480 calls, drawn with twelve seeds, 33 % showed it: 200 show at least 25 % with 2.4 standard deviations to
    spare. The seed makes the calls independent of the names in this test, which hypothesis would derive them from.
    """
    agreements = []

    @settings(PROFILE, max_examples=200)
    @seed(0)
    @given(data=calls("numpy"))
    def disagree(data: Data) -> None:
        other = dataclasses.replace(data, variant=data.variant.replace(eps=data.call.eps * 1.25 + 1e-3))
        agreements.append(all(verdict.passed for verdict in judge(lambda _: framework.outcome(other), data)))

    disagree()
    assert len(agreements) == 200
    assert agreements.count(False) > 200 / 4
