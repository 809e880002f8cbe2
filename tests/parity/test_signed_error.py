"""``check`` reports the mean signed error, and refuses results that err to one side."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from numpy_zoo import in_float32, truncated

from rmsnorm.accuracy.signed import SignedErrors
from rmsnorm.numpy_impl import rms_norm
from rmsnorm.parity import check, report

pytestmark = pytest.mark.usefixtures("few_circumstances")


def kernel(x, weight, residual=None, *, truncates_sum=False, truncates_y=False):
    """In float64 but for the sum, which is stored in the dtype of x, and y."""
    total = x.astype(np.float64) + (0 if residual is None else residual.astype(np.float64))
    h = truncated(total, x.dtype) if truncates_sum else total.astype(x.dtype)
    wide = h.astype(np.float64)
    y = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * weight.astype(np.float64)
    y = truncated(y, x.dtype) if truncates_y else y.astype(x.dtype)
    return y if residual is None else (y, h)


def biased(result):
    return {(r.quantity, r.dtype): r.detail for r in result.run.failures if "biased" in r.detail}


def test_a_sum_that_is_truncated_is_biased_and_named():
    def truncating(x, weight, residual=None):
        return kernel(x, weight, residual, truncates_sum=True)

    result = check(truncating)
    assert not result.passed
    found = biased(result)
    assert set(found) == {("x + residual", dtype) for dtype in ("float16", "bfloat16", "float32")}
    for detail in found.values():  # half of the sums are not exact, and err by half an ulp or more
        assert re.match(r"biased towards zero: the mean signed error is -0\.[34]", detail)
    assert "biased towards zero" in result.text


def test_a_y_that_is_truncated_is_biased_and_in_float32_it_is_only_said():
    """There the roundings of the arithmetic are of the same size, and may be alike in all rows."""

    def truncating(x, weight):
        return kernel(x, weight, truncates_y=True)

    result = check(truncating)
    assert set(biased(result)) == {("y", "float16"), ("y", "bfloat16")}
    assert not any(record.dtype == "float32" for record in result.run.failures)
    (said,) = (line for line in result.run.signed if "y in f32" in line)
    assert re.match(r"signed error of y in f32: -0\.[45]\d* ulp", said)


def test_a_gate_of_float32_is_not_called_biased():
    """Its 1,155 rows of 8 elements have a mean signed error that is no chance."""
    zoo = pytest.importorskip("torch_zoo")
    result = check(zoo.Required, "standard", gradients=False)
    assert not biased(result), result.text


def test_another_sum_is_wrong_and_not_called_biased():
    def other(x, weight, residual=None):
        y = kernel(x, weight, residual)
        return y if residual is None else (y[0], (y[1].astype(np.float64) * 0.9).astype(x.dtype))

    result = check(other)
    assert not result.passed
    assert not biased(result)


@pytest.mark.slow
def test_honest_functions_are_not_refused(tmp_path):
    def golden(x, weight, residual=None):
        return rms_norm(x, weight, residual=residual)

    for function in (kernel, golden):
        result = check(function)
        assert result.passed, result.text
        assert len(result.run.signed) == 6
        assert "signed error of x + residual in bf16: +0 ulp" in result.details
    report.write_json([result.run], tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["backends"][0]["signed"] == result.run.signed


def test_a_kernel_in_float32_is_not_refused():
    def norm(x, weight, residual=None):
        h = x if residual is None else x + residual
        y = in_float32(h, weight)
        return y if residual is None else (y, h)

    result = check(norm, framework="numpy")
    assert result.passed, result.text


@pytest.mark.parametrize(("rows", "bias"), [(15, ""), (16, "biased away from zero")])
def test_few_rows_show_no_bias(rows, bias):
    errors, want = SignedErrors(), np.float32([[1.5, -2.5, 0, np.inf]])
    got = np.nextafter(want, np.float32([[9, -9, 1, np.inf]]))
    for _ in range(rows):
        errors.add("y", got, want)
    found = errors.summary()["y", "float32"]
    assert (found.mean, found.rows, found.largest) == (1.0, rows, 1.0)
    assert found.bias.partition(":")[0] == bias


def test_six_standard_errors_are_the_limit():
    errors, want = SignedErrors(), np.ones((100, 1), np.float32)
    ups = np.arange(100)[:, None]
    for share, bias in ((10, False), (40, True)):
        errors = SignedErrors()
        errors.add("y", np.where(ups < share, np.nextafter(want, np.float32(2)), want), want)
        assert bool(errors.summary()["y", "float32"].bias) == bias
