"""Finds the parameters that must be centred, and the LayerNorms that are RMSNorm then: no graph of the model is read.

P = I - 11'/n subtracts the mean over n features. LayerNorm(v) = LayerNorm(P v) = RMSNorm(P v), with the same gain, bias
and eps. So v may be P v if what makes it is linear in a weight or in other such values, and if only LayerNorms read it,
or operations that pass the mean on to such values. These are centred together or not at all:

    P (x W + b) = x (W P) + P b,    P (v + c) = P v + P c,    P (v s) = (P v) s for a factor s that all features share

A LayerNorm with unequal gains writes a mean that no weight can remove; with equal gains that is the mean of its bias.

One property of the whole function decides all of this. Shifting a parameter along an axis by the same number changes no
output, whatever the parameters are, if and only if the sum of the outputs' gradient along that axis is 0. At random
parameters, for a random linear functional of all outputs, a sum that is 0 by accident is improbable. So one backward
pass finds every parameter that can be centred, and all of them can be centred together. Then a norm is RMSNorm if no
output changes when its mean is not subtracted. The random parameters keep what the norms rely on: a gain whose elements
are equal stays one number, and a bias without a mean has none.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from types import MappingProxyType
from typing import Any

import numpy as np

from rmsnorm.accuracy.bounds import CONVERSION
from rmsnorm.conversion.layer_norm.recognition import norms_of
from rmsnorm.conversion.layer_norm.sampled import Array, Norms, Sampled, Values
from rmsnorm.conversion.replacement.report import Replacement
from rmsnorm.specification import errors

Axes = tuple[int, ...]
Shift = tuple[str, Axes]  # a parameter, and the axes along which the same number is added
_DONE = "what it reads has no mean"
_SEEN = "what it reads keeps a mean, which is in no weight, or in one that others see"
_UNSEEN = "the sample inputs do not reach it, or it is called with more than x"
_DIFFERS = (
    f"to_rms_norm: the outputs differ in float64 by more than {CONVERSION:.0e}, expected rounding alone; "
    "the model holds a weight that is no parameter of a module, or it is random in evaluation"
)


@dataclass(frozen=True)
class Conversion:
    """A model with RMSNorm in place of LayerNorm, and what was changed.

    Attributes:
        model: the new model. It shares nothing with the old one and computes the same in evaluation mode.
        layers: one entry for every LayerNorm: its variant, which is None if it stays, and why.
        centred: names of the weights from which their mean over the features was subtracted.
        notes: sentences about everything else that differs.
        exact: greatest difference of an output on the sample inputs in float64, relative to the element or to the
            median of its array where that is more; None where no LayerNorm was replaced and nothing was compared.
        error: the same in the model's own dtypes, to which the centred weights were rounded once more.
        unreached: names of the parameters on which no output of the sample depends. They stay as they are, so a branch
            that the sample does not take, as a rare expert, may differ where other inputs take it.
    """

    model: Any
    layers: tuple[Replacement, ...]
    centred: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    exact: float | None = None
    error: float | None = None
    unreached: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [*map(str, self.layers), *self.notes]
        if self.centred:
            lines.append(f"centred {first_names(self.centred)}")
        if self.unreached:
            lines.append(f"{first_names(self.unreached)}: not reached by the sample, so not changed")
        last = "nothing was replaced, and so no outputs were compared"
        if self.exact is not None:
            last = f"outputs differ by {self.error:.1e}, in float64 by {self.exact:.1e}"
        return "\n".join([*lines, last])


def convert(model: Sampled) -> Conversion:
    """Copies a model and replaces every LayerNorm by RMSNorm where that is exact.

    Raises:
        ValueError: the outputs are random, or they differ by more than rounding.
    """
    norms, left = norms_of(model)
    shifts: list[Shift] = []
    unreached: list[str] = []
    with model.bridge.scope(True):
        if norms:
            model.widen()
            shifts, unreached = _search(model, norms, left)
    rms = {name: norm for name, norm in norms.items() if name not in left}
    layers = dict(model.layers(model.model))
    report = tuple(
        Replacement(name, type(layer).__name__, rms[name].variant if name in rms else None, left.get(name, _DONE))
        for name, layer in layers.items() if name in rms or name in left
    )  # fmt: skip
    centred = moved(model.values, shifts) if shifts else {}
    centred = {name: centred[name] for name, _ in shifts}
    result, notes = model.changed(centred, rms)
    if not rms:
        return Conversion(result, report, unreached=tuple(unreached))
    with model.bridge.scope(True):
        sample = model.mapped(lambda x: x, model.sample)
        after = model.wide({**model.values, **centred}, rms, sample)
        exact = difference(model.wide(model.values, {}, sample), after)
    if not exact <= CONVERSION:
        raise errors.InputValueError(_DIFFERS)
    if dropouts := [name for name, layer in layers.items() if _drops(layer)]:
        notes.append(f"dropout in {first_names(dropouts)}: in a stream it lets the models agree only in evaluation")
    error = difference(model.outputs(model.model), model.outputs(result))
    return Conversion(result, report, tuple(sorted(centred)), tuple(notes), exact, error, tuple(unreached))


def _search(model: Sampled, norms: Norms, left: dict[str, str]) -> tuple[list[Shift], list[str]]:
    """What to centre, and the parameters that the sample does not reach; adds to ``left`` why norms stay LayerNorm."""
    start, sample = _drawn(model, norms), model.mapped(lambda x: drawn("x", x), model.sample)
    before = model.wide(start, {}, sample)

    def same(values: Values, norms: Norms = MappingProxyType({})) -> bool:
        return difference(before, model.wide(values, norms, sample)) <= CONVERSION

    if not same(start):
        words = "two runs on the same inputs differ, expected equal outputs; the model is random in evaluation"
        raise errors.InputValueError(f"to_rms_norm: {words}")
    weights = _weights(before)
    gradients = model.gradients(start, {}, sample, weights)
    silent = [name for name, g in gradients.items() if g is None or not g.any()]  # or behind a stopped gradient
    unreached = by_halves(silent, lambda some: same({**start, **{name: start[name] * 2 for name in some}}))
    hidden = [(name, axes) for name in silent if name not in unreached for axes in axes_of(start[name].shape)]

    def fit(some: Sequence[Shift]) -> bool:  # a stopped gradient or a decision may see the mean
        return all(same(moved(start, some, mean)) for mean in (3.0, 0.0))

    shifts = by_halves([*shifts_of(gradients), *hidden], fit)
    centred = moved(start, shifts)
    rms = by_halves([*norms], lambda some: same(centred, {name: norms[name] for name in some}))
    left |= {name: _SEEN for name in norms if name not in rms}
    for name in rms:
        variant = norms[name].known
        other = replace(norms[name], variant=variant.replace(eps=variant.eps_for("float64") + 1))
        if same(start, {name: other}):  # another eps would show where it runs
            left[name] = _UNSEEN
    chosen = {name: norms[name] for name in rms if name not in left}
    if not chosen:
        return [], unreached
    # The mean of a parameter must go if an RMSNorm sees it, perhaps behind a stopped gradient.
    of_rms = model.gradients(start, chosen, sample, weights)
    needed = [(name, axes) for name, axes in shifts if name in silent or moves(of_rms[name], axes)]
    for some in (needed, shifts):
        if same(moved(start, some), chosen):
            return some, unreached
    raise errors.InputValueError(_DIFFERS)


def _drawn(model: Sampled, norms: Norms) -> Values:
    """Random parameters. A gain of equal elements stays one number, and a bias without a mean stays without one."""
    values = {name: drawn(name, value) for name, value in model.values.items()}
    for layer, norm in norms.items():
        scale, bias = (f"{layer}{model.separator}{n}".lstrip(model.separator) for n in (norm.scale, norm.bias))
        if scale in values and (model.values[scale] == model.values[scale].flat[0]).all():
            values[scale] = np.full_like(values[scale], values[scale].flat[0])
        if bias in values and abs(model.values[bias].mean()) <= 2.0**-24 * np.abs(model.values[bias]).max():
            values[bias] = values[bias] - values[bias].mean()
    return values


def drawn(name: str, value: Array) -> Array:
    """Random numbers, which the name seeds, of the signs and the size of a parameter or an input; 0.1 in place of 0."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return value * random.uniform(0.5, 1.0, value.shape) if value.any() else 0.1 * random.normal(size=value.shape)


