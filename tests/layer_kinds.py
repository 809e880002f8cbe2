"""What the tests ask of a layer, so that one test holds for the layers of every framework.

``Layer`` of ``layer_torch`` and ``layer_keras``, and ``Nnx`` and ``Linen`` of ``layer_flax``, fill in what ``Layer``
here leaves open. Options are in the words of ``rms_norm``, and parameters have its names: scale and bias.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from calls import Arguments, Row
from frameworks import measured

from rmsnorm.parity.judge import Outcome
from rmsnorm.targets.bridges import Bridge, bridge

Arrays = Mapping[str, Any]
PARAMETERS = ("scale", "bias")


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def of_rows(transform: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A way to call a function with parts of x and of the residual, which a transform of a function takes from them."""

    def way(function: Any) -> Any:
        def mapped(arrays: Arrays) -> tuple[Any]:
            rows = {name: arrays[name] for name in ("x", "residual") if name in arrays}
            return (transform(lambda parts: function({**arrays, **parts})[0])(rows),)

        return mapped

    return way


class Layer:
    """A layer for x of a shape, as ``own``: NumPy arrays in, NumPy arrays out."""

    KEY: str  # of the framework
    ARRAYS: str  # the framework of its arrays, on which Keras's depend
    VARIANT: str  # the default
    CLASSES: tuple[type, type | None]  # ours and the built-in one
    CALL: str = "__call__"
    ATTRIBUTES: tuple[str, ...] = ()  # what is equal in both
    OTHER_DEFAULTS: frozenset[str] = frozenset()  # their arguments with another default
    ROUNDS_ONCE = True  # the built-in layer, of 16 bits
    HAS_DOUBLE = True  # in the built-in layer, of float64
    BUILT_IN: tuple[dict[str, Any], ...]  # options with which the built-in layer is right
    MORE: tuple[dict[str, Any], ...] = ()  # further options of a layer to copy
    INPUTS: tuple[str, ...] = ("x",)
    LEVELS: ClassVar[dict[str, tuple[str, ...]]] = {}  # of the table of calls, that the layer has in place of all
    WAYS: ClassVar[dict[str, Callable[[Any], Any]]]  # transforms of a function of arrays that leave its results

    def make(self, kind: Any, axis: Any, parameters: str, **options: Any) -> Any:
        """The layer itself, of one of the classes."""
        raise NotImplementedError

    def assign(self, name: str, value: Any) -> None:
        """Writes a parameter, an array of the framework."""
        raise NotImplementedError

    def outputs(self, arrays: Arrays) -> tuple[Any, ...]:
        """y, or y and x + residual, of x, the parameters, mask, residual and gate."""
        raise NotImplementedError

    weights: Any  # the parameters, arrays of the framework
    write: Any  # of a folder: writes the parameters to a file in it, as users of the framework save them
    read: Any
    copies: Any  # others like ``own``, by the ways to them

    @classmethod
    def row(cls, row: Row) -> Row | None:
        """A row of the table of calls as the layer computes it; None where there is no such layer."""
        return row

    def __init__(self, shape: tuple[int, ...], *, built_in: bool = False, **options: Any) -> None:
        self.shape = shape
        self.own = self.make(self.CLASSES[built_in], **{"axis": -1, "parameters": "float32", **options})

    @classmethod
    def precision(cls, wide: bool) -> Any:
        """The context in which the framework knows float64."""
        return bridge(cls.ARRAYS).precision(wide)

    @cached_property
    def between(self) -> Bridge:
        return bridge(self.ARRAYS)

    @property
    def description(self) -> Any:
        """The words in which it describes itself; a copy of NNX has them in another order."""
        return sorted(re.findall(r"[\w.]+", repr(self.own)))

    @property
    def values(self) -> dict[str, Any]:
        return {name: self.between.fetch(value) for name, value in self.weights.items()}

    def filled(self, seed: int = 1, **values: Any) -> Any:
        """The layer, with these values, or random ones."""
        for i, (name, value) in enumerate(self.values.items()):
            new = values.get(name, normal(*value.shape, seed=seed + i)).astype(value.dtype).reshape(value.shape)
            self.assign(name, self.between.send(new))
        return self

    def like(self, own: Any) -> Any:
        """The same kind of layer around another one of the framework."""
        other = object.__new__(type(self))
        other.shape, other.own = self.shape, own
        return other

    def __call__(self, x: Any, **arrays: Any) -> Any:
        """y, or y and x + residual."""
        sent = {name: self.between.send(value) for name, value in {"x": x, **arrays}.items()}
        results = tuple(map(self.between.fetch, self.outputs({**self.weights, **sent})))
        return results if "residual" in arrays else results[0]

    def gradients(self, dy: Any, way: Callable[[Any], Any] = lambda function: function, **arrays: Any) -> Any:
        """y, and a gradient of each floating-point array, through a transform of the layer."""
        sent = {name: self.between.send(value) for name, value in arrays.items()}
        pull = lambda sent, dy: self.between.pull(way(self.outputs), sent, [dy])  # noqa: E731
        compute = self.between.compiled(pull) if self.between.compiles else pull
        results, gradients = compute({**self.weights, **sent}, self.between.send(dy))
        fetched = {name: self.between.fetch(gradient) for name, gradient in gradients.items() if gradient is not None}
        return self.between.fetch(results[0]), fetched

    @classmethod
    def outcome(cls, data: Arguments) -> Outcome:
        """An implementation for the parity kit: automatic differentiation and forward mode of a layer."""
        between = bridge(cls.ARRAYS)

        def step(sent: Any) -> Any:
            def function(tensors: Arrays) -> Any:
                return layer.outputs({**tensors, **mask})

            mask = {"mask": sent["mask"]} if "mask" in sent else {}
            (y, *_), gradients = between.pull(function, sent["inputs"], sent["up"])
            results = {"y": [y], "jvp": [between.push(function, sent["inputs"], sent["along"])]}
            return results | {f"d{name}": [d] for name, d in gradients.items() if d is not None}

        given = [p.dtype.name for p in (data.scale, data.bias) if p is not None]
        with between.precision(data.x.dtype == np.float64):
            layer = cls(
                data.x.shape, variant=data.variant, axis=data.axis, feature_axis=data.feature_axis,
                scale=data.scale is not None, bias=data.bias is not None, dtype=data.out_dtype,
                parameters=given[0] if given else data.x.dtype.name,
            )  # fmt: skip
        return measured(between, data, step, between.compiled if between.compiles else lambda function: function)
