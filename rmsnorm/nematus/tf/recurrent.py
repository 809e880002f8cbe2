"""The recurrent cells: Nematus's GRU, the GRU and the LSTM of the authors' Theano code, with any norm.

Sequences are time-major: x (length, batch, features), mask (length, batch), states (batch, features). The dtype is that
of the arguments. In a function with jit_compile=True the tape must be inside, as for all loops of TensorFlow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import tensorflow as tf

from rmsnorm.nematus.cells import PARTIAL, CellNorm, check_norm
from rmsnorm.nematus.config import Bias
from rmsnorm.nematus.models import recurrent
from rmsnorm.nematus.models.parameters import Parameters
from rmsnorm.nematus.tf import operations
from rmsnorm.nematus.tf.parameters import Graphs

__all__ = ["gru", "lstm", "nematus_gru"]

_graphs: Final = Graphs()


def nematus_gru(
    x: tf.Tensor,
    h0: tf.Tensor,
    parameters: Mapping[str, tf.Tensor],
    *,
    biases: Sequence[Bias] = ("input",),
    mask: tf.Tensor | None = None,
    masking: Literal["zero", "carry"] = "zero",
    reverse: bool = False,
    norm: CellNorm = "none",
    partial: float = PARTIAL,
) -> tf.Tensor:
    """Nematus's GRU with deep transition: see rmsnorm.nematus.protocol.Cells.nematus_gru.

    Example:
        >>> weights = {"gru0/state_to_gates": tf.ones((1, 2)), "gru0/state_to_proposal": tf.ones((1, 1))}
        >>> weights |= {"gru0/input_to_gates": tf.ones((1, 2)), "gru0/input_to_proposal": tf.ones((1, 1))}
        >>> weights |= {"gru0/gates_bias": tf.zeros(2), "gru0/proposal_bias": tf.zeros(1)}
        >>> nematus_gru(tf.zeros((2, 1, 1)), tf.ones((1, 1)), weights).numpy().round(4).ravel()
        array([0.8988, 0.802 ], dtype=float32)
    """
    return _run(
        _nematus_gru, x, (h0,), parameters, mask,
        biases=tuple(biases), masking=masking, reverse=reverse, norm=norm, partial=partial,
    )  # fmt: skip


def gru(
    x: tf.Tensor,
    h0: tf.Tensor,
    parameters: Mapping[str, tf.Tensor],
    *,
    mask: tf.Tensor | None = None,
    norm: CellNorm = "none",
    partial: float = PARTIAL,
) -> tf.Tensor:
    """The GRU of the authors' Theano code: see rmsnorm.nematus.protocol.Cells.gru.

    Example:
        >>> weights = {"W": tf.ones((1, 2)), "U": tf.ones((1, 2)), "b": tf.zeros(2)}
        >>> weights |= {"Wx": tf.ones((1, 1)), "Ux": tf.ones((1, 1)), "bx": tf.zeros(1)}
        >>> mask = tf.constant([[1.0], [0.0]])
        >>> gru(tf.zeros((2, 1, 1)), tf.ones((1, 1)), weights, mask=mask).numpy().round(4).ravel()
        array([0.8988, 0.8988], dtype=float32)
    """
    own = recurrent.renamed(parameters, norm)
    return nematus_gru(x, h0, own, mask=mask, masking="carry", norm=norm, partial=partial)


def lstm(
    x: tf.Tensor,
    h0: tf.Tensor,
    c0: tf.Tensor,
    parameters: Mapping[str, tf.Tensor],
    *,
    mask: tf.Tensor | None = None,
    norm: CellNorm = "none",
    partial: float = PARTIAL,
) -> tuple[tf.Tensor, tf.Tensor]:
    """The LSTM of the authors' Theano code: see rmsnorm.nematus.protocol.Cells.lstm.

    Example:
        >>> weights = {"W": tf.ones((1, 4)), "U": tf.ones((1, 4)), "b": tf.zeros(4)}
        >>> h, c = lstm(tf.zeros((1, 1, 1)), tf.ones((1, 1)), tf.ones((1, 1)), weights)
        >>> h.numpy().round(4).ravel(), c.numpy().round(4).ravel()
        (array([0.6277], dtype=float32), array([1.2878], dtype=float32))
    """
    return _run(_lstm, x, (h0, c0), parameters, mask, norm=norm, partial=partial)


def _run(
    function: Any, x: Any, state: Any, parameters: Mapping[str, Any], mask: Any, *, norm: CellNorm, **options: Any
) -> Any:
    """The function as a graph; all arguments become tensors."""
    check_norm(norm)
    values = {name: tf.convert_to_tensor(value) for name, value in parameters.items()}
    tensors = [tf.convert_to_tensor(array) for array in ([x, *state] if mask is None else [x, *state, mask])]
    return _graphs.run(function, values, *tensors, norm=norm, **options)


def _nematus_gru(
    values: Any, x: tf.Tensor, h0: tf.Tensor, mask: tf.Tensor | None = None, *,
    biases: Sequence[Bias], norm: CellNorm, partial: float, **options: Any,
) -> tf.Tensor:  # fmt: skip
    return recurrent.nematus_level(
        Parameters(operations, values, norm, partial=partial), x, h0, biases, mask, **options
    )


def _lstm(
    values: Any, x: tf.Tensor, h0: tf.Tensor, c0: tf.Tensor, mask: tf.Tensor | None = None, *,
    norm: CellNorm, partial: float,
) -> tuple[tf.Tensor, tf.Tensor]:  # fmt: skip
    p = Parameters(operations, values, norm, partial=partial)
    return recurrent.lstm(p, x, h0, c0, mask)
