"""A decoder-only Transformer, the same in PyTorch, Keras and Flax, made of each framework's own layers.

Pre-norm blocks of causal attention and SwiGLU, without biases, positions or dropout; a norm before the output. What a
norm costs in it is what a user pays.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from timing.candidates import BUILTIN, LAYER_NORM, OURS

NORMS: Final = (OURS, BUILTIN, LAYER_NORM, "none")
OPS: Final = ("train", "decode")
DTYPES: Final = ("float32", "bfloat16")
MODES: Final = {
    "torch": ("eager", "compiled"),
    "tf": ("eager", "graph", "jit"),
    "flax": ("eager", "jit"),
    "keras-torch": ("eager",),  # torch.compile takes minutes for each layer of Keras
    "keras-jax": ("eager", "jit"),
}
VOCABULARY: Final = 4096
RATE: Final = 0.01  # of gradient descent: the second loss shows the gradients of the first

Array = npt.NDArray[Any]


class Sizes(NamedTuple):
    """Blocks, features, and the tokens of a batch. A head has 64 features; SwiGLU is 11 / 4 times as wide inside."""

    layers: int
    width: int
    batch: int
    length: int

    @property
    def heads(self) -> int:
        return max(1, self.width // 64)

    @property
    def hidden(self) -> int:
        return 11 * self.width // 4


def draw_tokens(sizes: Sizes) -> tuple[Array, Array]:
    """Sentences, and for every word of them the next one."""
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=(sizes.batch, sizes.length + 1), dtype=np.int32)
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


def draw_decoding(sizes: Sizes) -> tuple[Array, list[tuple[Array, Array]]]:
    """The last word of one sentence, and the keys and values (1, words, heads, features) of all words before it."""
    random = np.random.default_rng(0)
    shape = (1, sizes.length - 1, sizes.heads, sizes.width // sizes.heads)
    caches = [tuple(random.standard_normal(shape, np.float32) for _ in range(2)) for _ in range(sizes.layers)]
    return random.integers(VOCABULARY, size=(1, 1), dtype=np.int32), caches  # type: ignore[return-value]
