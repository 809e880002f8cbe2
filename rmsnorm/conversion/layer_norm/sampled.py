"""A model with a sample of its inputs, as a function of its parameters and norms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rmsnorm.conversion.replacement.backend import Backend
from rmsnorm.conversion.replacement.change import taken_back
from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.targets.bridges import Bridge

Array = npt.NDArray[Any]
Norms = Mapping[str, Norm]  # layers by their names, and what they become
Values = Mapping[str, Array]  # parameters by their places: one that is tied has several


class Sampled:
    """A model, a sample of its arguments, and a copy in float64, in evaluation; each framework fills it in."""

    backend: ClassVar[Backend]  # what the framework knows of its layers
    bridge: Bridge  # its arrays
    tree_map: Callable[..., Any]  # of containers
    is_float: Callable[[Any], bool]  # of arrays
    separator: ClassVar[str] = "/"  # between the name of a layer and that of its parameter
    copy: Any
    values: Values  # the parameters of the copy
    own: Callable[[Any], Norm | None]  # what the framework's own LayerNorm computes, without the mean
    widen: Callable[[], None]  # makes copy and values
    run: Callable[[Mapping[str, Any], Any], list[Any]]  # all arrays that the copy returns with these parameters
    outputs: Callable[[Any], list[Array]]  # of a model with the dtypes of the original, in evaluation, on the sample
    become: Callable[[Any, Norm], None]  # turns a LayerNorm into an RMSNorm, in place
    # A copy of the model in its own dtypes with these parameters and norms, and notes.
    changed: Callable[[Values, Norms], tuple[Any, list[str]]]

    def __init__(self, model: Any, inputs: Any, options: Any) -> None:
        self.model, self.sample = model, (inputs, options)

    def layers(self, model: Any) -> Iterable[tuple[str, Any]]:
        return self.backend.modules(model)

    def like(self, array: Array, x: Any) -> Any:
        """The framework's array, where x is."""
        return self.bridge.send(array)

    def mapped(self, function: Callable[[Array], Array], tree: Any) -> Any:
        """Containers with the function of every floating-point array in float64."""

        def wide(x: Any) -> Any:
            is_float = self.is_float(x)
            return self.like(function(self.bridge.fetch(x).astype(np.float64)), x) if is_float else x

        return self.tree_map(wide, tree)

    def wide(self, values: Values, norms: Norms, sample: Any) -> list[Array]:
        """The outputs of the copy with these parameters and norms."""
        with self._with(norms):
            return [self.bridge.fetch(y) for y in self.run(self._sent(values), sample)]

    def gradients(self, values: Values, norms: Norms, sample: Any, weights: Sequence[Array]) -> dict[str, Array | None]:
        """Of the sum of the copy's floating-point outputs with these weights."""

        def floating(tensors: Mapping[str, Any]) -> list[Any]:
            return [y for y in self.run(tensors, sample) if self.bridge.is_floating(y)]

        with self._with(norms):
            _, pulled = self.bridge.pull(floating, self._sent(values), [self.bridge.send(w) for w in weights])
        return {name: None if g is None else self.bridge.fetch(g) for name, g in pulled.items()}

    def _sent(self, values: Values) -> dict[str, Any]:
        return {name: self.bridge.send(np.asarray(value, np.float64)) for name, value in values.items()}

    @contextlib.contextmanager
    def _with(self, norms: Norms) -> Iterator[None]:
        layers = dict(self.layers(self.copy))
        with taken_back([layers[name] for name in norms]):
            for name, norm in norms.items():
                self.become(layers[name], norm)
            yield
