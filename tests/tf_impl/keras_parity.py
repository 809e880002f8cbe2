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
from options import directions_of, product_with_hessian

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


def check_second_derivatives(folder: Path) -> None:
    """Of <v, y> along directions, by four nestings, against differences of the golden's gradients."""
    if BACKEND == "tensorflow" or not has_double():
        return  # test_tf_autodiff has those of the function
    rng = np.random.default_rng(0)
    calls: tuple[dict[str, Any], ...] = (
        {"axis": (0, 1)}, {"partial": 0.5}, {"variant": "gemma"},
        {"variant": "zhang_torch", "epsilon": 0.3, "bias": True},
        {}, {"variant": "keras_rms_scaling"}, {"variant": "x_transformers", "epsilon": 3.0},
    )  # fmt: skip
    for arguments in calls if BACKEND == "torch" else calls[::3]:  # XLA compiles each; tests/flax_impl has the rest
        layer = RMSNormalization(**arguments, dtype="float64")
        layer.build((3, 4))
        arrays = [rng.standard_normal(shape) for shape in ((3, 4), *(w.shape for w in layer.weights))]
        directions, v = directions_of(arrays), rng.standard_normal((3, 4))
        want = product_with_hessian(arrays, v, directions, {"variant": layer.variant, "axis": layer.axis})
        largest = max(1.0, *(np.abs(w).max() for w in want))
        primals, along = (tuple(map(to_backend, values)) for values in (arrays, directions))
        *products, twice = nestings(layer, to_backend(v), primals, along)
        for product in products:
            for got, w in zip(product, want, strict=True):
                np.testing.assert_allclose(to_numpy(got), w, rtol=0, atol=1e-7 * 27 * largest)
        size = sum(np.abs(d).sum() for d in directions)
        want_twice = sum((w * d).sum() for w, d in zip(want, directions, strict=True))
        np.testing.assert_allclose(to_numpy(twice), want_twice, rtol=0, atol=1e-7 * 27 * largest * size)


def nestings(layer: Any, v: Any, primals: Any, along: Any) -> tuple[Any, ...]:
    """The product of the Hessian with a direction, three ways, and its product with that from the other side, too."""
    if BACKEND == "jax":
        import jax

        grad, jvp, compiled = jax.grad, jax.jvp, jax.jit
    else:
        import torch

        grad, jvp, compiled = torch.func.grad, torch.func.jvp, lambda function: function
    every = tuple(range(len(primals)))

    def loss(*primals: Any) -> Any:
        return ops.sum(v * layer.stateless_call(list(primals[1:]), [], primals[0])[0])

    def slope(*primals: Any) -> Any:
        return jvp(loss, primals, along)[1]

    def pulled(*primals: Any) -> Any:
        return sum(ops.sum(g * d) for g, d in zip(grad(loss, every)(*primals), along, strict=True))

    def compute(*primals: Any) -> Any:
        return (
            grad(pulled, every)(*primals),
            jvp(grad(loss, every), primals, along)[1],
            grad(slope, every)(*primals),
            jvp(slope, primals, along)[1],
        )

    return compiled(compute)(*primals)


CHECKS = {"parity": check_parity, "second_derivatives": check_second_derivatives}
