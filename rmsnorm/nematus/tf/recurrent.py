"""The recurrent cells: Nematus's GRU, the GRU and the LSTM of the authors' Theano code, with any norm.

Sequences are time-major: x (length, batch, features), mask (length, batch), states (batch, features). The dtype is that
of the arguments. In a function with jit_compile=True the tape must be inside, as for all loops of TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import tensorflow as tf

from rmsnorm.nematus.cells import CellNorm, check_norm
from rmsnorm.nematus.models.functions import functions
from rmsnorm.nematus.models.parameters import Parameters
from rmsnorm.nematus.tf import operations
from rmsnorm.nematus.tf.parameters import Graphs

__all__ = ["gru", "lstm", "nematus_gru"]

_graphs: Final = Graphs()


def _run(
    function: Callable[..., Any], parameters: Mapping[str, Any], *arrays: Any, norm: CellNorm, **options: Any
) -> Any:
    """The function as a graph; all arguments become tensors. The mask is the last of them, if there is one."""
    check_norm(norm)
    values = {name: tf.convert_to_tensor(value) for name, value in parameters.items()}
    tensors = [tf.convert_to_tensor(array) for array in arrays if array is not None]
    return _graphs.run(_call, values, *tensors, called=function, norm=norm, **options)


def _call(
    values: Any, *tensors: tf.Tensor, called: Callable[..., Any], norm: CellNorm, partial: float, **options: Any
) -> Any:
    return called(Parameters(operations, values, norm, partial=partial), *tensors, **options)


nematus_gru, gru, lstm = functions(_run, __name__)
