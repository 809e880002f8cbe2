"""The same bits for any batching: each row is computed alone, and sums over rows do not depend on their grouping."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kit import BY_NAME

from rmsnorm.accuracy.ulps import ulps
from rmsnorm.parity.beyond import Beyond
from rmsnorm.parity.cases import make
from rmsnorm.parity.comparison import Run
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import open_target

VARIANTS = ["standard", "llama"]


def _arrays(rows, n, dtype="float32"):
    random = np.random.default_rng(rows)
    x = random.normal(size=(rows, n)) * 4.0 ** random.integers(-6, 6, (rows, 1))
    return (random.normal(size=(rows, n)).astype(dtype), x.astype(dtype), random.normal(size=n).astype(dtype),
            random.normal(size=n).astype(dtype))  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_in_a_batch_is_what_it_is_alone(framework, variant):
    dy, x, scale, bias = _arrays(12, 40)
    y, gradients = (framework.rms_norm(x, scale, bias, variant=variant),
                    framework.rms_norm_vjp(dy, x, scale, bias, variant=variant))  # fmt: skip
    for rows in (slice(5, 6), slice(0, 7)):
        np.testing.assert_array_equal(framework.rms_norm(x[rows], scale, bias, variant=variant), y[rows])
        dx = framework.rms_norm_vjp(dy[rows], x[rows], scale, bias, variant=variant)[0]
        np.testing.assert_array_equal(dx, gradients[0][rows])


LAYERS = {
    "torch": "rmsnorm.torch_impl:RMSNorm",
    "tf": "rmsnorm.tf_impl:RMSNormalization",
    "flax": "rmsnorm.flax_impl:RMSNorm",
}


@pytest.mark.parametrize(
    ("framework", "compiled"), [*((name, False) for name in LAYERS), ("flax", True)], indirect=["framework"]
)
def test_a_row_has_the_same_bits_in_calls_of_many_rows(framework, compiled):
    """Where kernels compute; what torch.compile and tf.function do with rows is theirs."""
    target = open_target(LAYERS[framework.name], width=256)
    if compiled:
        target = target.compiled
    asked = Beyond(replace(target, resized=None), Variant.get("standard"), None, Run(framework.name), gradients=True)
    comparisons = asked.batches(("float32", "bfloat16"))
    assert {entry.quantity for entry in comparisons} == {"y", "dx", "dscale"}
    assert not [entry.detail for entry in comparisons if not entry.passed]


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # from forward_ad
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_parameter_gradients_do_not_depend_on_the_leading_axes(framework, dtype):
    """By the formulas and by automatic differentiation, which add up in one order."""
    data = make(replace(BY_NAME["bias"], shape=(96, 40)), "standard", dtype)
    parameters = [Spec(p.shape, p.dtype.name) for p in (data.scale, data.bias)]

    def sums(*rows):
        x, dy, dx = (array.reshape(*rows, 40) for array in (data.x, data.dy, data.tangents[0]))
        call = resolve("test", Spec(x.shape, dtype), *parameters, variant=data.variant)
        batched = replace(data, call=call, x=x, dy=dy, tangents=(dx, *data.tangents[1:]))
        results = framework.implementation(batched).results
        return [*results["dscale"], *results["dbias"]]

    want = sums(96)
    for rows in ((4, 24), (24, 2, 2), (96, 1)):
        for got, expected in zip(sums(*rows), want, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_parameter_gradients_do_not_depend_on_the_order_of_rows(framework):
    """The sum is in float64 and rounded to float32 once, which hides the order of the roundings on the way."""
    dy, x, scale, bias = _arrays(300, 16)
    order = np.random.default_rng(1).permutation(300)
    want = framework.rms_norm_vjp(dy, x, scale, bias)
    gradients = framework.rms_norm_vjp(dy[order], x[order], scale, bias)
    for got, expected in zip(gradients[1:], want[1:], strict=True):
        np.testing.assert_array_equal(got, expected)


def test_microbatches_add_up(framework):
    """Each part is rounded once, and so is their sum. Nothing else is lost."""
    dy, x, scale, bias = _arrays(64, 24)
    whole = framework.rms_norm_vjp(dy, x, scale, bias)[1:]
    parts = [framework.rms_norm_vjp(dy[i : i + 32], x[i : i + 32], scale, bias)[1:] for i in (0, 32)]
    for want, first, second in zip(whole, *parts, strict=True):
        unit = np.spacing(np.maximum(np.maximum(abs(first), abs(second)), abs(want)))
        assert (abs(first.astype(float) + second - want) <= 1.5 * unit).all()
        assert ulps(first, want).max() > 0  # half the rows are not all of them
