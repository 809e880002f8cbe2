"""Norms that `replace` is asked about, each written once, and what makes, calls and copies them in each framework."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

GAIN = np.linspace(0.5, 2, 8).astype("float32")


def own(self: Any, hidden: Any) -> Any:
    return hidden * self.ops.rsqrt(self.ops.mean(hidden * hidden, -1, keepdims=True) + self.eps) * self.g


def with_extra(self: Any, hidden: Any, extra: float = 1.0) -> Any:
    return own(self, hidden) * extra


def counting(self: Any, hidden: Any) -> Any:
    self.calls = getattr(self, "calls", 0) + 1
    return own(self, hidden)


def without_nan(self: Any, hidden: Any) -> Any:
    return self.ops.nan_to_num(own(self, hidden))


def of_training(self: Any, hidden: Any, training: Any = None) -> Any:
    """Of Keras, which passes its mode; a module of PyTorch has it."""
    return own(self, hidden) * (0.9 if (self.training if training is None else training) else 1.0)


def of_mode(self: Any, hidden: Any) -> Any:
    return of_training(self, hidden)


def in_groups(self: Any, h: Any) -> Any:
    wide = self.ops.reshape(h, (*h.shape[:-1], -1, 4))
    y = wide * self.ops.rsqrt(self.ops.mean(wide * wide, -1, keepdims=True) + self.eps)
    return self.ops.reshape(y, (*h.shape[:-1], 8)) * self.g


def groups(self: Any, hidden: Any) -> Any:
    return in_groups(self, hidden)


def silu_gate(self: Any, hidden: Any, gate: Any = None) -> Any:
    """Mamba-2's; the gate may be left out."""
    return in_groups(self, hidden if gate is None else hidden * self.ops.silu(gate))


def sigmoid_gate(self: Any, hidden: Any, gate: Any = None) -> Any:
    return own(self, hidden) * (1.0 if gate is None else self.ops.sigmoid(gate))


def unit(self: Any, hidden: Any) -> Any:
    return self.ops.normalize(hidden)


RIGHT = {"own": own, "with an argument": with_extra, "groups": groups, "silu gate": silu_gate,
         "sigmoid gate": sigmoid_gate}  # fmt: skip
WRONG = {"counting": counting, "NaN": without_nan}


class Torch:
    key, rounding, method, has_mode = "torch", 1e-5, "forward", True

    def __init__(self) -> None:
        torch = self.torch = pytest.importorskip("torch")
        functional = torch.nn.functional
        ops = SimpleNamespace(
            rsqrt=torch.rsqrt, mean=torch.mean, nan_to_num=torch.nan_to_num, reshape=torch.reshape,
            sigmoid=torch.sigmoid, silu=functional.silu, normalize=lambda x: functional.normalize(x, dim=-1),
        )  # fmt: skip

        def init(norm: Any, gain: bool = True) -> None:
            super(type(norm), norm).__init__()
            norm.eps = 1e-5
            if gain:
                norm.g = torch.nn.Parameter(torch.from_numpy(GAIN.copy()))

        self.base, self.attributes = torch.nn.Module, {"ops": ops, "__init__": init}
        self.built_in = {
            "LayerNorm": lambda: torch.nn.LayerNorm(8), "BatchNorm": lambda: torch.nn.BatchNorm1d(8),
            "training": lambda: self.layer(of_mode), "L2": lambda: self.layer(unit, gain=False),
        }  # fmt: skip

    def layer(self, body: Any, **options: Any) -> Any:
        return kind_of(self, body)(**options)

    def call(self, layer: Any, *inputs: Any, **options: Any) -> Any:
        return self.own_code(type(layer), layer, *inputs, **options)

    def own_code(self, kind: Any, layer: Any, *inputs: Any, **options: Any) -> Any:
        sent = {name: self.sent(value) for name, value in options.items()}
        return getattr(kind, "forward")(layer, *map(self.sent, inputs), **sent).detach().numpy()  # noqa: B009

    def sent(self, value: Any) -> Any:
        return self.torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value

    def results(self, layer: Any, *inputs: Any) -> list[Any]:
        """y, and the gradients for the inputs and the parameters."""
        leaves = [self.sent(array).requires_grad_() for array in inputs]
        y = layer(*leaves)
        gradients = self.torch.autograd.grad((y * y.detach().cos()).sum(), [*leaves, *layer.parameters()])
        return [tensor.detach().numpy() for tensor in (y, *gradients)]

    def copies(self, layer: Any) -> list[Any]:
        return [layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]

    def double(self, layer: Any) -> None:
        """The gain is set to twice its value."""
        layer.g = self.torch.nn.Parameter(2 * layer.g.detach())


