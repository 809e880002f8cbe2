"""The TensorFlow functions against the golden, and everything TensorFlow may do with them."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from checks import check_near, check_values
from kit import BY_NAME, FEW, failures, named

from rmsnorm import numpy_impl as golden
from rmsnorm.parity.cases import Data, make
from rmsnorm.parity.judge import Implementation, Outcome, expect

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow")

from tf_arrays import MODES, converted, to_tf  # noqa: E402
from tf_gradients import GRAPHS, forward_mode  # noqa: E402

from rmsnorm.tf_impl import rms_norm  # noqa: E402

tf.get_logger().setLevel("ERROR")  # each case traces its own function, which TensorFlow warns of


INPUTS = ("x", "scale", "bias", "residual", "gate")


def traced(mode: str) -> Implementation:
    """y and its derivatives in one function that TensorFlow traces, and XLA compiles where the mode says so."""

    def run(data: Data) -> Outcome:
        arrays = {name: getattr(data, name) for name in INPUTS if getattr(data, name) is not None}
        directions = dict(zip(INPUTS, data.tangents, strict=False))
        along = {name: np.zeros_like(array) for name, array in arrays.items()}
        along |= {name: tangent for name, tangent in directions.items() if tangent is not None}
        cotangents = [v for v in (data.dy, data.dh) if v is not None]
        masks = [] if data.mask is None else [data.mask]

        def function(tensors: Any) -> Any:
            parts = iter(tensors)
            inputs, tangents, given, mask = ([next(parts) for _ in s] for s in (arrays, along, cotangents, masks))
            options = {**dict(zip(arrays, inputs, strict=True)), **data.options, "mask": mask[0] if mask else None}
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                *outputs, inverse_rms = rms_norm(**options, return_inverse_rms=True)
            with tf.autodiff.ForwardAccumulator(inputs, tangents) as accumulator:
                y = rms_norm(**options)
            y = y[0] if isinstance(y, tuple) else y
            return [outputs[0], inverse_rms, accumulator.jvp(y), *tape.gradient(outputs, inputs, given)]

        found = MODES[mode](function)([*map(to_tf, (*arrays.values(), *along.values(), *cotangents, *masks))])
        names = ["y", "inverse_rms", "jvp", *(f"d{name}" for name in arrays)]
        return Outcome({name: [value.numpy()] for name, value in zip(names, found, strict=True)})

    return run


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "eager"])
@pytest.mark.parametrize("run", FEW, ids=named)
def test_every_kind_of_graph_is_within_the_bounds(mode: str, run: Any) -> None:
    failed, _ = failures(traced(mode), [run])
    assert not failed, failed


@pytest.mark.parametrize("way", GRAPHS)
def test_gradients_by_every_way_through_a_graph(way: Any) -> None:
    """A tape within and around the function, and tf.gradients: what crosses between graphs is what it says."""
    case = replace(BY_NAME["two axes"], shape=(3, 3, 4, 5), options={"axis": (1, 3)}, mask=True, bias=True)
    data = make(case, "zhang_torch", "float64")
    options = converted({**data.options, "mask": data.mask})
    arrays = [*map(to_tf, (data.x, data.scale, data.bias))]
    got = way(lambda *arrays: rms_norm(*arrays, **options), arrays, to_tf(data.dy))
    for gradient, want in zip(got, expect(data, ["dx", "dscale", "dbias"]).values(), strict=True):
        # two sums and some operations, each 2^-53 of the terms; TensorFlow's kernels take subnormal numbers as 0
        check_near(gradient.numpy(), want.value, (2 * data.x.size + 32) * want.unit, np.finfo(np.float64).tiny)


@pytest.mark.parametrize("variant", ["llama", "apex", "t5", "onnx"])
def test_in_graphs_too_a_rounding_is_the_identity_to_a_tangent(variant: str) -> None:
    """There TensorFlow derives the forward pass itself: with its roundings in the products 1 in 4 elements differs."""
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(shape).astype("bfloat16") for shape in ((64, 33), (33,), (33,))]
    tangents = [np.zeros_like(values[0]), *(rng.standard_normal(33).astype("bfloat16") for _ in range(2))]
    want = golden.rms_norm_jvp(values, tangents, variant=variant)
    arrays, directions = [*map(to_tf, values)], [*map(to_tf, tangents)]
    function = partial(rms_norm, variant=variant)
    got = tf.function(lambda arrays, directions: forward_mode(function, arrays, directions))(arrays, directions)
    check_values(got.numpy(), want)
