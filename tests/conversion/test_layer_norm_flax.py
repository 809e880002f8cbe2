"""LayerNorm into RMSNorm in models of Flax: what is converted is equal, what is left has a reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conversions import IDS, ROUNDING, SINGLE, distance, shown

from rmsnorm.conversion.layer_norm import to_rms_norm

pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
from rmsnorm.conversion.replacement.flax import iter_modules  # noqa: E402

in_list = getattr(nnx, "List", list)  # Flax 0.11 takes lists themselves


def nnx_models() -> dict[str, Any]:
    """Models, what they take, and the layers that are left with why; all others are converted."""
    import jax
    from jax import numpy as jnp

    rngs = nnx.Rngs(0)
    x, image = jax.random.normal(jax.random.key(0), (2, 3)), jax.random.normal(jax.random.key(1), (2, 6, 6, 3))

    class Net(nnx.Module):
        def __init__(self, forward: Any, **parts: Any) -> None:
            self.forward = forward
            for name, part in parts.items():
                setattr(self, name, part)

        def __call__(self, *inputs: Any, **options: Any) -> Any:
            return self.forward(self, *inputs, **options)

    def norm(size: int = 4, **options: Any) -> Any:
        return nnx.LayerNorm(size, rngs=rngs, **options)

    def linear(*sizes: int) -> Any:
        return nnx.Linear(*sizes, rngs=rngs)

    def gpt(m: Any, ids: Any) -> Any:
        h = m.drop(m.words(ids) * 2 + m.positions[...])
        for i in range(1):
            h = h + m.attention[i](m.before[i](h), mask=jnp.tril(jnp.ones((1, 1, 5, 5), bool)))
            h = h + m.down[i](nnx.gelu(m.up[i](m.after[i](h))))
        return m.head(m.last(h))

    def gpt_parts(head: Any) -> dict[str, Any]:
        listed = {
            "attention": lambda: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs), "before": lambda: norm(8),
            "after": lambda: norm(8), "up": lambda: linear(8, 16), "down": lambda: linear(16, 8),
        }  # fmt: skip
        lists = {name: in_list([make()]) for name, make in listed.items()}
        words, positions = nnx.Embed(11, 8, rngs=rngs), nnx.Param(jnp.ones((5, 8)))
        drop = nnx.Dropout(0.1, rngs=rngs)
        return {**lists, "words": words, "positions": positions, "drop": drop, "last": norm(8), "head": head}

    ids = jnp.asarray(IDS)
    masked = jnp.ones((2, 4), bool)
    tied = {f"{name}/{i}": "keeps a mean of" for name in ("before", "after") for i in range(1)}
    return {
        "mlp": (nnx.Sequential(linear(3, 4), norm(), nnx.relu, norm()), x, {"layers/3": "keeps a mean of"}),
        "gpt": (Net(gpt, **gpt_parts(linear(8, 11))), ids, {}),
        "gpt, tied": (Net(lambda m, ids: m.words.attend(gpt(m, ids)), **gpt_parts(nnx.identity)), ids,
                      {**tied, "last": "keeps a mean of"}),
        "conv": (nnx.Sequential(nnx.Conv(3, 4, (3, 3), rngs=rngs), norm(use_bias=False)), image, {}),
        "grouped conv": (nnx.Sequential(nnx.Conv(3, 6, (3, 3), feature_group_count=3, rngs=rngs), norm(6)), image,
                         {"layers/1": "keeps a mean of"}),
        "another reader": (Net(lambda m, x: m.n(h := m.a(x)) + nnx.relu(h), a=linear(3, 4), n=norm()), x,
                           {"n": "keeps a mean of"}),
        "an output": (Net(lambda m, x: (m.n(h := m.a(x)), h), a=linear(3, 4), n=norm()), x,
                      {"n": "keeps a mean of"}),
        "the input": (Net(lambda m, x: m.n(x + m.a(x)), a=linear(3, 3), n=norm(3)), x, {"n": "keeps a mean of"}),
        "a mask": (Net(lambda m, x: m.n(m.a(x), mask=masked), a=linear(3, 4), n=norm()), x,
                   {"n": "it is called with more than x"}),
        "one norm twice": (Net(lambda m, x: m.n(m.a(x)) + m.n(m.b(x)).mean(0), a=linear(3, 4), b=linear(3, 4),
                               n=norm()), x, {}),
        "not reached": (Net(lambda m, x: m.a(x), a=linear(3, 4), n=norm()), x, {"n": "do not reach it"}),
        "bfloat16": (nnx.Sequential(nnx.Linear(3, 4, rngs=rngs, dtype=jnp.bfloat16), norm(dtype=jnp.bfloat16)), x, {}),
    }  # fmt: skip


NNX_MODELS = (
    "mlp", "gpt", "gpt, tied", "conv", "grouped conv", "another reader", "an output", "the input", "a mask",
    "one norm twice", "not reached", "bfloat16",
)  # fmt: skip


@pytest.mark.parametrize("name", NNX_MODELS)
def test_nnx(name):
    import jax

    model, x, left = nnx_models()[name]
    rng = np.random.default_rng(2)

    def moved(array: Any) -> Any:
        return array + (0.2 + 0.3 * rng.standard_normal(array.shape)).astype("float32")

    nnx.update(model, jax.tree.map(moved, nnx.state(model, nnx.Param)))
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    strict = "standard" if name == "bfloat16" else "strict"  # in which flax.nnx.LayerNorm takes no bfloat16
    with jax.numpy_dtype_promotion(strict):
        result = to_rms_norm(model, x)
    reasons = {layer: why for layer, why in shown(result).items() if why}
    assert set(reasons) == set(left)
    assert all(why in reasons[layer] for layer, why in left.items())
    after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))
    model.eval()
    result.model.eval()
    with jax.numpy_dtype_promotion(strict):
        outputs = [jax.tree.leaves(nnx.jit(lambda m, x: m(x))(one, x)) for one in (model, result.model)]
    for one, two in zip(*outputs, strict=True):
        if len(left) == len(result.layers):
            assert np.array_equal(one, two)
        else:
            assert distance(one, two) <= (SINGLE if name != "bfloat16" else 0.02)
    assert (result.exact or 0.0) <= ROUNDING
    kinds = {path: type(module).__name__ for path, module in iter_modules(result.model)}
    for layer in result.layers:
        path = next(path for path in kinds if "/".join(map(str, path)) == layer.name)
        assert kinds[path] == ("RMSNorm" if layer.converted else "LayerNorm")
    assert [note for note in result.notes if note.startswith("dropout in drop:")] or name != "gpt"


def test_nnx_names_are_all():
    assert set(NNX_MODELS) == set(nnx_models())


def test_a_class_that_is_no_layer_norm_of_the_framework_is_known_by_what_it_computes():
    import jax
    from jax import numpy as jnp

    rngs = nnx.Rngs(0)

    class Own(nnx.Module):
        def __init__(self) -> None:
            self.g, self.b = nnx.Param(jnp.linspace(0.5, 2, 4)), nnx.Param(jnp.ones(4))

        def __call__(self, h: Any, factor: float | None = None) -> Any:
            c = h - h.mean(-1, keepdims=True)
            y = c * jax.lax.rsqrt(jnp.square(c).mean(-1, keepdims=True) + 0.1) * self.g[...] + self.b[...]
            return y if factor is None else factor * y

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.linear, self.norm, self.same = nnx.Linear(3, 4, rngs=rngs), Own(), nnx.Linear(4, 4, rngs=rngs)
            self.other = Own()

        def __call__(self, x: Any) -> Any:
            return self.other(self.same(self.norm(h=self.linear(x))), 2.0)

    model, x = Net(), jax.random.normal(jax.random.key(0), (2, 3))
    result = to_rms_norm(model, x)
    assert {layer.name: (layer.converted, layer.why) for layer in result.layers} == {
        "norm": (True, "eps 0.1"),
        "other": (False, "it is called with more than x"),
    }
    assert isinstance(result.model.norm, Own)
    assert result.exact <= ROUNDING
    assert not np.allclose(result.model.norm(x[:, :1] + jnp.arange(4.0)), model.norm(x[:, :1] + jnp.arange(4.0)))
