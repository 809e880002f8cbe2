"""What identify says of kind and statistic, and of a gate's gradient."""

from __future__ import annotations

import numpy_zoo

from rmsnorm import PRESETS
from rmsnorm.identify import identify
from rmsnorm.identify.findings import Findings
from rmsnorm.identify.names import described


def test_the_kind_and_the_statistic_are_said():
    identity = identify(numpy_zoo.rows, framework="numpy", gradients=False)
    assert (identity["kind"], identity["statistic"]) == ("rmsnorm", "mean_square")


def test_what_rests_on_a_model_is_withdrawn_with_it():
    findings = Findings()
    findings.add("gain", True, "y is linear in it")
    findings.defect("seen before")
    before = len(findings)
    findings.add("eps", 1e-6, "solved")
    findings.add("eps", 1e-5, "solved again")
    findings.add("eps in bfloat16", 1e-2, "solved from bfloat16 rows")
    findings.defect("seen by the model")
    assert [finding.name for finding in findings.answers] == ["gain", "eps", "eps in bfloat16"]
    assert findings["eps"].value == 1e-5
    findings.withdraw_model(before)
    assert {finding.name: finding.value for finding in findings.answers} == {"gain": True, "eps": None}
    assert not findings["eps"].is_observable
    assert findings["rounding"] is None, "it was not asked"
    assert findings.defects == ("seen before",)


def test_a_fraction_is_written_as_one():
    assert described(PRESETS["torch"].replace(partial=0.25, eps=1e-5), {"partial": 0.25}).endswith("partial is 1/4")