def _weights(outputs: Iterable[Array]) -> list[Array]:
    """Random weights of floating-point outputs, by which they are added; 0 where one is not finite."""
    random, floats = np.random.default_rng(0), [y for y in outputs if y.dtype.kind == "f"]
    return [np.where(np.isfinite(y), random.normal(size=y.shape) / (median(y) or 1.0), 0.0) for y in floats]


def shifts_of(gradients: Mapping[str, Array | None]) -> Iterator[Shift]:
    """Along which axes shifting a parameter changes no output: the fewest ones."""
    for name, gradient in gradients.items():
        found: list[Axes] = []
        for axes in axes_of(gradient.shape) if gradient is not None and gradient.any() else ():
            if not any({*fewer} <= {*axes} for fewer in found) and not moves(gradient, axes):
                found.append(axes)
        yield from ((name, axes) for axes in found)


def axes_of(shape: Sequence[int]) -> Iterator[Axes]:
    """All sets of axes of more than one element, small ones first."""
    wide = [axis for axis, size in enumerate(shape) if size > 1]
    return (axes for count in range(1, len(wide) + 1) for axes in combinations(wide, count))


def moves(gradient: Array | None, axes: Axes) -> bool:
    """Whether shifting along these axes changes the functional that has this gradient."""
    if gradient is None:
        return False
    total, terms = np.abs(gradient.sum(axes)), np.abs(gradient).sum(axes)
    return not total.max() <= CONVERSION * terms.max()  # NaN moves


