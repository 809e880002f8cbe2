"""The layer of Keras, on the backend that KERAS_BACKEND names, for the tests that hold for every framework's."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import keras
import layer_kinds
from calls import Row
from layer_kinds import of_rows

from rmsnorm.specification import dtypes
from rmsnorm.tf_impl import RMSNormalization

BACKEND = keras.backend.backend()


def _ways() -> dict[str, Any]:
    if BACKEND != "tensorflow":
        return {}
    import tensorflow as tf

    return {
        "tf.function": tf.function,
        "jit_compile": lambda f: tf.function(f, jit_compile=True),
        "tf.recompute_grad": lambda f: (
            lambda arrays: (
                tf.recompute_grad(lambda *values: f(dict(zip(arrays, values, strict=True)))[0])(*arrays.values()),
            )
        ),
        "vectorized_map": of_rows(lambda function: partial(tf.vectorized_map, function)),
    }


class Layer(layer_kinds.Layer):
    KEY = "tf"
    ARRAYS = {"tensorflow": "tf", "jax": "flax"}.get(BACKEND, BACKEND)
    VARIANT = "keras"
    CLASSES = (RMSNormalization, getattr(keras.layers, "RMSNormalization", None))
    OTHER_DEFAULTS = frozenset({"epsilon"})
    CALL, ATTRIBUTES = "call", ("epsilon", "compute_dtype", "variable_dtype")
    BUILT_IN = ({}, {"eps": 1e-3}, {"axis": (-2, -1)}, {"axis": [-1]}, {"parameters": "x"}, {"dtype": "x"})
    HAS_DOUBLE = BACKEND == "tensorflow"  # on PyTorch it computes float64 in 32 bits
    MORE = (
        {
            "axis": (2, 1), "feature_axis": -1, "eps": 0.25, "bias": True, "dtype": "bfloat16", "name": "norm",
            "scale_initializer": keras.initializers.RandomNormal(seed=3), "scale_regularizer": "l2",
            "bias_constraint": "non_neg",
        },
    )  # fmt: skip
    LEVELS: ClassVar = {
        "layout": ("rows", "odd rows", "width 1", "two axes", "middle axis", "channels", "apart", "groups"),
        "gain": ("gain of x", "gain float32", "no gain"), "mask": ("no mask",), "residual": ("no residual",),
    }  # fmt: skip
    WAYS: ClassVar = _ways()

    def make(self, kind: Any, axis: Any, parameters: str, *, dtype: Any = None, **options: Any) -> Any:
        """In the dtype of x, which is that of the parameters or, under a mixed policy, one of 16 bits."""
        if "eps" in options:
            options["epsilon"] = options.pop("eps")
        is_mixed = dtype in dtypes.HALF and dtype != parameters
        layer = kind(axis, dtype=f"mixed_{dtype}" if is_mixed else parameters, **options)
        layer.build(self.shape)
        return layer

    @classmethod
    def row(cls, row: Row) -> Row | None:
        """y has the dtype of x, and the gain that or, of 16 bits, float32."""
        gain = row["gain"] if row["x"] in dtypes.HALF or row["gain"] == "no gain" else "gain of x"
        return {**row, "out": row["x"], "gain": gain}

    @property
    def description(self) -> Any:
        return self.own.get_config()

    @property
    def weights(self) -> dict[str, Any]:
        every = {"scale": self.own.scale, "bias": getattr(self.own, "bias", None)}
        return {name: weight.value for name, weight in every.items() if weight is not None}

    def assign(self, name: str, value: Any) -> None:
        getattr(self.own, name).assign(value)

    def outputs(self, arrays: Any) -> tuple[Any, ...]:
        weights = [arrays[name] for name in self.weights]
        more = {"gate": arrays["gate"]} if "gate" in arrays else {}
        return (self.own.stateless_call(weights, [], arrays["x"], **more)[0],)

    def _model(self) -> Any:
        return keras.Sequential([keras.Input(self.shape[1:]), self.own])

    def write(self, folder: Path) -> None:
        self._model().save_weights(folder / "a.weights.h5")

    def read(self, folder: Path) -> None:
        self._model().load_weights(folder / "a.weights.h5")

    def copies(self) -> dict[str, Any]:
        model = self._model()
        twins = {
            "copy": copy.deepcopy(model), "pickle": pickle.loads(pickle.dumps(model)),
            "clone": keras.models.clone_model(model), "JSON": keras.models.model_from_json(model.to_json()),
        }  # fmt: skip
        for name in ("clone", "JSON"):
            twins[name].set_weights(model.get_weights())
        again = type(self.own).from_config(self.own.get_config())
        again.build(self.shape)
        again.set_weights(self.own.get_weights())
        return {"configuration": again, **{name: twin.layers[-1] for name, twin in twins.items()}}
