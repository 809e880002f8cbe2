"""RMSNorm in a TensorFlow that lacks what private.py asks for: the program of test_private.

The names are the arguments. Each is away while rmsnorm is imported, as it would be in a version without it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import tensorflow as tf

MISSING = (
    "eager.record.could_possibly_record",
    "eager.record.record_operation",
    "eager.forwardprop_util.pack_tangents",
    "ops.control_flow_util.GraphOrParentsInXlaContext",
    "framework.ops.EagerTensor",
)


@contextmanager
def without(names: list[str]) -> Iterator[None]:
    """One name is away, or all of them with their modules."""
    split = [f"tensorflow.python.{name}".rsplit(".", 1) for name in names]
    with ExitStack() as patches:
        for owner, last in [(import_module(path), last) for path, last in split]:
            path = owner.__name__
            if len(names) > 1 and sys.modules[path] is not None:
                patches.callback(sys.modules.__setitem__, path, owner)
                sys.modules[path] = None  # type: ignore[assignment]
                parent, _, last = path.rpartition(".")
                owner = sys.modules[parent]
            if hasattr(owner, last):
                patches.callback(setattr, owner, last, getattr(owner, last))
                delattr(owner, last)
        yield


def results(rms_norm: Any, rms_norm_vjp: Any) -> dict[str, Any]:
    """What a program may do with the functions, each as a list."""
    from tf_gradients import NESTINGS, around_a_graph, by_tf_gradients, forward_mode, gradients_of, in_a_graph

    rng = np.random.default_rng(0)
    found: dict[str, Any] = {}

    def note(name: str, tensors: Any) -> None:
        found[name] = [tf.cast(t, tf.float64).numpy().ravel().tolist() for t in tensors]

    for dtype in (tf.float32, tf.bfloat16):
        x, dy, z = (tf.cast(rng.standard_normal((3, 5, 8)), dtype) for _ in range(3))
        scale, dscale = (tf.cast(rng.standard_normal(8), dtype) for _ in range(2))
        leaves, directions = [x, scale], [z, dscale]
        name = dtype.name
        note(f"y in {name}", [rms_norm(x, scale), tf.function(rms_norm)(x, scale)])
        note(f"y compiled in {name}", [tf.function(rms_norm, jit_compile=True)(x, scale)])
        note(f"vjp in {name}", rms_norm_vjp(dy, x, scale)[:2])
        for way in (gradients_of, in_a_graph, around_a_graph, by_tf_gradients):
            note(f"{way.__name__} in {name}", way(rms_norm, leaves, dy))
        masked = lambda x, scale: rms_norm(x, scale, mask=z > 0, residual=z)[0]  # noqa: E731, B023
        note(f"mask and residual in {name}", [masked(*leaves), *gradients_of(masked, leaves, dy)])
        note(f"forward mode in {name}", [forward_mode(rms_norm, leaves, directions)])
        note(f"forward mode of a graph in {name}", [forward_mode(tf.function(rms_norm), leaves, directions)])
        inside = tf.function(lambda leaves: forward_mode(rms_norm, leaves, directions))  # noqa: B023
        note(f"forward mode in a graph in {name}", [inside(leaves)])
        note(f"vectorized_map in {name}", [tf.vectorized_map(lambda x: rms_norm(x, scale), x)])  # noqa: B023
        for nesting in NESTINGS:
            note(f"{nesting.__name__} in {name}", nesting(rms_norm, leaves, dy, directions))
    return found


def main(names: list[str]) -> None:
    with without(names):
        from rmsnorm.tf_impl import private, rms_norm, rms_norm_vjp
    if len(names) > 1:
        assert (private._record, private._tangents, private.numbers) == (None,) * 3
        assert private.is_recording() and private._is_in_xla(None)  # noqa: PT018
    print(json.dumps(results(rms_norm, rms_norm_vjp)))


if __name__ == "__main__":
    main(sys.argv[1:])
