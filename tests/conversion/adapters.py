"""Norms written once over a table of operations, and what makes and calls them and models of them in each framework."""

from __future__ import annotations

import copy
import functools
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

GAIN = np.linspace(0.5, 2, 8).astype("float32")


def own(self, hidden):
    return hidden * self.ops.rsqrt(self.ops.mean(hidden * hidden, -1, keepdims=True) + self.eps) * self.g


def with_extra(self, hidden, extra=1.0):
    return own(self, hidden) * extra


def in_groups(self, hidden):
    wide = self.ops.reshape(hidden, (*hidden.shape[:-1], -1, 4))
    y = wide * self.ops.rsqrt(self.ops.mean(wide * wide, -1, keepdims=True) + self.eps)
    return self.ops.reshape(y, hidden.shape) * self.g


def silu_gate(self, hidden, gate=None):
    """Mamba-2's; the gate may be left out."""
    return in_groups(self, hidden if gate is None else hidden * self.ops.silu(gate))


def sigmoid_gate(self, hidden, gate=None):
    return own(self, hidden) * (1.0 if gate is None else self.ops.sigmoid(gate))


def counting(self, hidden):
    self.calls = getattr(self, "calls", 0) + 1
    return own(self, hidden)


def without_nan(self, hidden):
    return self.ops.nan_to_num(own(self, hidden))


def of_training(self, hidden, training=None):
    """Keras passes its mode, and a module of PyTorch has it."""
    return own(self, hidden) * (0.9 if (self.training if training is None else training) else 1.0)


def l2(self, hidden):
    return self.ops.normalize(hidden)


def layer_norm(self, hidden, factor=None):
    """With a gain less 1."""
    c = hidden - self.ops.mean(hidden, -1, keepdims=True)
    y = c / self.ops.sqrt(self.ops.mean(c * c, -1, keepdims=True) + 0.1) * (self.g + 1)
    return y if factor is None else factor * y


class Framework:
    """What the frameworks share: ``ops`` are named as in NumPy, and ``made`` makes layers by their kind and sizes."""

    def kind(self, body):
        """The class of a norm, which pickle finds by its name."""
        name = f"{self.key}_{body.__name__}_norm"
        if name not in globals():
            attributes = {"ops": self.ops, "__module__": __name__, self.method: body, **self.methods(body)}
            globals()[name] = type(self.base)(name, (self.base,), attributes)
        return globals()[name]

    def layer(self, kind, *sizes):
        """The framework's layer of this name, or one that computes this function."""
        return self.made[kind](*sizes) if isinstance(kind, str) else self.kind(kind)(*sizes)

    def alone(self, kind, *sizes):
        """A layer that knows the shape of x."""
        return self.layer(kind, *sizes)

    def net(self, forward, parts, x=None):
        """A model that computes ``forward(model, operations, x)`` and has these parts."""
        ops = self.ops
        net = type("Net", (self.base,), {self.method: lambda model, x: forward(model, ops, x)})()
        for name, part in parts.items():
            setattr(net, name, self.layer(*part))
        net.eval()
        return net

    def part(self, model, name):
        return getattr(model, name)

    def own_code(self, kind, layer):
        """The call of a class, whatever the class of the layer has become."""
        return functools.partial(getattr(kind, self.method), layer)


