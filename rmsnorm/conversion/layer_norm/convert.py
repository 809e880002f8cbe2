"""Converts a model of any framework: the steps, and what each framework must know how to do."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np

from rmsnorm.accuracy.bounds import CONVERSION, CONVERSION_OF_FLOAT32
from rmsnorm.conversion.layer_norm.recognition import layer_norm
from rmsnorm.conversion.layer_norm.result import Conversion, Layer, difference, first_names, require_exact
from rmsnorm.conversion.layer_norm.streams import (
    Array,
    Axes,
    Shift,
    axes_of,
    by_halves,
    centred,
    drawn,
    is_centred,
    moves,
    shifts_of,
)  # fmt: skip
from rmsnorm.conversion.replacement.backend import Backend
from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.conversion.replacement.proof import first_parameter
from rmsnorm.identify import Target
from rmsnorm.specification import errors
from rmsnorm.targets.bridges import Bridge

_COPIES = 6  # of all parameters, which the search holds at once in its dtype


@dataclass
class Seen:
    """What the norms and the dropouts of a model read in a run.

    Attributes:
        means: of each one the greatest mean, relative to the root mean square of its row.
        sizes: how many elements each norm normalises.
        more: norms that were called with more than x.
    """

    means: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    more: set[str] = field(default_factory=set)

    def note(self, name: str, size: int, mean: Any, square: Any) -> None:
        """Of a call: the mean of each row, and the mean of its squares."""
        with np.errstate(all="ignore"):
            ratio = np.abs(np.asarray(mean)) / np.sqrt(np.asarray(square))
        self.sizes[name] = size
        self.means[name] = max(self.means.get(name, 0.0), float(np.nan_to_num(ratio).max(initial=0.0)))


class Study(ABC):
    """A wide copy of a model in evaluation, as a function of the arrays in the places of its parameters.

    Attributes:
        bridge: to the framework.
        values: each parameter in NumPy, by the name of its place; one that is tied has several places.
        seen: what the last run showed.
        rms: the norms that are RMSNorm in a run.
        operations: the framework's functions of arrays, with NumPy's names.
        separator: between the name of a layer and that of its parameter.
    """

    bridge: Bridge
    values: dict[str, Array]
    operations: ClassVar[Any]
    separator: ClassVar[str] = "/"

    def __init__(self) -> None:
        self.seen, self.rms = Seen(), frozenset[str]()

    @abstractmethod
    def sent(self, name: str, value: Array) -> Any:
        """The framework's array for the place of a parameter."""

    @abstractmethod
    def run(self, tensors: Mapping[str, Any]) -> list[Any]:
        """All outputs that are arrays, in the framework."""

    @abstractmethod
    def total(self, outputs: Sequence[Any], weights: Sequence[Array | None]) -> Any:
        """The sum of the products of outputs and weights, without the outputs that have none."""

    def moments(self, x: Any, axes: Axes) -> tuple[Any, Any]:
        """The means of x and of its squares."""
        mean = partial(self.operations.mean, axis=axes, keepdims=True)
        return mean(x), mean(self.operations.square(x))

    def normed(self, norm: Norm, x: Any, subtracted: Any, scale: Any, bias: Any) -> Any:
        """y of a LayerNorm; of RMSNorm where ``subtracted``, the mean, is 0."""
        c, gained = x - subtracted, {axis % len(x.shape) for axis in norm.gain_axes}
        _, square = self.moments(c, norm.axes)
        shape = [size if axis in gained else 1 for axis, size in enumerate(x.shape)]
        y = c / self.operations.sqrt(square + norm.known.eps_for("float64"))
        if scale is not None:
            y = y * (self.operations.reshape(scale, shape) + norm.known.scale_offset)
        return y if bias is None else y + self.operations.reshape(bias, shape)

    def observed(self, values: Mapping[str, Array], rms: Collection[str] = ()) -> tuple[list[Array], Seen]:
        """The outputs, with these norms as RMSNorm, and what the norms read."""
        self.seen, self.rms = Seen(), frozenset(rms)
        outputs = [self.bridge.fetch(y) for y in self.run({name: self.sent(name, v) for name, v in values.items()})]
        return outputs, self.seen

    def gradients(
        self, values: Mapping[str, Array], weights: Sequence[Array | None], rms: Collection[str] = ()
    ) -> dict[str, Array | None]:
        """The gradients of a linear functional of the outputs, by one backward pass."""
        self.seen, self.rms = Seen(), frozenset(rms)
        tensors = {name: self.sent(name, value) for name, value in values.items()}
        one = [self.sent("", np.ones((), next(iter(values.values())).dtype))]
        _, pulled = self.bridge.pull(lambda some: [self.total(self.run(some), weights)], tensors, one)
        return {name: None if g is None else self.bridge.fetch(g) for name, g in pulled.items()}


