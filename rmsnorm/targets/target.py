"""A target: someone's normalisation, called with NumPy arrays whatever it is made of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from rmsnorm import errors
from rmsnorm.targets.bridges import Array, Bridge, Function

Shape = tuple[int, ...]
_GPU_WORDS: Final = ("cuda", "gpu", "triton", "nvidia", "rocm", "xpu")


class NoTarget(ValueError):
    """There is no such target: the name is wrong, or it cannot be built from what was given."""


class TargetError(Exception):
    """The target cannot be called: the message is one sentence that says what happened."""


@dataclass
class Target:
    """A function of x and what its parameters are, with a bridge to the library that computes it.

    Attributes:
        name, framework: as in reports.
        bridge: to the library.
        function: takes the library's arrays by role: x, and some of scale, bias, gate, gate_vector, mask, residual.
        roles: that the function takes beside x.
        width: the only size of the normalised axis that it takes, None for any.
        shape_of: shape of a parameter for a shape of x.
        resized: makes the same target for another width, None where that cannot be.
        derivatives: for a function without automatic differentiation, (arguments, dy) to gradients by role.
        notes: what was assumed to open it, as sentences.
        touched: roles whose arrays it wrote to.
    """

    name: str
    framework: str
    bridge: Bridge
    function: Function
    roles: tuple[str, ...] = ()
    width: int | None = None
    shape_of: Callable[[str, Shape], Shape] = lambda role, shape: shape[-1:]
    resized: Callable[[int], Target] | None = None
    derivatives: Callable[[Mapping[str, Array], Array], Mapping[str, Array | None]] | None = None
    notes: tuple[str, ...] = ()
    touched: set[str] = field(default_factory=set)

    @property
    def differentiable(self) -> bool:
        return self.derivatives is not None or self.bridge.differentiable

    def forward(self, x: Array, scale: Array | None = None, bias: Array | None = None, **others: Array | None) -> Array:
        """y for NumPy arrays in any of the four dtypes; a parameter that is None keeps the target's own value.

        Raises:
            TargetError: the target raised, or did not return an array shaped as x.
        """
        given = _given(x=x, scale=scale, bias=bias, **others)

        def run() -> Array:
            arguments = {role: self.bridge.send(array) for role, array in given.items()}
            y = self.bridge.fetch(_first(self.function(arguments)))
            for role, array in given.items():
                if not np.array_equal(_bits(self.bridge.fetch(arguments[role])), _bits(array)):
                    self.touched.add(role)
            return y

        y = self._guarded(run, given)
        if y.shape != x.shape:
            got, want = (errors.describe(a.shape, a.dtype.name) for a in (y, x))
            raise TargetError(f"{self.name} returned {got} for x {want}, expected the shape of x")
        return y

    def gradients(
        self, x: Array, scale: Array | None, bias: Array | None, dy: Array, **others: Array | None
    ) -> tuple[Array | None, Array | None, Array | None]:
        """(dx, dscale, dbias) by the library's automatic differentiation; None where there is none.

        Raises:
            TargetError: the target, or its differentiation, raised.
        """
        given = _given(x=x, scale=scale, bias=bias, **others)

        def run() -> Mapping[str, Array | None]:
            if self.derivatives is not None:
                return self.derivatives(given, dy)
            arguments = {role: self.bridge.send(array) for role, array in given.items()}
            found = self.bridge.pull(lambda named: _first(self.function(named)), arguments, dy)
            return {role: None if value is None else self.bridge.fetch(value) for role, value in found.items()}

        found = self._guarded(run, given)
        return found.get("x"), found.get("scale"), found.get("bias")

    def _guarded(self, run: Callable[[], Any], given: Mapping[str, Array]) -> Any:
        wide = any(array.dtype == np.float64 for array in given.values())
        try:
            with self.bridge.scope(wide), np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what it computes is the question
                return run()
        except Exception as error:  # whatever foreign code raises is what the report must say
            raise TargetError(self._story(error, given)) from error

    def _story(self, error: Exception, given: Mapping[str, Array]) -> str:
        lines = str(error).strip().splitlines() or ["without a message"]
        what = f"{type(error).__name__}: {lines[0][:200]}"
        arguments = ", ".join(f"{role} {errors.describe(a.shape, a.dtype.name)}" for role, a in given.items())
        if any(word in what.lower() for word in _GPU_WORDS):
            return (
                f"{self.name} needs a GPU, expected one that runs here ({what}); pass device='cuda' where there is one"
            )
        return f"{self.name} raised on {arguments}: {what}"


def _given(**arrays: Array | None) -> dict[str, Array]:
    return {role: array for role, array in arrays.items() if array is not None}


def _first(value: Any) -> Any:
    """y, of what returns more: (y, x + residual), (y, 1 / rho)."""
    return value[0] if isinstance(value, (tuple, list)) else value


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).view(np.uint8)