class Torch(Framework):
    """Channels are last, as in the others."""

    key, method, rounding = "torch", "forward", 1e-5

    def __init__(self):
        torch = self.torch = pytest.importorskip("torch")
        torch.manual_seed(0)
        nn, functional, self.base = torch.nn, torch.nn.functional, torch.nn.Module
        own = {"silu": functional.silu, "normalize": functools.partial(functional.normalize, dim=-1)}
        self.ops = SimpleNamespace(**{**vars(torch), **own})

        class Conv(nn.Conv2d):
            def forward(self, x):
                return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)

        def encoder(*sizes):
            """Of PyTorch, with its RMSNorm."""
            layer = nn.TransformerEncoderLayer(*sizes, dropout=0.0, batch_first=True, norm_first=True)
            layer.norm1, layer.norm2 = (nn.RMSNorm(sizes[0], eps=1e-5) for _ in range(2))
            return layer

        self.made = {
            "linear": nn.Linear, "norm": nn.LayerNorm, "embedding": nn.Embedding, "dropout": nn.Dropout,
            "plain norm": functools.partial(nn.LayerNorm, elementwise_affine=False), "batch norm": nn.BatchNorm1d,
            "rms": functools.partial(nn.RMSNorm, eps=1e-5), "l2": lambda n: self.layer(l2, None), "encoder": encoder,
            "conv": lambda a, b, groups=1: Conv(a, b, 3, groups=groups),
        }  # fmt: skip

    def methods(self, body):
        nn, from_numpy = self.torch.nn, self.torch.from_numpy

        def init(norm, width=8):
            nn.Module.__init__(norm)
            norm.eps = 1e-5
            if width:
                norm.g = nn.Parameter(from_numpy(GAIN[:width].copy()))

        return {"__init__": init}

    def array(self, x):
        return self.torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x

    def outputs(self, call, *inputs, **options):
        with self.torch.no_grad():
            y = call(*map(self.array, inputs), **{name: self.array(value) for name, value in options.items()})
        return [each.numpy() for each in (y if isinstance(y, tuple) else [y])]

    def results(self, layer, *inputs):
        """y, and the gradients for the inputs and the parameters."""
        leaves = [self.array(array).requires_grad_() for array in inputs]
        y = layer(*leaves)
        gradients = self.torch.autograd.grad((y * y.detach().cos()).sum(), [*leaves, *layer.parameters()])
        return [tensor.detach().numpy() for tensor in (y, *gradients)]

    def parameters(self, model):
        return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}

    def assign(self, model, values):
        for name, parameter in model.named_parameters():
            parameter.data.copy_(self.torch.from_numpy(np.asarray(values[name])))

    def copies(self, layer):
        return [layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]


class Keras(Framework):
    """Its models are graphs of layers."""

    key, method, rounding = "keras", "call", 1e-4

    def __init__(self):
        self.tf = pytest.importorskip("tensorflow")
        keras = self.keras = pytest.importorskip("keras")
        keras.utils.set_random_seed(0)
        self.ops, self.base, make = keras.ops, keras.layers.Layer, keras.layers

        def rms():
            return make.RMSNormalization(epsilon=1e-5) if hasattr(make, "RMSNormalization") else pytest.skip("of 3.9")

        self.made = {
            "linear": lambda a, b: make.Dense(b), "embedding": make.Embedding, "dropout": make.Dropout,
            "norm": lambda n: make.LayerNormalization(), "batch norm": lambda n: make.BatchNormalization(),
            "plain norm": lambda n: make.LayerNormalization(center=False, scale=False),
            "rms": lambda n: rms(), "l2": lambda n: make.UnitNormalization(),
            "conv": lambda a, b, groups=1: make.Conv2D(b, 3, groups=groups),
        }  # fmt: skip

    def methods(self, body):
        def build(norm, hidden_shape):
            norm.eps = 1e-5
            norm.g = norm.add_weight(hidden_shape[-1:], lambda shape, dtype: np.resize(GAIN, shape), name="g")

        def build_gated(norm, hidden_shape, gate_shape=None):
            build(norm, hidden_shape)

        return {"build": build_gated if "gate" in body.__name__ else build}

    def layer(self, kind, *sizes):
        return super().layer(kind, *(sizes if isinstance(kind, str) else ()))

    def alone(self, kind, *sizes):
        layer = self.layer(kind, *sizes)
        layer.build(*[(None, None, 8)] * (2 if "gate" in getattr(kind, "__name__", "") else 1))
        return layer

    def net(self, forward, parts, x=None):
        layers = SimpleNamespace(**{name: self.layer(*part) for name, part in parts.items()})
        for name, layer in vars(layers).items():
            layer.name = name
        inputs = self.keras.Input(batch_shape=x.shape, dtype=str(x.dtype))
        return self.keras.Model(inputs, forward(layers, self.ops, inputs))

    def part(self, model, name):
        return model.get_layer(name)

    def array(self, x):
        return self.tf.constant(x) if isinstance(x, np.ndarray) else x

    def outputs(self, call, *inputs, **options):
        y = call(*map(self.array, inputs), **options)
        return [each.numpy() for each in (y if isinstance(y, (tuple, list)) else [y])]

    def results(self, layer, *inputs):
        leaves = [self.tf.Variable(array) for array in inputs]
        with self.tf.GradientTape() as tape:
            y = layer(*map(self.tf.convert_to_tensor, leaves))
            loss = self.tf.reduce_sum(y * self.tf.stop_gradient(self.tf.cos(y)))
        gradients = tape.gradient(loss, [*leaves, *(weight.value for weight in layer.trainable_weights)])
        return [np.asarray(tensor) for tensor in (y, *gradients)]

    def parameters(self, model):
        return {f"{i} {v.path}": v.numpy() for i, v in enumerate(model.trainable_variables)}

    def assign(self, model, values):
        for value, variable in zip(values.values(), model.trainable_variables, strict=True):
            variable.assign(value)

    def copies(self, layer):
        """Keras saves a layer by its config, which makes Keras's own again."""
        return [layer]


