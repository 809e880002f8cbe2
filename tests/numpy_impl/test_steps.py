"""The steps of one row from x to y."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from rmsnorm import PRESETS
from rmsnorm.numpy_impl import rms_norm, steps


def row(dtype, n=24):
    random = np.random.default_rng(3)
    return [random.normal(size=n).astype(dtype) for _ in range(3)]


@pytest.mark.parametrize(
    "dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"], ids=["f16", "bf16", "f32", "f64"]
)
@pytest.mark.parametrize("parameters", [0, 1, 2])
@pytest.mark.parametrize("variant", PRESETS)
def test_y_and_its_parts_are_those_of_the_golden(variant, parameters, dtype):
    x, *others = row(dtype)
    arguments = (x, *others[:parameters])
    made = {step.name: step for step in steps(*arguments, variant=variant).steps}
    want = rms_norm(*arguments, variant=variant)
    assert np.array_equal(made["y"].rounded, want.astype(np.float64))
    assert made["y"].dtype == want.dtype.name
    wide = x.astype(np.float64)
    q = np.mean(wide**2) if PRESETS[variant].statistic == "mean_square" else np.var(wide)
    np.testing.assert_allclose(made["mean square"].exact, q, rtol=1e-14)
    np.testing.assert_allclose(made["h / rho"].exact * made["rho"].exact, wide, rtol=1e-15)
    product = made["h / rho"].exact * made["o + gain"].exact
    np.testing.assert_allclose(made["product"].exact, product, rtol=1e-15)
    exact = product + (others[1].astype(np.float64) if parameters == 2 else 0)
    np.testing.assert_allclose(made["y"].exact, exact, rtol=1e-15, atol=1e-15)
    rounded = [made[name].rounded for name in ("h / rho", "o + gain", "product")]
    before = PRESETS[variant].rounding == "before_scale" and made["h / rho"].dtype != ""
    assert [array is not None for array in rounded] == [before, before and parameters > 0, before and parameters > 0]
    if before and parameters == 1 and made["product"].dtype in ("float16", "bfloat16"):
        assert np.array_equal((rounded[0] * rounded[1]).astype(made["product"].dtype).astype(float), rounded[2])


def test_a_table_has_a_pair_of_columns_for_each_variant():
    x, g, _ = row("float16")
    first, second = (steps(x, g, variant=name) for name in ("llama", "standard"))
    lines = first.beside(second, element=5).splitlines()
    assert lines[0].split("   ")[0] == "element 5"
    assert "llama, exact" in lines[0]
    assert "standard, exact" in lines[0]
    assert len(lines) == 7
    assert f"{first.steps[-1].rounded[5]:.9g} float16" in lines[-1]
    assert str(first).startswith("element 0")
    assert "llama with eps=0.5" in str(steps(x, variant="llama", eps=0.5))


def test_one_row_is_asked_for():
    with pytest.raises(ValueError, match=r"steps: x has shape \(2, 3\), expected one row; pass one of them"):
        steps(np.ones((2, 3)))