class Keras:
    key, rounding, method, has_mode = "keras", 1e-4, "call", True

    def __init__(self) -> None:
        self.tf = pytest.importorskip("tensorflow")
        keras = self.keras = pytest.importorskip("keras")

        def build(norm: Any, hidden_shape: Any, gate_shape: Any = None) -> None:
            norm.eps = 1e-5
            norm.g = norm.add_weight(shape=(8,), initializer=lambda shape, dtype=None: GAIN, name="g")

        def build_alone(norm: Any, hidden_shape: Any) -> None:
            build(norm, hidden_shape)

        self.builds = build_alone, build
        self.base, self.attributes = keras.layers.Layer, {"ops": keras.ops}
        layers = keras.layers
        self.built_in = {
            "LayerNorm": lambda: self.built(layers.LayerNormalization()),
            "BatchNorm": lambda: self.built(layers.BatchNormalization()),
            "training": lambda: self.layer(of_training), "L2": lambda: self.built(layers.UnitNormalization()),
        }  # fmt: skip

    def built(self, layer: Any, inputs: int = 1) -> Any:
        layer.build(*[(None, None, 8)] * inputs)
        return layer

    def layer(self, body: Any) -> Any:
        gated = "gate" in body.__name__
        return self.built(kind_of(self, body, build=self.builds[gated])(), 1 + gated)

    def call(self, layer: Any, *inputs: Any, **options: Any) -> Any:
        return np.asarray(layer(*inputs, **options))

    def own_code(self, kind: Any, layer: Any, *inputs: Any, **options: Any) -> Any:
        return np.asarray(kind.call(layer, *map(self.tf.constant, inputs), **options))

    def results(self, layer: Any, *inputs: Any) -> list[Any]:
        leaves = [self.tf.Variable(array) for array in inputs]
        with self.tf.GradientTape() as tape:
            y = layer(*map(self.tf.convert_to_tensor, leaves))
            loss = self.tf.reduce_sum(y * self.tf.stop_gradient(self.tf.cos(y)))
        gradients = tape.gradient(loss, [*leaves, *(weight.value for weight in layer.trainable_weights)])
        return [np.asarray(tensor) for tensor in (y, *gradients)]

    def copies(self, layer: Any) -> list[Any]:
        """Keras saves a layer by its config, which makes Keras's own again; test_replace_keras.py has that."""
        return [layer]

    def double(self, layer: Any) -> None:
        layer.set_weights([2 * weight for weight in layer.get_weights()])


class Flax:
    key, rounding, method, has_mode = "flax", 1e-4, "__call__", False

    def __init__(self) -> None:
        jax = self.jax = pytest.importorskip("jax")
        nnx = self.nnx = pytest.importorskip("flax.nnx")
        jnp = jax.numpy
        ops = SimpleNamespace(
            rsqrt=jax.lax.rsqrt, mean=jnp.mean, nan_to_num=jnp.nan_to_num, reshape=jnp.reshape,
            sigmoid=jax.nn.sigmoid, silu=jax.nn.silu,
            normalize=lambda x: x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12),
        )  # fmt: skip

        def init(norm: Any, gain: bool = True) -> None:
            norm.eps = 1e-5
            if gain:
                norm.g = nnx.Param(jnp.asarray(GAIN))

        self.base, self.attributes = nnx.Module, {"ops": ops, "__init__": init}
        self.built_in = {
            "LayerNorm": lambda: nnx.LayerNorm(8, rngs=nnx.Rngs(0)),
            "BatchNorm": lambda: nnx.BatchNorm(8, rngs=nnx.Rngs(0)), "L2": lambda: self.layer(unit, gain=False),
        }  # fmt: skip

    def layer(self, body: Any, **options: Any) -> Any:
        return kind_of(self, body)(**options)

    def call(self, layer: Any, *inputs: Any, **options: Any) -> Any:
        return self.own_code(type(layer), layer, *inputs, **options)

    def own_code(self, kind: Any, layer: Any, *inputs: Any, **options: Any) -> Any:
        return np.asarray(self.nnx.jit(lambda layer: kind.__call__(layer, *inputs, **options))(layer))

    def results(self, layer: Any, *inputs: Any) -> list[Any]:
        jax, leaves = self.jax, [self.jax.numpy.asarray(array) for array in inputs]

        def loss(layer: Any, *leaves: Any) -> Any:
            y = layer(*leaves)
            return (y * jax.lax.stop_gradient(jax.numpy.cos(y))).sum()

        gradients = self.nnx.grad(loss, argnums=tuple(range(len(inputs) + 1)))
        found = self.nnx.jit(lambda layer, *leaves: (layer(*leaves), gradients(layer, *leaves)))(layer, *leaves)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]

    def copies(self, layer: Any) -> list[Any]:
        return [layer, self.nnx.clone(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]

    def double(self, layer: Any) -> None:
        layer.g = self.nnx.Param(2 * layer.g[...])


FRAMEWORKS = {each.key: each for each in (Torch, Keras, Flax)}


def kind_of(framework: Any, body: Any, **methods: Any) -> Any:
    """The class of a norm in a framework, which pickle finds by its name."""
    name = f"{framework.key}_{body.__name__}_norm"
    if name not in globals():
        attributes = {**framework.attributes, **methods, framework.method: body, "__module__": __name__}
        globals()[name] = type(framework.base)(name, (framework.base,), attributes)
    return globals()[name]
