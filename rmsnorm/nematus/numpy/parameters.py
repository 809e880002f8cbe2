"""What the golden of the recurrent models is made of: operations that give their result and their pullback.

A pullback takes the gradient of the result, adds to those of the parameters and returns that of the input. The
arithmetic is NumPy's in the dtype of the arguments, as the programs that these models are taken from did theirs: the
norm is therefore a few lines here and not the double-double golden, which takes a thousand times as long.
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
    """Nematus's dropout after Gal & Ghahramani: one mask for each name, the same at every step of a sequence."""

    def __init__(self, rates: Mapping[str, float], rng: np.random.Generator) -> None:
        self.rates, self.rng = rates, rng
        self.masks: dict[str, Array] = {}

    def mask(self, name: str, x: Array, *, whole: bool) -> Array:
        if name not in self.masks:
            kept = 1 - self.rates[name]
            self.masks[name] = (self.rng.random((*x.shape[:-1], 1) if whole else x.shape[-2:]) < kept) / kept
        return self.masks[name]


class Parameters:
    """Arrays below a name, and the gradients gathered for them.

    ``parameters / "gru0"`` is what lies below that name, ``parameters["W"]`` an array, ``add("W", d)`` adds to its
    gradient. The norm of the model is carried along, and in training its dropout.
    """

    def __init__(
        self,
        values: Mapping[str, Array],
        norm: CellNorm = "none",
        *,
        partial: float = PARTIAL,
        dropout: Dropout | None = None,
        scope: str = "",
        gradients: dict[str, Array] | None = None,
    ) -> None:
        check_norm(norm)
        self.values, self.norm, self.partial, self.dropout, self.scope = values, norm, partial, dropout, scope
        self.gradients = {} if gradients is None else gradients

    def __truediv__(self, name: str) -> Parameters:
        return Parameters(
            self.values, self.norm, partial=self.partial, dropout=self.dropout, scope=f"{self.scope}{name}/",
            gradients=self.gradients,
        )  # fmt: skip

    def __getitem__(self, name: str) -> Array:
        return self.values[self.scope + name]

    def __contains__(self, name: str) -> bool:
        return self.scope + name in self.values

    def add(self, name: str, gradient: Array) -> None:
        full = self.scope + name
        self.gradients[full] = self.gradients[full] + gradient if full in self.gradients else gradient


def normalize(p: Parameters, a: Array, gain: str, offset: str) -> tuple[Array, Pullback]:
    """The norm over the last axis: a / sqrt(mean(a^2) + eps) * gain + offset; of a - mean(a) for LayerNorm."""
    if p.norm == "none":
        return a, identity
    n = a.shape[-1]
    k = Variant.get("theano").replace(partial=p.partial).counted(n) if p.norm == "prms" else n
    centred = a - a.mean(axis=-1, keepdims=True) if p.norm == "layer" else a
    rho = np.sqrt(np.mean(centred[..., :k] ** 2, axis=-1, keepdims=True) + np.asarray(EPS, a.dtype))
    xhat = centred / rho
    y = xhat * p[gain]
    if offset in p:
        y = y + p[offset]

    def pullback(dy: Array) -> Array:
        p.add(gain, rows(dy * xhat).sum(axis=0))
        if offset in p:
            p.add(offset, rows(dy).sum(axis=0))
        u = dy * p[gain]
        da = u / rho
        da[..., :k] -= xhat[..., :k] * (u * xhat).sum(axis=-1, keepdims=True) / (k * rho)
        return da - da.mean(axis=-1, keepdims=True) if p.norm == "layer" else da

    return y, pullback


def drop(p: Parameters, name: str, x: Array, *, whole: bool = False) -> tuple[Array, Pullback]:
    """In training without some features in all steps; ``whole``: without any features in some steps."""
    if p.dropout is None:
        return x, identity
    mask = p.dropout.mask(p.scope + name, x, whole=whole)
    return x * mask, lambda dy: dy * mask


def project(
    p: Parameters, x: Array, weight: str, bias: str | None, norm: tuple[str, str] | None
) -> tuple[Array, Pullback]:
    """norm(x W + b), with b inside the norm; without a bias or a norm where these are None."""
    x, drop_pullback = drop(p, weight, x)
    a = x @ p[weight]
    if bias is not None:
        a = a + p[bias]
    y, norm_pullback = (a, identity) if norm is None else normalize(p, a, *norm)

    def pullback(dy: Array) -> Array:
        da = norm_pullback(dy)
        p.add(weight, rows(x).T @ rows(da))
        if bias is not None:
            p.add(bias, rows(da).sum(axis=0))
        return drop_pullback(da @ p[weight].T)

    return y, pullback


def feed_forward(p: Parameters, x: Array, *, norm: bool = True) -> tuple[Array, Pullback]:
    """norm(x W + b), the norm's variables directly below the name of the layer."""
    return project(p, x, "W", "b", leaves(p) if norm else None)


def leaves(p: Parameters, scope: str = "") -> tuple[str, str]:
    """What Nematus calls gain and offset of the norm below that scope."""
    return cells.leaves(p.norm, scope)


def sigmoid(x: Array) -> Array:
    """Without overflow: 1 / (1 + e^-x) = (1 + tanh(x / 2)) / 2."""
    return (1 + np.tanh(x / 2)) / 2


def rows(a: Array) -> Array:
    """As a matrix, of the last axis."""
    return a.reshape(-1, a.shape[-1])


def identity(dy: Array) -> Array:
    return dy
