"""The invariances of the paper, run: which transformations of data and weights leave the output of a norm unchanged.

a = W x goes through each norm before and after a transformation, with eps = 0. A property holds if the output changes
by no more than rounding can; otherwise the change is the counter-example. So do the gradients of RMSNorm.

The bound. Let gamma = K u / (1 - K u), with u = 2^-53 and K more than the roundings on any path from the data to a
result: it bounds the error of a sum of products relative to the sum of their absolute values (Higham 2002, section
3.1). For a that is |W| |x|; kappa >= 1 is its largest ratio to the statistic rho of the same row or column. To first
order in tau = gamma kappa (the rest is in the slack of K), |da| <= tau rho, |d rho| <= tau rho, and

    |dx^| <= tau X,    X = 2 + |x^|        (2, because the mean that LayerNorm and BatchNorm subtract errs as well)
    |dy|  <= tau (|g| X + |b|)

A gradient is a sum of products of p quantities z, each with a majorant Z such that |z| <= Z and |dz| <= tau Z: it errs
by at most p tau times the same sum with Z for z. Two runs err by twice as much as the worse of them.

Source: Zhang & Sennrich 2019, arXiv 1910.07467, table 1 and section 4.2; Ba, Kiros & Hinton 2016, table 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rmsnorm.numpy_impl.functional import rms_norm, rms_norm_vjp
from rmsnorm.numpy_impl.paper.norms import batch_norm, layer_norm, weight_norm
from rmsnorm.specification import dtypes, errors
from rmsnorm.specification.variants import is_real

Array: TypeAlias = npt.NDArray[np.float64]

__all__ = ["NORMS", "PROPERTIES", "GradientFact", "Invariance", "gradient_facts", "table"]

_CASES, _INPUTS, _OUTPUTS, _COUNTED = 16, 24, 64, 4
_PARTIAL: Final = Fraction(_COUNTED, _OUTPUTS)  # the paper's 6.25 %


@dataclass(frozen=True)
class Invariance:
    """A cell of the paper's table 1, as run.

    Attributes:
        norm: one of NORMS.
        property: one of PROPERTIES.
        expected: whether the paper says that it holds.
        holds: whether the output changed by no more than the bound.
        change: the largest change of an output, relative to the largest output.
        bound: of the change by rounding alone.
    """

    norm: str
    property: str
    expected: bool
    holds: bool
    change: float
    bound: float


@dataclass(frozen=True)
class GradientFact:
    """What a transformation does to a gradient, as run.

    Attributes:
        norm: RMSNorm or pRMSNorm.
        gradient: dL/dg, dL/db or dL/dW.
        property: the transformation, one of PROPERTIES.
        expected: the factor by which the paper says that the gradient is multiplied.
        factor: the factor that fits the run best.
        holds: whether the gradient differs from the expected one by no more than the bound.
        change: the largest difference from the expected gradient, relative to its largest element.
        bound: of the change by rounding alone.
    """

    norm: str
    gradient: str
    property: str
    expected: float
    factor: float
    holds: bool
    change: float
    bound: float


class _Data(NamedTuple):
    x: Array  # [cases, inputs]
    w: Array  # [outputs, inputs]
    g: Array
    b: Array
    target: Array  # of the loss |y - target|^2 / 2
    shift: Array  # [inputs]

    def outputs(self) -> Array:
        """a = W x, a row for each case."""
        return self.x @ self.w.T


class _Norm(NamedTuple):
    forward: Callable[[_Data], Array]
    statistic: Callable[[_Data], Array]  # rho, shaped to broadcast against y


def _rms_norm(partial: Fraction | None, counted: int) -> _Norm:
    return _Norm(
        lambda data: np.asarray(rms_norm(data.outputs(), data.g, data.b, variant="paper", partial=partial)),
        lambda data: np.sqrt(np.mean(data.outputs()[:, :counted] ** 2, axis=1, keepdims=True)),
    )


_NORMS: Final[Mapping[str, _Norm]] = {
    "BatchNorm": _Norm(
        lambda data: batch_norm(data.outputs(), data.g, data.b, eps=0.0)[0],
        lambda data: np.std(data.outputs(), axis=0, keepdims=True),
    ),
    "WeightNorm": _Norm(
        lambda data: data.x @ weight_norm(data.w, data.g).T + data.b,
        lambda data: np.linalg.norm(data.w, axis=1)[None],
    ),
    "LayerNorm": _Norm(
        lambda data: layer_norm(data.outputs(), data.g, data.b, eps=0.0),
        lambda data: np.std(data.outputs(), axis=1, keepdims=True),
    ),
    "RMSNorm": _rms_norm(None, _OUTPUTS),
    "pRMSNorm": _rms_norm(_PARTIAL, _COUNTED),
}
_TRANSFORMATIONS: Final[Mapping[str, Callable[[_Data, float], _Data]]] = {
    "weight matrix re-scaling": lambda data, delta: data._replace(w=delta * data.w),
    "weight matrix re-centring": lambda data, _: data._replace(w=data.w + data.shift),
    "weight vector re-scaling": lambda data, delta: data._replace(w=_first_scaled(data.w, delta)),
    "dataset re-scaling": lambda data, delta: data._replace(x=delta * data.x),
    "dataset re-centring": lambda data, _: data._replace(x=data.x + data.shift),
    "single training case re-scaling": lambda data, delta: data._replace(x=_first_scaled(data.x, delta)),
}
NORMS: Final = tuple(_NORMS)
PROPERTIES: Final = tuple(_TRANSFORMATIONS)
_PAPER: Final = MappingProxyType(
    {
        "BatchNorm": (True, False, True, True, True, False),
        "WeightNorm": (True, False, True, False, False, False),
        "LayerNorm": (True, True, False, True, False, True),
        "RMSNorm": (True, False, False, True, False, True),
        "pRMSNorm": (True, False, False, True, False, True),
    }
)


def table(*, seed: int = 0, delta: float = 0.7) -> list[Invariance]:
    """Run the five norms of the paper under its six transformations.

        norm(W' x'; g, b) = norm(W x; g, b)        with W', x' = delta W, W + 1 c^T, ..., or delta x, x + c, ...

    Args:
        seed: of the random data.
        delta: the factor of the re-scalings, a positive number other than 1.

    Returns:
        One cell per norm and property, in the order of NORMS and, within a norm, of PROPERTIES.

    Raises:
        TypeError: delta is not a number.
        ValueError: delta is not positive, not finite, or 1.

    Source: Zhang & Sennrich 2019, table 1.

    Example:
        >>> cells = table()
        >>> len(cells), all(cell.holds == cell.expected for cell in cells)
        (30, True)
    """
    data = _data("table", seed, delta)
    cells = []
    for name, norm in _NORMS.items():
        y = norm.forward(data)
        for (prop, transform), expected in zip(_TRANSFORMATIONS.items(), _PAPER[name], strict=True):
            moved = transform(data, delta)
            change = np.max(np.abs(norm.forward(moved) - y)) / np.max(np.abs(y))
            majorant = 2 * np.abs(data.g) + np.abs(y - data.b) + np.abs(data.b)
            tau = max(_tau(norm, data), _tau(norm, moved))
            bound = 2 * tau * np.max(majorant) / np.max(np.abs(y))
            cells.append(Invariance(name, prop, expected, bool(change <= bound), float(change), float(bound)))
    return cells


def gradient_facts(*, seed: int = 0, delta: float = 0.7) -> list[GradientFact]:
    """Run the gradients of RMSNorm and pRMSNorm under re-scaling of the data and of the weight matrix.

        dL/dg and dL/db do not change; dL/dW does not with x -> delta x, and is divided by delta with W -> delta W

    L is half the squared distance of y from a random target, so that all three depend on the data.

    Args:
        seed: of the random data.
        delta: the factor of the re-scalings, a positive number other than 1.

    Returns:
        One fact per norm, transformation and gradient.

    Raises:
        TypeError: delta is not a number.
        ValueError: delta is not positive, not finite, or 1.

    Source: Zhang & Sennrich 2019, section 4.2.

    Example:
        >>> facts = gradient_facts(delta=0.5)
        >>> facts[5].property, facts[5].gradient, facts[5].factor, all(fact.holds for fact in facts)
        ('weight matrix re-scaling', 'dL/dW', 2.0, True)
    """
    data = _data("gradient_facts", seed, delta)
    facts = []
    for name, partial, counted in (("RMSNorm", None, _OUTPUTS), ("pRMSNorm", _PARTIAL, _COUNTED)):
        norm, before = _NORMS[name], _gradients(data, partial)
        for prop, weight_factor in (("dataset re-scaling", 1.0), ("weight matrix re-scaling", 1 / delta)):
            moved = _TRANSFORMATIONS[prop](data, delta)
            tau = max(_tau(norm, data), _tau(norm, moved))
            for gradient, old, new, majorant, factor in zip(
                ("dL/dg", "dL/db", "dL/dW"),
                before,
                _gradients(moved, partial),
                _majorants(data, norm, counted),
                (1.0, 1.0, weight_factor),
                strict=True,
            ):
                largest = np.max(np.abs(old))
                change = np.max(np.abs(new / factor - old)) / largest
                bound = 2 * tau * np.max(majorant) / largest
                fitted = np.vdot(new, old) / np.vdot(old, old)
                holds = bool(change <= bound)
                facts.append(
                    GradientFact(name, gradient, prop, factor, float(fitted), holds, float(change), float(bound))
                )
    return facts


def _data(op: str, seed: int, delta: Any) -> _Data:
    fix = "pass one such as 0.7"
    if not is_real(delta):
        raise errors.wrong_type(op, "delta", delta, "a number", fix)
    if not 0 < delta < math.inf or delta == 1:
        raise errors.out_of_domain(op, "delta", delta, "a positive number other than 1", fix)
    rng = np.random.default_rng(seed)
    shapes = ((_CASES, _INPUTS), (_OUTPUTS, _INPUTS), _OUTPUTS, _OUTPUTS, (_CASES, _OUTPUTS), _INPUTS)
    return _Data(*(rng.normal(size=shape) for shape in shapes))


def _first_scaled(rows: Array, delta: float) -> Array:
    return np.concatenate([delta * rows[:1], rows[1:]])


def _tau(norm: _Norm, data: _Data) -> float:
    rho, terms = norm.statistic(data), np.abs(data.x) @ np.abs(data.w).T
    kappa = np.max(np.max(terms, axis=rho.shape.index(1), keepdims=True) / rho)
    roundings = 2 * (_CASES + _INPUTS + _OUTPUTS) * dtypes.unit_roundoff("float64")
    return float(roundings / (1 - roundings) * max(1.0, kappa))


def _gradients(data: _Data, partial: Fraction | None) -> tuple[Array, Array, Array]:
    """dL/dg, dL/db and dL/dW."""
    a = data.outputs()
    v = rms_norm(a, data.g, data.b, variant="paper", partial=partial) - data.target
    da, dg, db = rms_norm_vjp(v, a, data.g, data.b, variant="paper", partial=partial)
    return dg, db, da.T @ data.x


def _majorants(data: _Data, norm: _Norm, counted: int) -> tuple[Array, Array, Array]:
    """Of the errors of _gradients, over tau: p times the same sums, with the majorants of their factors."""
    rho, g, y = norm.statistic(data), np.abs(data.g), norm.forward(data)
    x_hat = 2 + np.abs(data.outputs() / rho)
    v = np.abs(y - data.target) + g * x_hat + np.abs(data.b)
    first = np.arange(_OUTPUTS) < counted
    along = np.sum(g * v * x_hat, axis=1, keepdims=True) / counted
    da = (g * v + first * x_hat * along) / rho
    return 2 * np.sum(v * x_hat, axis=0), np.sum(v, axis=0), 4 * da.T @ np.abs(data.x)
