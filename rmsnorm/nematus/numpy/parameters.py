"""The parts of the recurrent models and the Transformer: parameters by name, the norm, and projections.

Each operation returns its result and its pullback. A pullback takes the gradient of the result, adds to the gradients
of the parameters and returns the gradient of the input. The arithmetic is NumPy's in the dtype of the arguments, like
that of the original programs: so the norm is a few lines here and not the double-double golden, which takes a thousand
times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rmsnorm.nematus import cells
from rmsnorm.nematus.cells import EPS, PARTIAL, CellNorm, check_norm
from rmsnorm.variants import Variant

Array: TypeAlias = npt.NDArray[Any]
Pullback: TypeAlias = Callable[[Array], Array]


class Dropout:
    """Nematus's dropout after Gal & Ghahramani: one mask for each name, the same in all steps of a sequence."""

    def __init__(self, rates: Mapping[str, float], rng: np.random.Generator) -> None:
        self.rates, self.rng = rates, rng
        self.masks: dict[str, Array] = {}

    def mask(self, name: str, x: Array, *, whole: bool) -> Array:
        if name not in self.masks:
            keep = 1 - self.rates[name]
            self.masks[name] = (self.rng.random((*x.shape[:-1], 1) if whole else x.shape[-2:]) < keep) / keep
        return self.masks[name]


class Parameters:
    """Arrays below a name, and the sums of their gradients.

    ``parameters / "gru0"`` are the arrays below that name, ``parameters["W"]`` is an array, ``add("W", d)`` adds to its
    gradient. The object also has the norm of the model and, in training, its dropout.
    """

    def __init__(
        self,
        values: Mapping[str, Array],
        norm: CellNorm = "none",
        *,
        partial: float = PARTIAL,
        eps: float = EPS,
        dropout: Dropout | None = None,
        scope: str = "",
        gradients: dict[str, Array] | None = None,
    ) -> None:
        check_norm(norm)
        self.values, self.norm, self.partial, self.eps = values, norm, partial, eps
        self.dropout, self.scope = dropout, scope
        self.gradients = {} if gradients is None else gradients

    def __truediv__(self, name: str) -> Parameters:
        return Parameters(
            self.values, self.norm, partial=self.partial, eps=self.eps, dropout=self.dropout,
            scope=f"{self.scope}{name}/", gradients=self.gradients,
        )  # fmt: skip

    def __getitem__(self, name: str) -> Array:
        return self.values[self.scope + name]

    def __contains__(self, name: str) -> bool:
        return self.scope + name in self.values

    def add(self, name: str, gradient: Array) -> None:
        full = self.scope + name
        self.gradients[full] = self.gradients[full] + gradient if full in self.gradients else gradient


def normalise(
    p: Parameters, x: Array, gain: str, offset: str | None, norm: CellNorm | None = None
) -> tuple[Array, Pullback]:
    """The norm over the last axis: x / sqrt(mean(x^2) + eps) * gain + offset; LayerNorm takes x - mean(x) as x.

    norm: by default that of the model.
    """
    norm = norm or p.norm
    if norm == "none":
        return x, identity
    n = x.shape[-1]
    k = Variant.get("theano").replace(partial=p.partial).counted(n) if norm == "prms" else n
    centred = x - x.mean(axis=-1, keepdims=True) if norm == "layer" else x
    rho = np.sqrt(np.mean(centred[..., :k] ** 2, axis=-1, keepdims=True) + np.asarray(p.eps, x.dtype))
    xhat = centred / rho
    y = xhat * p[gain]
    if offset is not None and offset in p:
        y = y + p[offset]

    def pullback(dy: Array) -> Array:
        p.add(gain, rows(dy * xhat).sum(axis=0))
        if offset is not None and offset in p:
            p.add(offset, rows(dy).sum(axis=0))
        u = dy * p[gain]
        dx = u / rho
        dx[..., :k] -= xhat[..., :k] * (u * xhat).sum(axis=-1, keepdims=True) / (k * rho)
        return dx - dx.mean(axis=-1, keepdims=True) if norm == "layer" else dx

    return y, pullback


def drop(p: Parameters, name: str, x: Array, *, whole: bool = False) -> tuple[Array, Pullback]:
    """In training, drop some features of x in all steps; with ``whole``, all features in some steps."""
    if p.dropout is None:
        return x, identity
    mask = p.dropout.mask(p.scope + name, x, whole=whole)
    return x * mask, lambda dy: dy * mask


def project(
    p: Parameters, x: Array, weight: str, bias: str | None, norm: tuple[str, str] | None
) -> tuple[Array, Pullback]:
    """norm(x W + b), with b inside the norm; a bias or a norm of None is left out."""
    x, drop_pullback = drop(p, weight, x)
    product = x @ p[weight]
    if bias is not None:
        product = product + p[bias]
    y, norm_pullback = (product, identity) if norm is None else normalise(p, product, *norm)

    def pullback(dy: Array) -> Array:
        dproduct = norm_pullback(dy)
        p.add(weight, rows(x).T @ rows(dproduct))
        if bias is not None:
            p.add(bias, rows(dproduct).sum(axis=0))
        return drop_pullback(dproduct @ p[weight].T)

    return y, pullback


def feed_forward(p: Parameters, x: Array, *, norm: bool = True) -> tuple[Array, Pullback]:
    """norm(x W + b); the variables of the norm are directly below the name of the layer."""
    return project(p, x, "W", "b", leaves(p) if norm else None)


def leaves(p: Parameters, scope: str = "") -> tuple[str, str]:
    """Nematus's names of the gain and the offset of the norm below a scope."""
    return cells.leaves(p.norm, scope)


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x), computed as (1 + tanh(x / 2)) / 2, which does not overflow."""
    return (1 + np.tanh(x / 2)) / 2


def rows(x: Array) -> Array:
    """x as a matrix with the last axis of x as its columns."""
    return x.reshape(-1, x.shape[-1])


def identity(dy: Array) -> Array:
    return dy