class Model(ABC):
    """A model with its sample inputs: what a framework does in its own way.

    Attributes:
        backend: what the framework knows of its layers.
        dtype: of the wide copies.
        bound: of what is 0, or the same, in that dtype.
    """

    backend: ClassVar[Backend]

    def __init__(self, model: Any, inputs: Any, options: Any) -> None:
        self.model, self.inputs, self.options = model, inputs, options
        self.dtype, self.bound = "float64", CONVERSION

    def narrow(self) -> None:
        """Computes in float32 what float64 has no room for."""
        self.dtype, self.bound = "float32", CONVERSION_OF_FLOAT32

    @abstractmethod
    def layers(self) -> Iterable[tuple[str, Any]]:
        """All layers by their names."""

    @abstractmethod
    def own(self, layer: Any) -> Norm | str | None:
        """What the framework's own LayerNorm computes, without the mean, or why it stays; None for other classes."""

    @abstractmethod
    def opened(self, layer: Any) -> Target:
        """The target of a copy of a layer."""

    @abstractmethod
    def elements(self) -> int:
        """How many elements its floating-point parameters have."""

    @abstractmethod
    def study(self, norms: Mapping[str, Norm]) -> Study:
        """The model with parameters that can be chosen, and norms that show what they read."""

    @abstractmethod
    def changed(
        self, centre: Mapping[str, Sequence[Axes]], norms: Mapping[str, Norm], *, wide: bool
    ) -> tuple[Any, list[str]]:
        """A copy of the model, in the wide dtype or its own, whose parameters are centred and whose norms are RMSNorm;
        and notes."""

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
    norms, left = _norms(model)
    if 8 * _COPIES * model.elements() > _memory():
        model.narrow()
    with model.wide():
        chosen, selected = _search(model, norms, left)
    layers = tuple(_layers(model, norms, left))
    if not selected:
        return Conversion(
            model.changed({}, {}, wide=False)[0], layers, (), (), None, None, model.dtype, chosen.unreached
        )
    centre: dict[str, list[Axes]] = defaultdict(list)
    for name, axes in chosen.shifts:
        centre[name].append(axes)
    result, notes = model.changed(centre, selected, wide=False)
    error = difference(*(model.outputs(entry, wide=False) for entry in (model.model, result)))
    with model.wide():
        pair = [model.outputs(model.changed(*edit, wide=True)[0], wide=True) for edit in (({}, {}), (centre, selected))]
    exact = require_exact(difference(*pair), model.bound)
    notes += chosen.notes
    return Conversion(result, layers, tuple(sorted(centre)), tuple(notes), exact, error, model.dtype, chosen.unreached)


def _norms(model: Model) -> tuple[dict[str, Norm], dict[str, str]]:
    """The layers that compute LayerNorm, by name; and why others, which are called so, are none."""
    known: dict[Any, Norm | str | None] = {}
    norms, left = {}, {}
    for name, layer in model.layers():
        answer: Norm | str | None = model.own(layer)
        if answer is None and model.backend.may_be_layer_norm(layer):
            key = model.backend.key_of(layer)
            if key not in known:
                known[key] = _asked(model, layer)
            answer = known[key]
        names = [kind.__name__.lower() for kind in type(layer).__mro__]
        if isinstance(answer, Norm):
            norms[name] = answer
        elif answer is not None or (any("layernorm" in n for n in names) and not model.backend.has_inner(layer)):
            left[name] = answer or "it does not compute LayerNorm over the last axis"
    return norms, left


def _asked(model: Model, layer: Any) -> Norm | str | None:
    try:
        target, x = model.opened(layer), first_parameter(getattr(layer, model.backend.call))
    except Exception as error:  # of the layer's class, which may refuse to be copied or opened in any way
        return f"it cannot be asked what it computes ({type(error).__name__}: {error})"
    return layer_norm(target, x)


@dataclass
class _Choice:
    """What to do with the parameters: those to centre, those that the sample does not reach, and notes."""

    shifts: list[Shift]
    unreached: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)


