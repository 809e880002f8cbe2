"""The decoder in Keras, on the backend that it was imported with: trained and asked by Keras's own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import layers, ops
from timing.candidates import BUILTIN, LAYER_NORM, OURS, Call

from rmsnorm.tf_impl import RMSNormalization
from whole_models import RATE, VOCABULARY, Sizes, draw_decoding, draw_tokens

_NORMS: dict[str, Callable[..., Any]] = {
    OURS: RMSNormalization, BUILTIN: layers.RMSNormalization, LAYER_NORM: layers.LayerNormalization,
    "none": layers.Identity,
}  # fmt: skip


class Block(layers.Layer):
    def __init__(self, sizes: Sizes, norm: Callable[..., Any], dtype: str) -> None:
        super().__init__(dtype=dtype)
        width, hidden, options = sizes.width, sizes.hidden, {"use_bias": False, "dtype": dtype}
        self.heads = sizes.heads
        self.attention_norm, self.mlp_norm = norm(dtype=dtype), norm(dtype=dtype)
        self.qkv, self.out = layers.Dense(3 * width, **options), layers.Dense(width, **options)
        self.gate, self.up = layers.Dense(hidden, **options), layers.Dense(hidden, **options)
        self.down = layers.Dense(width, **options)

    def call(self, x: Any, cache: Any = None) -> Any:
        batch, length, width = x.shape
        qkv = ops.reshape(self.qkv(self.attention_norm(x)), (batch, length, 3, self.heads, width // self.heads))
        q, k, v = ops.unstack(qkv, axis=2)
        if cache is not None:
            k, v = ops.concatenate((cache[0], k), axis=1), ops.concatenate((cache[1], v), axis=1)
        mixed = ops.dot_product_attention(q, k, v, is_causal=cache is None)
        x = x + self.out(ops.reshape(mixed, (batch, length, width)))
        h = self.mlp_norm(x)
        return x + self.down(ops.silu(self.gate(h)) * self.up(h))


class Decoder(keras.Model):
    def __init__(self, sizes: Sizes, norm: Callable[..., Any], dtype: str) -> None:
        super().__init__(dtype=dtype)
        self.embedding = layers.Embedding(VOCABULARY, sizes.width, dtype=dtype)
        self.blocks = [Block(sizes, norm, dtype) for _ in range(sizes.layers)]
        self.norm = norm(dtype=dtype)
        self.logits = layers.Dense(VOCABULARY, use_bias=False, dtype=dtype)

    def call(self, inputs: Any) -> Any:
        tokens, *caches = inputs if isinstance(inputs, (list, tuple)) else (inputs,)
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, caches[2 * i : 2 * i + 2] or None)
        return ops.cast(self.logits(self.norm(x)), "float32")


def step(op: str, norm: str, sizes: Sizes, dtype: str, mode: str) -> Call:
    keras.utils.set_random_seed(0)
    model = Decoder(sizes, _NORMS[norm], dtype)
    model.compile(
        keras.optimizers.SGD(RATE), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        run_eagerly=mode == "eager", jit_compile=mode in ("jit", "compiled"),
    )  # fmt: skip
    if op == "train":
        tokens, targets = map(ops.convert_to_tensor, draw_tokens(sizes))
        return lambda: model.train_on_batch(tokens, targets)
    word, drawn = draw_decoding(sizes)
    inputs = [ops.convert_to_tensor(word), *(ops.convert_to_tensor(array, dtype) for pair in drawn for array in pair)]
    return lambda: model.predict_on_batch(inputs)
