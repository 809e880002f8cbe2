"""The recurrent cells: Nematus's GRU, the GRU and the LSTM of the authors' Theano code, with any norm.

Sequences are time-major: x (length, batch, features), mask (length, batch), states (batch, features). The dtype is that
of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from rmsnorm.nematus.cells import CellNorm
from rmsnorm.nematus.models.functions import functions
from rmsnorm.nematus.models.parameters import Parameters
from rmsnorm.nematus.torch import operations

__all__ = ["gru", "lstm", "nematus_gru"]


def _run(
    function: Callable[..., Any], parameters: Mapping[str, Tensor], *tensors: Any, norm: CellNorm, partial: float,
    **options: Any,
) -> Any:  # fmt: skip
    return function(Parameters(operations, parameters, norm, partial=partial), *tensors, **options)


nematus_gru, gru, lstm = functions(_run, __name__)
