"""The layer's derivatives, by the automatic differentiation of the backend that KERAS_BACKEND names.

test_keras runs CHECKS on TensorFlow, keras_backend in the processes of the others.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops
from keras_backend import has_double, to_numpy

from rmsnorm.parity import cases
from rmsnorm.parity.judge import Outcome, judge
from rmsnorm.tf_impl import RMSNormalization

BACKEND = keras.backend.backend()


def to_backend(x: Any) -> Any:
    """Exactly; a backend may not know how from bfloat16."""
    return ops.cast(ops.convert_to_tensor(x if x.dtype == np.float64 else x.astype(np.float32)), x.dtype.name)


def derivatives(layer: Any, primals: Any, dy: Any, tangents: Any) -> tuple[Any, Any, Any]:
    """y, the gradients of the primals along dy, and the derivative along the tangents, each by the backend's own."""

    def function(x: Any, *weights: Any) -> Any:
        return layer.stateless_call(list(weights), [], x)[0]

    if BACKEND == "jax":
        import jax

        def compute(primals: Any, dy: Any, tangents: Any) -> Any:
            y, pull = jax.vjp(function, *primals)
            return y, pull(dy), jax.jvp(function, primals, tangents)[1]

        return jax.jit(compute)(primals, dy, tangents)
    if BACKEND == "torch":
        import torch

        y, pull = torch.func.vjp(function, *primals)
        return y, pull(dy), torch.func.jvp(function, primals, tangents)[1]
    import tensorflow as tf

    leaves = [primals[0], *(weight.value for weight in layer.weights)]
    with tf.GradientTape() as tape:
        tape.watch(leaves)
        y = layer(primals[0])
    with tf.autodiff.ForwardAccumulator(leaves, list(tangents)) as accumulator:
        along = accumulator.jvp(layer(primals[0]))
    return y, tape.gradient(y, leaves, dy), along


def of_layer(data: cases.Data) -> Outcome:
    """An implementation for the parity kit: the layer under the policy that has the dtypes of the case."""
    dtype, parameters = data.x.dtype.name, [p for p in (data.scale, data.bias) if p is not None]
    layer = RMSNormalization(
        data.axis, variant=data.variant, feature_axis=data.feature_axis, scale=data.scale is not None,
        bias=data.bias is not None, dtype=f"mixed_{dtype}" if data.case.parameters else dtype,
    )  # fmt: skip
    layer.build(data.x.shape)
    layer.set_weights(parameters)
    primals = tuple(map(to_backend, (data.x, *parameters)))
    tangents = tuple(to_backend(t) for t in data.tangents if t is not None)
    y, gradients, along = derivatives(layer, primals, to_backend(data.dy), tangents)
    results = {"y": y, "jvp": along, "dx": gradients[0]}
    names = [name for name, p in (("dscale", data.scale), ("dbias", data.bias)) if p is not None]
    results |= dict(zip(names, gradients[1:], strict=True))
    return Outcome({name: [to_numpy(value)] for name, value in results.items()})


def check_parity(folder: Path) -> None:
    """A share of the cases of the parity kit that a layer takes; a larger one on PyTorch, which compiles nothing.

    JAX in float64, where this is called again, has those of float64.
    """
    again = BACKEND == "jax" and has_double()
    chosen = [
        (replace(case, options={**case.options, "out_dtype": dtype}), variant, dtype)
        for case, variant, dtype in cases.select()
        if not (case.mask or case.residual or case.gate or "out_dtype" in case.options or case.parameters == "bfloat16")
        and (dtype == "float64" if again else dtype != "float64" or has_double())
    ]
    assert len(chosen) > (50 if again else 150)
    for index, (case, variant, dtype) in enumerate(chosen):
        rounds = case.parameters and variant in ("llama", "apex")
        if index % (7 if BACKEND == "torch" else 23) and not rounds:
            continue
        for verdict in judge(of_layer, cases.make(case, variant, dtype)):
            judged = verdict.passed or verdict.quantity == "inverse_rms"  # which a layer does not return
            assert judged, (case.name, variant, dtype, verdict.quantity, verdict.parity_ratio, verdict.detail)


CHECKS = {"parity": check_parity}