def moved(values: Mapping[str, Array], shifts: Iterable[Shift], mean: float = 0.0) -> dict[str, Array]:
    """With this mean along the axes, of the size of the parameter, in place of its own."""
    result = dict(values)
    for name, axes in shifts:
        value = result[name]
        result[name] = value - value.mean(axes, keepdims=True) + mean * np.abs(value).mean()
    return result


def _drops(layer: Any) -> bool:
    return "Dropout" in type(layer).__name__ and bool(getattr(layer, "p", 0) or getattr(layer, "rate", 0))


def by_halves(some: Sequence[Any], fit: Callable[[Sequence[Any]], bool]) -> list[Any]:
    """Those that fit, where the ones of a part fit together if each of them does."""
    if not some or fit(some):
        return list(some)
    half = len(some) // 2
    return [] if half == 0 else [*by_halves(some[:half], fit), *by_halves(some[half:], fit)]


def difference(before: Sequence[Any], after: Sequence[Any]) -> float:
    """The greatest difference; NaN, infinities and what is no floating-point number must be equal.

    It is relative to the element, or to the median of its array where that is more: the greatest element may be a
    number that masks, such as -1e9.
    """
    if [(a.shape, a.dtype) for a in before] != [(b.shape, b.dtype) for b in after]:
        return np.inf
    return max((_difference(a, b) for a, b in zip(before, after, strict=True)), default=0.0)


def _difference(before: np.ndarray, after: np.ndarray) -> float:
    if before.dtype.kind not in "fcV":
        return 0.0 if np.array_equal(before, after) else np.inf
    if before.dtype.kind != "c":
        before, after = before.astype(np.float64), after.astype(np.float64)  # also of bfloat16
    finite = np.isfinite(before) & np.isfinite(after)
    if not np.array_equal(before[~finite], after[~finite], equal_nan=True):
        return np.inf
    before, after = before[finite], after[finite]
    sizes = np.maximum(np.abs(before), median(before))
    return float((np.abs(before - after) / np.where(sizes > 0, sizes, 1.0)).max(initial=0.0))


def median(array: np.ndarray) -> float:
    """That of the sizes of the finite elements that are not 0; 0 where there are none."""
    sizes = np.abs(array[np.isfinite(array) & (array != 0)])
    return float(np.median(sizes)) if sizes.size else 0.0


def first_names(names: Iterable[str], shown: int = 3) -> str:
    """The first names, and the number of the others."""
    listed = list(names)
    more = f" and {len(listed) - shown} more" if len(listed) > shown else ""
    return ", ".join(listed[:shown]) + more
