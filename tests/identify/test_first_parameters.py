"""What a new layer computes, with the parameters that it was made with."""

from __future__ import annotations

import numpy as np
import pytest
from torch_zoo import Drawn, Offset, Plain, Shifted, Twice, Zero

from rmsnorm.identify import identify
from rmsnorm.identify.first import first_parameters
from rmsnorm.parity import check

pytestmark = pytest.mark.torch


WRONG = [
    (Zero, "standard", 0.0, "y of a new layer is 0, as its gain g starts at 0 and g multiplies"),
    (Twice, "gemma", 2.0, "y of a new layer is 2 times the normalised row, as its gain g starts at 1 and 1 + g"),
    (Drawn, "standard", None, "the gain of a new layer does not start at one number"),
    (Shifted, "standard", 1.0, "the bias of a new layer does not start at 0"),
]


@pytest.mark.costly
@pytest.mark.parametrize(("layer", "variant", "factor", "words"), WRONG)
def test_a_layer_that_does_not_begin_as_the_norm_alone(layer, variant, factor, words):
    identity = identify(layer, gradients=False)
    assert identity["initial_factor"] == factor
    assert [words in defect for defect in identity.defects] == [True]
    assert not identity.recognised
    report = check(layer, variant, dtypes="float32", gradients=False)
    assert not report.passed
    assert words in report.text
    made = layer(64)
    assert identify(made, gradients=False)["initial_factor"] is None, "a layer that exists may have learned"
    assert check(made, variant, dtypes="float32", gradients=False).passed


@pytest.mark.parametrize(("layer", "variant"), [(Plain, "standard"), (Offset, "gemma")])
def test_a_layer_that_does(layer, variant):
    identity = identify(layer, gradients=False)
    assert (identity["initial_factor"], identity.recognised) == (1.0, True)
    assert check(layer, variant, dtypes="float32", gradients=False).passed


@pytest.mark.parametrize("variant", ["standard", "gemma", "lasagne"])
@pytest.mark.parametrize(
    "name",
    [
        "rmsnorm.torch_impl:RMSNorm",
        "rmsnorm.tf_impl:RMSNormalization",
        "rmsnorm.flax_impl:RMSNorm",
        "rmsnorm.flax_impl.linen:RMSNorm",
    ],
)
def test_the_layers_of_this_package_begin_as_the_norm_alone(name, variant):
    pytest.importorskip({"tf": "keras", "fl": "flax", "to": "torch"}[name.partition(".")[2][:2]])
    identity = identify(name, init={"variant": variant}, gradients=False)
    assert identity["initial_factor"] == 1.0
    assert identity["scale_offset"] == (variant == "gemma")
    assert identity.recognised, identity.text


def test_what_is_not_finite_is_no_factor():
    """As of memory that nobody has written."""
    x = np.linspace(-2, 2, 8)
    factor, sentences = first_parameters(np.full(8, np.nan), np.full(8, np.nan), x, 0.0)
    assert factor is None
    assert len(sentences) == 1
