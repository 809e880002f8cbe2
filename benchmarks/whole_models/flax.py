"""The decoder in Flax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax import numpy as jnp
from timing.candidates import BUILTIN, LAYER_NORM, OURS, Call

from rmsnorm.flax_impl import RMSNorm
from whole_models import RATE, VOCABULARY, Sizes, draw_decoding, draw_tokens

_LAYERS: dict[str, Callable[..., Any]] = {OURS: RMSNorm, BUILTIN: nnx.RMSNorm, LAYER_NORM: nnx.LayerNorm}


class Block(nnx.Module):
    def __init__(self, sizes: Sizes, norm: Callable[[], Any], linear: Callable[[int, int], Any]) -> None:
        width, hidden = sizes.width, sizes.hidden
        self.heads = sizes.heads
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.gate, self.up, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)

    def __call__(self, x: Any, cache: Any = None) -> Any:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (qkv[:, :, i] for i in range(3))
        if cache is not None:
            k, v = jnp.concatenate((cache[0], k), axis=1), jnp.concatenate((cache[1], v), axis=1)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=cache is None)
        x = x + self.out(mixed.reshape(batch, length, width))
        h = self.mlp_norm(x)
        return x + self.down(jax.nn.silu(self.gate(h)) * self.up(h))


class Decoder(nnx.Module):
    def __init__(self, sizes: Sizes, norm: str, dtype: Any) -> None:
        options: Any = {"dtype": dtype, "param_dtype": dtype, "rngs": nnx.Rngs(0)}
        linear = partial(nnx.Linear, use_bias=False, **options)

        def make_norm() -> Any:
            return _LAYERS[norm](sizes.width, **{**options, "rngs": nnx.Rngs(0)}) if norm in _LAYERS else _identity

        self.embedding = nnx.Embed(VOCABULARY, sizes.width, **options)
        self.blocks = nnx.List(Block(sizes, make_norm, linear) for _ in range(sizes.layers))
        self.norm = make_norm()
        self.output = linear(sizes.width, VOCABULARY)

    def __call__(self, tokens: Any, caches: Any = None) -> Any:
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i] if caches else None)
        return self.output(self.norm(x)).astype(jnp.float32)


def _identity(x: Any) -> Any:
    return x


def step(op: str, norm: str, sizes: Sizes, dtype: str, mode: str) -> Call:
    graph, state = nnx.split(Decoder(sizes, norm, jnp.dtype(dtype)))

    def model(state: Any, *inputs: Any) -> Any:
        return nnx.merge(graph, state)(*inputs)

    if op == "decode":
        word, caches = jax.device_put(draw_decoding(sizes))
        caches = jax.tree.map(lambda array: array.astype(dtype), caches)
        run = jax.jit(model) if mode == "jit" else model
        return lambda: jax.block_until_ready(run(state, word, caches))
    tokens, targets = jax.device_put(draw_tokens(sizes))

    def loss_of(state: Any) -> Any:
        logits = jax.nn.log_softmax(model(state, tokens))
        return -jnp.take_along_axis(logits, targets[..., None], axis=-1).mean()

    def descend(state: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(state)
        return loss, jax.tree.map(lambda value, gradient: value - RATE * gradient, state, gradients)

    descent: Any = jax.jit(descend, donate_argnums=0) if mode == "jit" else descend
    states = [state]

    def train() -> Any:
        loss, states[0] = descent(states[0])
        jax.block_until_ready(states[0])
        return loss

    return train