def _search(model: Model, norms: Mapping[str, Norm], left: dict[str, str]) -> tuple[_Choice, dict[str, Norm]]:
    """The parameters to centre, and the norms that are RMSNorm then; adds to ``left`` why the others are not."""
    if not norms:
        return _Choice([]), {}
    study, bound = model.study(norms), model.bound
    start = _drawn(study, norms)
    before, seen = study.observed(start)
    left |= dict.fromkeys(seen.more, "it is called with more than x")
    left |= {name: "the sample inputs do not reach it" for name in norms if name not in seen.sizes.keys() | left.keys()}
    left |= {name: "it normalises a single feature" for name, size in seen.sizes.items() if name in norms and size == 1}
    random = np.random.default_rng(0)
    weights = [_weights(random, y) for y in before]
    gradients = study.gradients(start, weights)
    if difference(before, study.observed(start)[0]) > bound:
        raise _not_repeatable()
    sizes = {size for name, size in seen.sizes.items() if name in norms and size > 1}
    silent = [name for name, g in gradients.items() if g is None or not g.any()]

    def idle(some: Sequence[str]) -> bool:
        """Whether no output changes with these parameters, which may also be behind a stopped gradient."""
        return difference(before, study.observed({**start, **{name: start[name] * 2 for name in some}})[0]) <= bound

    unreached = tuple(by_halves(silent, idle))
    hidden = [(name, axes) for name in silent if name not in unreached for axes in axes_of(start[name].shape, sizes)]

    def outputs_of(some: Sequence[Shift], rms: Collection[str] = ()) -> tuple[float, Seen]:
        after, now = study.observed(_centred(start, some), rms)
        return difference(before, after), now

    def fit(some: Sequence[Shift]) -> bool:
        """Whether no output changes, also behind a stopped gradient or a decision."""
        return all(difference(before, study.observed(_centred(start, some, mean))[0]) <= bound for mean in (3.0, 0.0))

    shifts = by_halves([*shifts_of(gradients, sizes, bound), *hidden], fit)
    _, now = outputs_of(shifts)
    selected = {name: norm for name, norm in norms.items() if name not in left and now.means[name] <= bound}
    for name in norms.keys() - selected.keys() - left.keys():
        left[name] = (
            f"what it reads keeps a mean of {now.means[name]:.1g} of its root mean square, "
            "which is in no weight, or in one that others see"
        )
    if not selected:
        return _Choice([], unreached), {}
    # The mean of a parameter must go if an RMSNorm sees it.
    of_rms = study.gradients(start, weights, selected)
    needed = [(name, axes) for name, axes in shifts if name in silent or moves(of_rms[name], axes, bound)]
    if not outputs_of(needed, selected)[0] <= bound:  # something is seen behind a gradient that is stopped
        needed = shifts
        require_exact(outputs_of(needed, selected)[0], bound)
    others = [name for name in now.means if name not in norms]
    dropouts = [name for name in others if now.means[name] <= bound < seen.means[name]]
    words = "its output is not centred; the models agree only in evaluation"
    return _Choice(needed, unreached, [f"dropout in {first_names(dropouts)}: {words}"] if dropouts else []), selected


def _drawn(study: Study, norms: Mapping[str, Norm]) -> dict[str, Array]:
    """Random parameters. A gain of equal elements stays one number, and a bias without a mean stays without one."""
    gains = {f"{name}{study.separator}{norm.scale}".lstrip(study.separator) for name, norm in norms.items()}
    biases = {f"{name}{study.separator}{norm.bias}".lstrip(study.separator) for name, norm in norms.items()}
    return {
        name: drawn(
            name, value,
            scalar=name in gains and bool((value == value.flat[0]).all()),
            centred=name in biases and is_centred(value),
        )
        for name, value in study.values.items()
    }  # fmt: skip


def _weights(random: np.random.Generator, y: Array) -> Array | None:
    """Random weights of an output, by which it is added; none where it is not finite."""
    if y.dtype.kind not in "fcV":
        return None
    finite = np.isfinite(y)
    size = np.abs(y[finite]).max(initial=0.0) or 1.0
    return np.where(finite, random.normal(size=y.shape) / size, 0.0)


def _centred(values: Mapping[str, Array], shifts: Iterable[Shift], mean: float = 0.0) -> dict[str, Array]:
    """With this mean along the axes, of the size of the parameter, in place of its own."""
    result = dict(values)
    for name, axes in shifts:
        result[name] = centred(result[name], [axes]) + mean * np.abs(result[name]).mean().astype(result[name].dtype)
    return result


def rounded(names: Mapping[Any, Iterable[str]]) -> list[str]:
    """A note for each dtype of 16 bits in which parameters with these names are rounded again."""
    return [f"{first_names(sorted(some))}: rounded to {dtype} once more" for dtype, some in names.items()]


def _layers(model: Model, norms: Mapping[str, Norm], left: Mapping[str, str]) -> Iterator[Layer]:
    for name, layer in model.layers():
        if name in left:
            yield Layer(name, type(layer).__name__, False, left[name])
        elif name in norms:
            yield Layer(name, type(layer).__name__, True, f"eps {norms[name].known.eps}")


def _memory() -> int:
    """Free bytes of memory; plenty where the system does not say it."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 2**62


def _not_repeatable() -> errors.InputValueError:
    return errors.InputValueError(
        "to_rms_norm: two runs on the same inputs differ, expected equal outputs; the model is random in evaluation"
    )
