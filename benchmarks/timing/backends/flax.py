"""JAX, with the layers of Flax or those of Keras: eagerly and in jax.jit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
from jax import numpy as jnp

from rmsnorm.specification.variants import PRESETS, Variant
from rmsnorm.targets.bridges import bridge
from timing.backends import keras
from timing.candidates import (
    BUILTIN,
    COPY,
    COPY_INTO,
    LAYER_NORM,
    OURS,
    Call,
    Candidate,
    Workbench,
)  # fmt: skip
from timing.machine import processor
from timing.problem import Problem

Layers = dict[str, tuple[Any, Any, Any, Variant | None]]  # by kind: layer, function of state and x, state, variant


def load(device: str) -> Workbench:
    if find_spec("flax") is None:
        return _workbench(device, f"{jax.__version__}, the function, as flax is not installed", _function)

    import flax
    from flax import nnx

    from rmsnorm.flax_impl import RMSNorm

    def layers(problem: Problem, variant: Variant) -> Layers:
        width, dtype = problem.x.shape[-1], problem.dtype
        options: Any = {"param_dtype": dtype, "rngs": nnx.Rngs(0)}
        made: Any = {
            OURS: (RMSNorm(width, **options, variant=variant, use_bias=False), variant),
            BUILTIN: (nnx.RMSNorm(width, **options), PRESETS["flax"]),
            LAYER_NORM: (nnx.LayerNorm(width, **options), None),
        }

        def function(graph: Any) -> Any:
            return lambda state, x: nnx.merge(graph, state)(x)

        split: Layers = {}
        for kind, (layer, expected) in made.items():
            layer.scale[...] = problem.scale
            graph, state = nnx.split(layer)
            split[kind] = layer, function(graph), state, expected
        return split

    return _workbench(device, f"{jax.__version__}, Flax {flax.__version__}", layers)


def _function(problem: Problem, variant: Variant) -> Layers:
    """The function alone, which needs no layers."""
    from rmsnorm.flax_impl import rms_norm

    def forward(scale: Any, x: Any) -> Any:
        return rms_norm(x, scale, variant=variant)

    scale = jnp.asarray(problem.scale)
    return {OURS: (partial(forward, scale), forward, scale, variant)}


def load_keras(device: str) -> Workbench:
    version = keras.start("jax")

    def layers(problem: Problem, variant: Variant) -> Layers:
        def function(layer: Any) -> Any:
            return lambda state, x: layer.stateless_call(state, [], x)[0]

        made = keras.layers(problem, variant).items()
        return {
            kind: (layer, function(layer), [variable.value for variable in layer.trainable_variables], expected)
            for kind, (layer, expected) in made
        }

    return _workbench(device, f"{jax.__version__}, {version}", layers)


def _workbench(device: str, version: str, layers: Callable[[Problem, Variant], Layers]) -> Workbench:
    between = bridge("flax", device)
    target = jax.devices("gpu" if device == "cuda" else "cpu")[0]

    def waited(function: Any, *arguments: Any) -> Call:
        return lambda: jax.block_until_ready(function(*arguments))

    def candidates(problem: Problem, op: str, variant: Variant) -> list[Candidate]:
        x, dy = map(between.send, (problem.x, problem.dy))

        def pair(kind: str, layer: Any, forward: Any, state: Any, expected: Variant | None) -> list[Candidate]:

            def both(state: Any, x: Any, dy: Any) -> Any:
                y, pull = jax.vjp(forward, state, x)
                dstate, dx = pull(dy)
                return (y, dx, *jax.tree.leaves(dstate))

            run: Any = (lambda state, x, dy: (forward(state, x),)) if op == "fwd" else both
            eager: Any = (lambda state, x, dy: (layer(x),)) if op == "fwd" else both
            jitted = jax.jit(run)

            return [
                Candidate(kind, waited(eager, state, x, dy), "", expected),
                Candidate(kind, waited(jitted, state, x, dy), "jit", expected),
            ]

        def write(x: Any, dy: Any) -> Any:
            return jnp.copy(x) if op == "fwd" else (jnp.copy(x), x + dy)

        into = jax.jit(lambda x, dy, old: write(x, dy), donate_argnums=2, keep_unused=True)
        buffer = [jax.block_until_ready(jax.jit(write)(x, dy))]

        def overwrite() -> None:
            buffer[0] = jax.block_until_ready(into(x, dy, buffer[0]))

        with jax.default_device(target):
            made = layers(problem, variant).items()
        return [
            *(candidate for kind, parts in made for candidate in pair(kind, *parts)),
            Candidate(COPY, waited(jax.jit(write), x, dy)),
            Candidate(COPY_INTO, overwrite),
        ]

    return Workbench(version, target.device_kind if device == "cuda" else processor(), candidates)