class Flax(Framework):
    key, method, rounding = "flax", "__call__", 1e-4

    def __init__(self):
        jax = self.jax = pytest.importorskip("jax")
        nnx = self.nnx = pytest.importorskip("flax.nnx")
        self.base = nnx.Module

        def normalize(x):
            return x / self.ops.maximum(jax.numpy.linalg.norm(x, axis=-1, keepdims=True), 1e-12)

        self.ops = SimpleNamespace(
            **{**vars(jax.numpy), **vars(jax.nn), "rsqrt": jax.lax.rsqrt, "normalize": normalize}
        )

        def made(kind, **options):
            """With the same random numbers in each."""
            return lambda *sizes: kind(*sizes, **options, rngs=nnx.Rngs(0))

        self.made = {
            "linear": made(nnx.Linear), "norm": made(nnx.LayerNorm), "embedding": made(nnx.Embed),
            "dropout": made(nnx.Dropout), "batch norm": made(nnx.BatchNorm), "l2": lambda n: self.layer(l2, None),
            "plain norm": made(nnx.LayerNorm, use_bias=False, use_scale=False), "rms": made(nnx.RMSNorm, epsilon=1e-5),
            "conv": lambda a, b, groups=1: made(nnx.Conv, feature_group_count=groups)(a, b, (3, 3)),
        }  # fmt: skip

    def methods(self, body):
        def init(norm, width=8):
            norm.eps = 1e-5
            if width:
                norm.g = self.nnx.Param(self.jax.numpy.asarray(GAIN[:width]))

        return {"__init__": init}

    def array(self, x):
        return self.jax.numpy.asarray(x) if isinstance(x, np.ndarray) else x

    def outputs(self, call, *inputs, **options):
        return [np.asarray(y) for y in self.jax.tree.leaves(call(*map(self.array, inputs), **options))]

    def results(self, layer, *inputs):
        jax, leaves = self.jax, [self.array(array) for array in inputs]

        def loss(layer, *leaves):
            y = layer(*leaves)
            return (y * jax.lax.stop_gradient(jax.numpy.cos(y))).sum()

        gradients = self.nnx.grad(loss, argnums=tuple(range(len(inputs) + 1)))
        found = self.nnx.jit(lambda layer, *leaves: (layer(*leaves), gradients(layer, *leaves)))(layer, *leaves)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]

    def parameters(self, model):
        flat = self.nnx.to_flat_state(self.nnx.state(model, self.nnx.Param))
        return {"/".join(map(str, path)): np.asarray(value[...]) for path, value in flat}

    def assign(self, model, values):
        flat = self.nnx.to_flat_state(self.nnx.state(model, self.nnx.Param))
        state = [(path, v.replace(self.array(np.asarray(values["/".join(map(str, path))])))) for path, v in flat]
        self.nnx.update(model, self.nnx.from_flat_state(state))

    def copies(self, layer):
        return [layer, self.nnx.clone(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]


FRAMEWORKS = {each.key: each for each in (Torch, Keras, Flax)}
CASES = [
    pytest.param(key, marks=getattr(pytest.mark, name))
    for key, name in (("torch", "torch"), ("keras", "tf"), ("flax", "flax"))
]
