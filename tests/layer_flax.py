"""The layers of Flax, NNX's and Linen's, for the tests that hold for every framework's."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from pathlib import Path
from typing import Any, ClassVar

import flax.linen
import jax
import layer_kinds
import pytest
from flax import nnx
from jax import numpy as jnp
from layer_kinds import PARAMETERS, of_rows

from rmsnorm.flax_impl import RMSNorm, linen

NAMES = {"eps": "epsilon", "axis": "reduction_axes", "feature_axis": "feature_axes", "parameters": "param_dtype",
         "scale": "use_scale", "bias": "use_bias"}  # fmt: skip


class _Layer(layer_kinds.Layer):
    """What NNX and Linen share."""

    KEY = ARRAYS = VARIANT = "flax"
    OTHER_DEFAULTS = frozenset({"epsilon", "scale_init"})
    BUILT_IN = (
        {}, {"axis": (-2, -1), "feature_axis": -1}, {"axis": 1, "feature_axis": -1}, {"scale": False},
        {"dtype": "bfloat16"}, {"parameters": "bfloat16"}, {"use_fast_variance": False},
    )  # fmt: skip
    INPUTS = ("x", "mask")
    WAYS: ClassVar = {
        "jit": jax.jit,
        "checkpoint": jax.checkpoint,
        "vmap": of_rows(jax.vmap),
        "scan": of_rows(lambda function: lambda x: jax.lax.scan(lambda none, row: (none, function(row)), 0, x)[1]),
        "map": of_rows(lambda function: functools.partial(jax.lax.map, function, batch_size=2)),
    }

    def named(self, axis: Any, feature_axis: Any = None, dtype: Any = None, **options: Any) -> dict[str, Any]:
        """The arguments in Flax's words."""
        options |= {"axis": axis, "feature_axis": axis if feature_axis is None else feature_axis, "dtype": dtype}
        return {NAMES.get(name, name): value for name, value in options.items()}


class Nnx(_Layer):
    CLASSES = (RMSNorm, nnx.RMSNorm)
    ATTRIBUTES = ("epsilon", "dtype", "param_dtype", "reduction_axes", "feature_axes")

    def make(self, kind: Any, axis: Any, parameters: str, **options: Any) -> Any:
        options = self.named(axis, parameters=parameters, **options)
        axes = options["feature_axes"] if isinstance(options["feature_axes"], tuple) else (options["feature_axes"],)
        return kind(math.prod(self.shape[axis] for axis in axes), rngs=nnx.Rngs(0), **options)

    @property
    def weights(self) -> dict[str, Any]:
        every = {name: getattr(self.own, name, None) for name in PARAMETERS}
        return {name: weight[...] for name, weight in every.items() if weight is not None}

    def assign(self, name: str, value: Any) -> None:
        getattr(self.own, name)[...] = value

    def outputs(self, arrays: Any) -> tuple[Any, ...]:
        graph, state = nnx.split(self.own)
        for name, weight in state.items():
            state[name] = weight.replace(arrays[name].reshape(weight.shape))
        more = {name: arrays[name] for name in ("residual", "gate") if name in arrays}
        result = nnx.merge(graph, state)(arrays["x"], arrays.get("mask"), **more)
        return result if isinstance(result, tuple) else (result,)

    def write(self, folder: Path) -> None:
        with pytest.importorskip("orbax.checkpoint").StandardCheckpointer() as saver:
            saver.save(folder / "state", nnx.state(self.own), force=True)

    def read(self, folder: Path) -> None:
        blank = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), nnx.state(self.own))
        with pytest.importorskip("orbax.checkpoint").StandardCheckpointer() as saver:
            nnx.update(self.own, saver.restore(folder / "state", blank))

    def copies(self) -> dict[str, Any]:
        twins = copy.deepcopy(self.own), pickle.loads(pickle.dumps(self.own)), nnx.clone(self.own)
        return dict(zip(("copy", "pickle", "clone"), twins, strict=True))


class Linen(_Layer):
    CLASSES = (linen.RMSNorm, flax.linen.RMSNorm)

    def make(self, kind: Any, axis: Any, parameters: str, **options: Any) -> Any:
        module = kind(**self.named(axis, parameters=parameters, **options))
        return module, dict(module.init(jax.random.key(0), jnp.ones(self.shape)).get("params", {}))

    @property
    def weights(self) -> dict[str, Any]:
        return self.own[1]

    def assign(self, name: str, value: Any) -> None:
        self.own[1][name] = value

    def outputs(self, arrays: Any) -> tuple[Any, ...]:
        module, params = self.own
        params = {name: arrays[name].reshape(value.shape) for name, value in params.items()}
        more = {name: arrays[name] for name in ("mask", "residual", "gate") if name in arrays}
        result = module.apply({"params": params}, arrays["x"], **more)
        return result if isinstance(result, tuple) else (result,)

    def write(self, folder: Path) -> None:
        (folder / "state").write_bytes(flax.serialization.to_bytes(self.own[1]))

    def read(self, folder: Path) -> None:
        self.own[1].update(flax.serialization.from_bytes(self.own[1], (folder / "state").read_bytes()))

    def copies(self) -> dict[str, Any]:
        module, params = self.own
        twins = {"pickle": pickle.loads(pickle.dumps(module)), "clone": module.clone(), "copy": copy.deepcopy(module)}
        assert all(hash(twin) == hash(module) and twin == module for twin in twins.values())
        return {name: (twin, dict(params)) for name, twin in twins.items()}
