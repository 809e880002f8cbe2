"""Converts a model of any framework: the steps, what a graph records, and what each framework must know how to do."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from rmsnorm.accuracy.bounds import CONVERSION
from rmsnorm.conversion.layer_norm.behaviour import recognise
from rmsnorm.conversion.layer_norm.result import Conversion, Layer, difference, first_names, require_exact
from rmsnorm.conversion.layer_norm.streams import Axes, LayerNorm, Node, Plan, Value, make_plan
from rmsnorm.conversion.replacement.backend import Backend
from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.conversion.replacement.proof import first_parameter
from rmsnorm.identify import Target

Norms = Mapping[str, Norm]  # the LayerNorms of other classes than the framework's, by the names of their layers


class Trace:
    """The graph of a run in evaluation mode on the sample inputs; a framework's subclass fills it.

    Attributes:
        nodes: every operation.
        obstacles: the LayerNorms that stay whatever they read, with the reason.
        dropouts: the name of each dropout that was active in training, and what it read.
        coarse: the dtype of each parameter of fewer than 32 bits.
        fetched: makes an array of the framework one of NumPy.
    """

    fetched: ClassVar[Any]

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.obstacles: dict[str, str] = {}
        self.dropouts: list[tuple[str, Value]] = []
        self.coarse: dict[str, str] = {}
        self._values: dict[int, Value] = {}
        self._alive: list[Any] = []  # keeps the arrays, so that no id is used again

    def notes(self, plan: Plan) -> Iterator[str]:
        """What a plan changes beside its LayerNorms, in sentences."""
        for dtype in dict.fromkeys(self.coarse.values()):
            names = [name for name in plan.centred if self.coarse.get(name) == dtype]
            if names:
                yield f"{first_names(sorted(names))}: rounded to {dtype} once more"
        names = [name for name, value in self.dropouts if value in plan.values]
        if names:
            yield f"dropout in {first_names(names)}: its output is not centred; the models agree only in evaluation"

    def _norm(
        self, layer: str, axes: Iterable[int], shape: Sequence[int], gain: Any, bias: Any, value: Value | None
    ) -> LayerNorm:
        """A LayerNorm of the graph.

        Args:
            layer: its name.
            axes: the normalised axes of x, which has this shape.
            gain, bias: arrays of the framework, None where it has none.
            value: the bias in the graph.
        """
        gain, bias = (None if array is None else self.fetched(array) for array in (gain, bias))
        normalised: Axes = frozenset(axis % len(shape) for axis in axes if shape[axis] > 1)
        constant = gain is None or bool((gain == gain.flat[0]).all())
        return LayerNorm(layer, normalised, constant, value, bias is None or float(bias.astype(np.float64).mean()) == 0)

    def _enter(self, array: Any, value: Value) -> None:
        self._alive.append(array)
        self._values[id(array)] = value

    def _value(self, array: Any) -> Value:
        if id(array) not in self._values:
            self._enter(array, Value(tuple(array.shape), "a constant", obstacle="is no parameter"))
        return self._values[id(array)]


class Model(ABC):
    """A model with its sample inputs: what a framework does in its own way.

    Attributes:
        backend: what the framework knows of its layers.
        eps: what the framework's LayerNorm calls its eps.
        bound: the largest difference of outputs in wide arithmetic.
    """

    backend: ClassVar[Backend]
    eps: ClassVar[str] = "epsilon"
    bound: float = CONVERSION

    def __init__(self, model: Any, inputs: Any, options: Any) -> None:
        self.model, self.inputs, self.options = model, inputs, options

    @abstractmethod
    def layers(self) -> Iterable[tuple[str, Any]]:
        """All layers by their names."""

    def may_be_layer_norm(self, layer: Any) -> bool:
        """Whether a layer may be a LayerNorm of another class than the framework's."""
        return self.backend.may_be_layer_norm(layer)

    @abstractmethod
    def opened(self, layer: Any) -> Target:
        """The target of a copy of a layer."""

    @abstractmethod
    def trace(self, recognised: Norms) -> Trace:
        """The graph, in which each of these layers is one operation."""

    @abstractmethod
    def changed(self, plan: Plan | None, recognised: Norms, *, wide: bool) -> tuple[Any, list[str]]:
        """A copy of the model after a plan, in wide arithmetic or its own, and notes; without a plan as it is."""

    @abstractmethod
    def outputs(self, model: Any, *, wide: bool) -> list[np.ndarray]:
        """Of a model in evaluation, on the sample inputs."""

    def wide(self) -> contextlib.AbstractContextManager[Any]:
        """Within which the framework has wide arithmetic."""
        return contextlib.nullcontext()


def convert(model: Model) -> Conversion:
    """Copies a model and replaces every LayerNorm by RMSNorm where that is exact.

    Raises:
        ValueError: the outputs differ by more than rounding.
    """

    def opened(layer: Any) -> tuple[Target, str]:
        return model.opened(layer), first_parameter(getattr(layer, model.backend.call))

    candidates = [(name, layer) for name, layer in model.layers() if model.may_be_layer_norm(layer)]
    recognised, left = recognise(candidates, model.backend.key_of, opened)
    trace = model.trace(recognised)
    plan = make_plan(trace.nodes, {**trace.obstacles, **left})
    layers = tuple(_layers(model, plan, recognised))
    result, notes = model.changed(plan, recognised, wide=False)
    if not plan.converted:
        return Conversion(result, layers, (), (), 0.0, 0.0)
    error = difference(*(model.outputs(entry, wide=False) for entry in (model.model, result)))
    with model.wide():
        before, after = (
            model.outputs(model.changed(edit, recognised, wide=True)[0], wide=True) for edit in (None, plan)
        )
    exact = require_exact(difference(before, after), model.bound)
    return Conversion(result, layers, tuple(sorted(plan.centred)), (*notes, *trace.notes(plan)), exact, error)


def _layers(model: Model, plan: Plan, recognised: Norms) -> Iterator[Layer]:
    for name, layer in model.layers():
        if name in plan.converted:
            weights = first_names(sorted(plan.converted[name]))
            eps = recognised[name].known.eps if name in recognised else getattr(layer, model.eps)
            yield Layer(name, type(layer).__name__, True, f"eps {eps}, centred {weights or 'nothing'}")
        elif name in plan.left:
            yield Layer(name, type(layer).__name__, False, plan.left[name])
