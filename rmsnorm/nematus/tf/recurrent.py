"""The recurrent cells of rmsnorm.nematus.protocol.Cells as functions, and for Keras, which must run on TensorFlow.

In a function with jit_compile=True the tape must be inside, as for all loops of TensorFlow. The layers, and the cells
for keras.layers.RNN, have batch-major sequences, as Keras has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import keras
import tensorflow as tf

from rmsnorm.nematus import cells, protocol
from rmsnorm.nematus.cells import PARTIAL, CellNorm, Shapes
from rmsnorm.nematus.config import Bias
from rmsnorm.nematus.models.parameters import Parameters, project
from rmsnorm.nematus.models.recurrent import CELLS, lstm_step, nematus_deep_step, nematus_input
from rmsnorm.nematus.tf import operations
from rmsnorm.nematus.tf.parameters import Graphs, Named

__all__ = ["GRU", "LSTM", "GRUCell", "LSTMCell", "NematusGRU", "NematusGRUCell", "gru", "lstm", "nematus_gru"]

_graphs: Final = Graphs()


def _call(values: Any, *tensors: tf.Tensor, cell: str, norm: CellNorm, partial: float, **options: Any) -> Any:
    return CELLS[cell](Parameters(operations, values, norm, partial=partial), *tensors, **options)


def _run(cell: str, parameters: Mapping[str, Any], *arrays: Any, norm: CellNorm, **options: Any) -> Any:
    """As a graph; all arguments become tensors. The mask is the last of them, if there is one."""
    cells.check_norm(norm)
    values = {name: tf.convert_to_tensor(value) for name, value in parameters.items()}
    tensors = [tf.convert_to_tensor(array) for array in arrays if array is not None]
    return _graphs.run(_call, values, *tensors, cell=cell, norm=norm, **options)


_cells: Final = protocol.Cells(_run)
nematus_gru, gru, lstm = _cells.nematus_gru, _cells.gru, _cells.lstm


class _Cell(Named):
    """A cell with weights of the shapes that ``shapes`` returns; initial values as in Nematus."""

    def __init__(self, units: int, *, norm: CellNorm = "none", partial: float = PARTIAL, **kwargs: Any) -> None:
        cells.check_norm(norm)
        super().__init__(**kwargs)
        self.units = self.output_size = units
        self.state_size: Any = units
        self.norms: dict[str, Any] = {"norm": norm, "partial": partial}

    def build(self, input_shape: Sequence[int | None]) -> None:
        for name, shape in self.shapes(input_shape[-1]).items():
            self.add_by_name(name, shape, _initializer(name, self.units))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units, **self.norms}


def _initializer(name: str, units: int) -> Any:
    kind = cells.initial(name)
    if kind == "orthogonal":
        return lambda shape, dtype: tf.concat(
            [keras.initializers.Orthogonal()((units, units), dtype) for _ in range(shape[1] // units)], 1
        )
    return keras.initializers.RandomNormal(stddev=0.01) if kind == "normal" else kind


@keras.saving.register_keras_serializable(package="rmsnorm")
class NematusGRUCell(_Cell):
    """One step of NematusGRU, for keras.layers.RNN.

    Args, Raises: as NematusGRU.

    Example:
        >>> layer = keras.layers.RNN(NematusGRUCell(4, biases=("input", "state"), norm="rms"))
        >>> layer(tf.zeros((2, 5, 3))).shape
        TensorShape([2, 4])
    """

    def __init__(self, units: int, *, biases: Sequence[Bias] = ("input",), **kwargs: Any) -> None:
        super().__init__(units, **kwargs)
        self.biases: Any = tuple(biases)

    def shapes(self, size: Any) -> Shapes:
        return cells.nematus_gru_shapes(size, self.units, self.biases, self.norms["norm"])

    def call(self, inputs: Any, states: Any) -> tuple[tf.Tensor, list[tf.Tensor]]:
        p = Parameters(operations, self.tensors(), **self.norms)
        h = nematus_deep_step(p, states[0], nematus_input(p / "gru0", inputs, self.biases[0]), self.biases)
        return h, [h]

    def sequence(self, x: tf.Tensor, h0: tf.Tensor, mask: tf.Tensor | None) -> list[tf.Tensor]:
        return [nematus_gru(x, h0, self.tensors(), biases=self.biases, mask=mask, masking="carry", **self.norms)]

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "biases": list(self.biases)}


@keras.saving.register_keras_serializable(package="rmsnorm")
class GRUCell(_Cell):
    """One step of GRU, for keras.layers.RNN.

    Args, Raises: as GRU.

    Example:
        >>> layer = keras.layers.RNN(GRUCell(4, norm="rms"))
        >>> layer(tf.zeros((2, 5, 3))).shape
        TensorShape([2, 4])
    """

    def shapes(self, size: Any) -> Shapes:
        return cells.gru_shapes(size, self.units, self.norms["norm"])

    def call(self, inputs: Any, states: Any) -> tuple[tf.Tensor, list[tf.Tensor]]:
        p = Parameters(operations, cells.authors_gru(self.tensors(), self.norms["norm"]), **self.norms)
        h = nematus_deep_step(p, states[0], nematus_input(p / "gru0", inputs, "input"), ("input",))
        return h, [h]

    def sequence(self, x: tf.Tensor, h0: tf.Tensor, mask: tf.Tensor | None) -> list[tf.Tensor]:
        return [gru(x, h0, self.tensors(), mask=mask, **self.norms)]


@keras.saving.register_keras_serializable(package="rmsnorm")
class LSTMCell(_Cell):
    """One step of LSTM, for keras.layers.RNN.

    Args, Raises: as LSTM.

    Example:
        >>> layer = keras.layers.RNN(LSTMCell(4, norm="rms"))
        >>> layer(tf.zeros((2, 5, 3))).shape
        TensorShape([2, 4])
    """

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(units, **kwargs)
        self.state_size = [units, units]

    def shapes(self, size: Any) -> Shapes:
        return cells.lstm_shapes(size, self.units, self.norms["norm"])

    def call(self, inputs: Any, states: Any) -> tuple[tf.Tensor, list[tf.Tensor]]:
        p = Parameters(operations, self.tensors(), **self.norms)
        h, c = states
        h, c = lstm_step(p, h, c, project(p, inputs, "W", "b", ("s1", "b1")))
        return h, [h, c]

    def sequence(self, x: tf.Tensor, h0: tf.Tensor, c0: tf.Tensor, mask: tf.Tensor | None) -> list[tf.Tensor]:
        return list(lstm(x, h0, c0, self.tensors(), mask=mask, **self.norms))


class _Layer(keras.layers.RNN):
    """A cell over whole sequences at once; keras.layers.RNN would call the cell for each step."""

    def by_name(self) -> dict[str, keras.Variable]:
        return self.cell.by_name()

    def inner_loop(self, sequences: Any, initial_state: Any, mask: Any, training: bool = False) -> Any:
        if self.unroll or self.zero_output_for_mask:
            return super().inner_loop(sequences, initial_state, mask, training)
        x, mask = (tf.transpose(sequences, (1, 0, 2)), None if mask is None else tf.transpose(mask))
        if self.go_backwards:
            x, mask = x[::-1], None if mask is None else mask[::-1]
        outputs = self.cell.sequence(x, *initial_state, mask)
        last = [output[-1] for output in outputs]
        return last[0], tf.transpose(outputs[0], (1, 0, 2)), last

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["cell"]
        return {**self.cell.get_config(), **config}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(**config)


@keras.saving.register_keras_serializable(package="rmsnorm")
class NematusGRU(_Layer):
    """Nematus's GRU with deep transition, as nematus_gru computes it; masked steps carry the state.

    Args:
        units: features of the states.
        biases, norm, partial: as for nematus_gru.
        **kwargs: of keras.layers.RNN, such as ``return_sequences``, ``go_backwards`` and ``dtype``.

    Call arguments:
        sequences: (batch, length, features).
        initial_state: a list of (batch, units), by default zeros.
        mask: bool, (batch, length), by default that of an Embedding.

    Raises:
        ValueError: there is no such norm.

    Example:
        >>> layer = NematusGRU(4, biases=("input", "state"), norm="rms", return_sequences=True)
        >>> layer(tf.zeros((2, 5, 3))).shape
        TensorShape([2, 5, 4])
    """

    def __init__(
        self,
        units: int,
        *,
        biases: Sequence[Bias] = ("input",),
        norm: CellNorm = "none",
        partial: float = PARTIAL,
        **kwargs: Any,
    ) -> None:
        cell = NematusGRUCell(units, biases=biases, norm=norm, partial=partial, dtype=kwargs.get("dtype"))
        super().__init__(cell, **kwargs)


@keras.saving.register_keras_serializable(package="rmsnorm")
class GRU(_Layer):
    """The GRU of the authors' Theano code, as gru computes it.

    Args, Call arguments, Raises: as NematusGRU, but for biases.

    Example:
        >>> layer = GRU(4, norm="rms")
        >>> layer(tf.zeros((2, 5, 3)), mask=tf.ones((2, 5), bool)).shape
        TensorShape([2, 4])
    """

    def __init__(self, units: int, *, norm: CellNorm = "none", partial: float = PARTIAL, **kwargs: Any) -> None:
        super().__init__(GRUCell(units, norm=norm, partial=partial, dtype=kwargs.get("dtype")), **kwargs)


@keras.saving.register_keras_serializable(package="rmsnorm")
class LSTM(_Layer):
    """The LSTM of the authors' Theano code, as lstm computes it.

    Args, Call arguments, Raises: as NematusGRU, but for biases; initial_state is a list of h and c.

    Example:
        >>> layer = LSTM(4, norm="rms", return_state=True)
        >>> [array.shape for array in layer(tf.zeros((2, 5, 3)))]
        [TensorShape([2, 4]), TensorShape([2, 4]), TensorShape([2, 4])]
    """

    def __init__(self, units: int, *, norm: CellNorm = "none", partial: float = PARTIAL, **kwargs: Any) -> None:
        super().__init__(LSTMCell(units, norm=norm, partial=partial, dtype=kwargs.get("dtype")), **kwargs)
