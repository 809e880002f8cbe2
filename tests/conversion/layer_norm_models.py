"""Models with LayerNorm in three frameworks, each written once: layers by their sizes, and what calls them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

Parts = dict[str, tuple[Any, ...]]  # the kind of each layer and its sizes
X, ROW, CENTRED = "rows of 3", "rows of 4", "rows of 4 without a mean"
SAMPLES = {
    X: np.random.default_rng(1).normal(size=(2, 3)).astype("float32"),
    ROW: np.random.default_rng(2).normal(size=(2, 4)).astype("float32"),
    CENTRED: np.array([[1, -1, 2, -2], [3, -1, -1, -1]], "float32"),
    "steps": np.random.default_rng(3).normal(size=(2, 5, 3)).astype("float32"),
    "image": np.random.default_rng(4).normal(size=(2, 6, 6, 3)).astype("float32"),
    "ids": np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]),
}


class Torch:
    """Channels are last, as in the others."""

    key = "torch"

    def __init__(self) -> None:
        self.torch = self.operations = pytest.importorskip("torch")
        self.of_layers = self.torch.nn.Module, "forward", self.torch.nn.Parameter

    def layer(self, kind: str, *sizes: Any) -> Any:
        nn = self.torch.nn

        class Conv(nn.Conv2d):
            def forward(self, x: Any) -> Any:
                return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)

        made: dict[str, Callable[..., Any]] = {
            "linear": nn.Linear, "norm": nn.LayerNorm, "embedding": nn.Embedding, "dropout": nn.Dropout,
            "plain norm": lambda n: nn.LayerNorm(n, elementwise_affine=False),
            "conv": lambda a, b, groups=1: Conv(a, b, 3, groups=groups),
        }  # fmt: skip
        return made[kind](*sizes)

    def model(self, forward: Any, parts: Parts, x: Any) -> Any:
        operations = self.operations

        class Net(self.torch.nn.Module):  # type: ignore[name-defined,misc]
            def forward(self, x: Any) -> Any:
                return forward(self, operations, x)

        net = Net()
        for name, part in parts.items():
            setattr(net, name, self.layer(*part))
        return net.eval()

    def array(self, x: Any) -> Any:
        return self.torch.from_numpy(x)

    def parameters(self, model: Any) -> dict[str, Any]:
        return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}

    def assign(self, model: Any, values: dict[str, Any]) -> None:
        with self.torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.torch.from_numpy(np.asarray(values[name])))

    def outputs(self, model: Any, x: Any) -> list[Any]:
        with self.torch.no_grad():
            y = model(x)
        return [each.numpy() for each in (y if isinstance(y, tuple) else [y])]

    def kind(self, model: Any, name: str) -> str:
        return type(model.get_submodule(name)).__name__


class Keras:
    key = "keras"

    def __init__(self) -> None:
        pytest.importorskip("tensorflow")
        self.keras = pytest.importorskip("keras")
        self.operations = self.keras.ops
        self.of_layers = self.keras.layers.Layer, "call", None

    def layer(self, name: str, kind: str, *sizes: Any) -> Any:
        make = self.keras.layers
        made: dict[str, Callable[..., Any]] = {
            "linear": lambda a, b: make.Dense(b, name=name), "dropout": lambda p: make.Dropout(p, name=name),
            "norm": lambda n: make.LayerNormalization(name=name),
            "plain norm": lambda n: make.LayerNormalization(center=False, scale=False, name=name),
            "embedding": lambda a, b: make.Embedding(a, b, name=name),
            "conv": lambda a, b, groups=1: make.Conv2D(b, 3, groups=groups, name=name),
        }  # fmt: skip
        return made[kind](*sizes)

    def model(self, forward: Any, parts: Parts, x: Any) -> Any:
        layers = SimpleNamespace(**{name: self.layer(name, *part) for name, part in parts.items()})
        inputs = self.keras.Input(batch_shape=x.shape, dtype=str(x.dtype))
        return self.keras.Model(inputs, forward(layers, self.operations, inputs))

    def array(self, x: Any) -> Any:
        return x

    def parameters(self, model: Any) -> dict[str, Any]:
        return {f"{i} {v.path}": v.numpy() for i, v in enumerate(model.trainable_variables)}

    def assign(self, model: Any, values: dict[str, Any]) -> None:
        for (_, value), variable in zip(values.items(), model.trainable_variables, strict=True):
            variable.assign(value)

    def outputs(self, model: Any, x: Any) -> list[Any]:
        y = model(x, training=False)
        return [each.numpy() for each in (y if isinstance(y, (tuple, list)) else [y])]

    def kind(self, model: Any, name: str) -> str:
        return type(model.get_layer(name)).__name__.replace("alization", "")


class Flax:
    key = "flax"

    def __init__(self) -> None:
        self.jax = pytest.importorskip("jax")
        self.nnx = pytest.importorskip("flax.nnx")
        self.of_layers = self.nnx.Module, "__call__", self.nnx.Param
        self.operations = SimpleNamespace(**{**vars(self.jax.numpy), **vars(self.jax.nn)})

    def layer(self, kind: str, *sizes: Any) -> Any:
        nnx, rngs = self.nnx, self.nnx.Rngs(0)
        made: dict[str, Callable[..., Any]] = {
            "linear": lambda *n: nnx.Linear(*n, rngs=rngs), "norm": lambda n: nnx.LayerNorm(n, rngs=rngs),
            "plain norm": lambda n: nnx.LayerNorm(n, use_bias=False, use_scale=False, rngs=rngs),
            "embedding": lambda *n: nnx.Embed(*n, rngs=rngs), "dropout": lambda p: nnx.Dropout(p, rngs=rngs),
            "conv": lambda a, b, groups=1: nnx.Conv(a, b, (3, 3), feature_group_count=groups, rngs=rngs),
        }  # fmt: skip
        return made[kind](*sizes)

    def model(self, forward: Any, parts: Parts, x: Any) -> Any:
        operations = self.operations

        class Net(self.nnx.Module):  # type: ignore[name-defined,misc]
            def __call__(self, *inputs: Any) -> Any:
                return forward(self, operations, *inputs)

        net = Net()
        for name, part in parts.items():
            setattr(net, name, self.layer(*part))
        net.eval()
        return net

    def array(self, x: Any) -> Any:
        return self.jax.numpy.asarray(x)

    def parameters(self, model: Any) -> dict[str, Any]:
        flat = self.nnx.to_flat_state(self.nnx.state(model, self.nnx.Param))
        return {"/".join(map(str, path)): np.asarray(value[...]) for path, value in flat}

    def assign(self, model: Any, values: dict[str, Any]) -> None:
        flat = self.nnx.to_flat_state(self.nnx.state(model, self.nnx.Param))
        state = [(path, v.replace(self.array(values["/".join(map(str, path))]))) for path, v in flat]
        self.nnx.update(model, self.nnx.from_flat_state(state))

    def outputs(self, model: Any, x: Any) -> list[Any]:
        return [np.asarray(y) for y in self.jax.tree.leaves(model(x))]

    def kind(self, model: Any, name: str) -> str:
        return type(getattr(model, name)).__name__


FRAMEWORKS = {each.key: each for each in (Torch, Keras, Flax)}


def randomised(framework: Any, model: Any) -> Any:
    """With gains, offsets and means of weights that show."""
    random = np.random.default_rng(5)
    values = framework.parameters(model).items()
    framework.assign(model, {k: (v + 0.2 + 0.3 * random.normal(size=v.shape)).astype(v.dtype) for k, v in values})
    return model


def attention(m: Any, ops: Any, h: Any) -> Any:
    scores = ops.matmul(m.q(h), ops.swapaxes(m.k(h), 1, 2))
    return m.o(ops.matmul(ops.softmax(scores, -1), m.v(h)))


def transformer(m: Any, ops: Any, ids: Any) -> Any:
    h = m.drop(m.words(ids) * 2.0)
    h = h + attention(m, ops, m.n1(h))
    h = h + m.down(ops.relu(m.up(m.n2(h))))
    return m.head(m.n3(h))


def post_norm(m: Any, ops: Any, ids: Any) -> Any:
    h = m.n1(m.words(ids))
    h = m.n2(h + attention(m, ops, h))
    return m.head(m.n3(h + m.down(ops.relu(m.up(h)))))


def masked(ops: Any, x: Any, y: Any) -> Any:
    """With a number beside y that is as good as minus infinity."""
    return ops.concatenate([y, x[..., :1] * 0.0 - 1e30], -1)


A: Parts = {"a": ("linear", 3, 4), "n": ("norm", 4)}
AB: Parts = {**A, "b": ("linear", 4, 4)}
BLOCK: Parts = {
    "words": ("embedding", 11, 8), "up": ("linear", 8, 16), "down": ("linear", 16, 8), "head": ("linear", 8, 11),
    **dict.fromkeys("qkvo", ("linear", 8, 8)), **{f"n{i}": ("norm", 8) for i in (1, 2, 3)},
}  # fmt: skip
# the layers, what is computed, the sample, and the norms that stay
MODELS: dict[str, tuple[Parts, Any, str, set[str]]] = {
    "mlp": ({**AB, "n2": ("norm", 4)}, lambda m, ops, x: m.n2(m.b(ops.relu(m.n(m.a(x))))), X, set()),
    "pre-norm": ({**BLOCK, "drop": ("dropout", 0.1)}, transformer, "ids", set()),
    "post-norm": (BLOCK, post_norm, "ids", {"n2", "n3"}),
    "no parameters": ({**A, "n": ("plain norm", 4)}, lambda m, ops, x: m.n(m.a(x)), X, set()),
    "conv": ({**A, "a": ("conv", 3, 4)}, lambda m, ops, x: m.n(m.a(x)), "image", set()),
    "pooled": (A, lambda m, ops, x: m.n(ops.mean(m.a(x), 1)), "steps", set()),
    "embeddings": ({"a": ("embedding", 11, 8), "b": ("embedding", 11, 8), "n": ("norm", 8)},
                   lambda m, ops, x: m.n(m.a(x) * 2.0 - m.b(x) / 3.0), "ids", set()),
    "features shuffled": (A, lambda m, ops, x: m.n(ops.flip(m.a(x), (-1,))), X, set()),
    "masked by a factor": (A, lambda m, ops, x: m.n(m.a(x) * x[..., :1]), X, set()),
    "one norm of two streams": ({**AB, "c": ("linear", 3, 4)}, lambda m, ops, x: m.n(m.a(x)) + m.n(m.c(x)) * 2.0, X,
                                set()),
    "norm after norm": ({**A, "n1": ("plain norm", 4)}, lambda m, ops, x: m.n(m.n1(m.a(x))), X, set()),
    "logits with a mask": (AB, lambda m, ops, x: masked(ops, x, m.b(m.n(m.a(x)))), X, set()),
    "only one of two": ({**AB, "n2": ("norm", 4)}, lambda m, ops, x: m.n2(ops.relu(m.n(m.a(x)))), X, {"n2"}),
    "relu": (A, lambda m, ops, x: m.n(ops.relu(m.a(x))), X, {"n"}),
    "relu and a mask": (AB, lambda m, ops, x: masked(ops, x, m.b(m.n(ops.relu(m.a(x))))), X, {"n"}),
    "the input": ({"n": ("norm", 4)}, lambda m, ops, x: m.n(x), ROW, {"n"}),
    "an input without a mean": ({"n": ("norm", 4)}, lambda m, ops, x: m.n(x), CENTRED, {"n"}),
    "residual of the input": (AB, lambda m, ops, x: m.n(x + m.b(x)), ROW, {"n"}),
    "another reader": (AB, lambda m, ops, x: m.n(m.a(x)) + m.b(m.a(x)), X, {"n"}),
    "a reader that is not linear": (A, lambda m, ops, x: m.n(m.a(x)) + ops.exp(m.a(x)), X, {"n"}),
    "a decision": (A, lambda m, ops, x: ops.where(m.a(x) > 0, m.n(m.a(x)), 0.0), X, {"n"}),
    "an output": (A, lambda m, ops, x: (m.n(m.a(x)), m.a(x)), X, {"n"}),
    "a quotient": (A, lambda m, ops, x: m.n(1.0 / m.a(x)), X, {"n"}),
    "a constant": (A, lambda m, ops, x: m.n(m.a(x) + 3.0), X, {"n"}),
    "heads": ({**A, "a": ("linear", 3, 8)}, lambda m, ops, x: m.n(ops.reshape(m.a(x), (2, 2, 4))), X, {"n"}),
    "features of two": ({"a": ("linear", 3, 2), "b": ("linear", 3, 2), "n": ("norm", 4)},
                        lambda m, ops, x: m.n(ops.concatenate([m.a(x), m.b(x)], -1)), X, {"n"}),
    "grouped conv": ({"a": ("conv", 3, 6, 3), "n": ("norm", 6)}, lambda m, ops, x: m.n(m.a(x)), "image", {"n"}),
    "one feature": ({"a": ("linear", 3, 1), "n": ("norm", 1)}, lambda m, ops, x: m.n(m.a(x)), X, {"n"}),
}  # fmt: skip
