"""The recurrent cells: Nematus's GRU, the GRU and the LSTM of the authors' Theano code, with any norm.

Sequences are time-major: x (length, batch, features), mask (length, batch), states (batch, features). The dtype is that
of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial as bind
from typing import Any

import jax

from rmsnorm.nematus.cells import CellNorm
from rmsnorm.nematus.flax import operations
from rmsnorm.nematus.models.functions import functions
from rmsnorm.nematus.models.parameters import Parameters

__all__ = ["gru", "lstm", "nematus_gru"]


def _run(
    function: Callable[..., Any], parameters: Mapping[str, jax.Array], *arrays: Any, norm: CellNorm, partial: float,
    **options: Any,
) -> Any:  # fmt: skip
    own = {"function": function, "norm": norm, "partial": partial, "options": tuple(options.items())}
    return _compiled(parameters, *arrays, **own)


# In another jit, grad or vmap it becomes a part of that.
@bind(jax.jit, inline=True, static_argnames=("function", "norm", "partial", "options"))
def _compiled(
    parameters: Mapping[str, jax.Array], *arrays: Any, function: Callable[..., Any], norm: CellNorm, partial: float,
    options: tuple[tuple[str, Any], ...],
) -> Any:  # fmt: skip
    return function(Parameters(operations, parameters, norm, partial=partial), *arrays, **dict(options))


nematus_gru, gru, lstm = functions(_run, __name__)
