"""The recurrent cells of rmsnorm.nematus.protocol.Cells as functions, and as modules; all are time-major."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import init

from rmsnorm.nematus import protocol
from rmsnorm.nematus.cells import PARTIAL, CellNorm, Shapes, gru_shapes, initial, lstm_shapes, nematus_gru_shapes
from rmsnorm.nematus.config import Bias
from rmsnorm.nematus.models.parameters import Parameters
from rmsnorm.nematus.models.recurrent import CELLS
from rmsnorm.nematus.torch import operations
from rmsnorm.nematus.torch.model import Named
from rmsnorm.specification import errors

__all__ = ["GRU", "LSTM", "NematusGRU", "gru", "lstm", "nematus_gru"]


def _run(
    cell: str, parameters: Mapping[str, Tensor], *tensors: Any, norm: CellNorm, partial: float, **options: Any
) -> Any:
    return CELLS[cell](Parameters(operations, parameters, norm, partial=partial), *tensors, **options)


_cells: Final = protocol.Cells(_run)
nematus_gru, gru, lstm = _cells.nematus_gru, _cells.gru, _cells.lstm


class _Layer(Named):
    """A layer with parameters of the shapes that ``shapes`` returns; initial values as in Nematus."""

    shapes: Callable[..., Shapes]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        norm: CellNorm = "none",
        partial: float = PARTIAL,
        device: Any = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        if dtype is not None:
            dtype = getattr(torch, errors.dtype_named(type(self).__name__, "dtype", dtype))
        shapes = self.shapes(input_size, hidden_size, norm=norm)
        super().__init__({name: torch.empty(shape, device=device, dtype=dtype) for name, shape in shapes.items()})
        self.hidden_size = hidden_size
        self.norms: dict[str, Any] = {"norm": norm, "partial": partial}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, value in self.by_name().items():
            kind = initial(name)
            if kind == "orthogonal":
                for square in value.detach().split(self.hidden_size, dim=1):
                    wide = square.to(torch.promote_types(square.dtype, torch.float32))
                    square.copy_(init.orthogonal_(wide))  # 16 bits have no orthogonal matrices
            elif kind == "normal":
                init.normal_(value, std=0.01)
            else:
                init.constant_(value, kind == "ones")

    def begin(self, x: Tensor, state: Tensor | None) -> Tensor:
        return x.new_zeros(x.shape[1], self.hidden_size) if state is None else state

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (f"norm={self.norms['norm']!r}", super().extra_repr())))


class NematusGRU(_Layer):
    """Nematus's GRU with deep transition, as nematus_gru computes it.

    Args:
        input_size, hidden_size: features of x and of the states.
        biases, masking, reverse, norm, partial: as for nematus_gru.
        device, dtype: of the parameters.

    Raises:
        ValueError: there is no such norm.

    Example:
        >>> layer = NematusGRU(3, 4, biases=("input", "state"), norm="rms")
        >>> layer(torch.zeros(5, 2, 3)).shape
        torch.Size([5, 2, 4])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        biases: Sequence[Bias] = ("input",),
        masking: Literal["zero", "carry"] = "zero",
        reverse: bool = False,
        norm: CellNorm = "none",
        partial: float = PARTIAL,
        device: Any = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        self.options: dict[str, Any] = {"biases": tuple(biases), "masking": masking, "reverse": reverse}
        super().__init__(input_size, hidden_size, norm=norm, partial=partial, device=device, dtype=dtype)

    def shapes(self, input_size: int, hidden_size: int, norm: CellNorm) -> Shapes:
        return nematus_gru_shapes(input_size, hidden_size, self.options["biases"], norm)

    def forward(self, x: Tensor, h0: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """The states, (length, batch, hidden_size). Without h0 the first state is zero."""
        return nematus_gru(x, self.begin(x, h0), self.by_name(), mask=mask, **self.norms, **self.options)


class GRU(_Layer):
    """The GRU of the authors' Theano code, as gru computes it.

    Args, Raises: as NematusGRU, but for biases, masking and reverse.

    Example:
        >>> layer = GRU(3, 4, norm="rms")
        >>> layer(torch.zeros(5, 2, 3), mask=torch.ones(5, 2)).shape
        torch.Size([5, 2, 4])
    """

    shapes = staticmethod(gru_shapes)

    def forward(self, x: Tensor, h0: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """The states, (length, batch, hidden_size). Without h0 the first state is zero."""
        return gru(x, self.begin(x, h0), self.by_name(), mask=mask, **self.norms)


class LSTM(_Layer):
    """The LSTM of the authors' Theano code, as lstm computes it.

    Args, Raises: as NematusGRU, but for biases, masking and reverse.

    Example:
        >>> layer = LSTM(3, 4, norm="rms")
        >>> h, c = layer(torch.zeros(5, 2, 3))
        >>> h.shape, c.shape
        (torch.Size([5, 2, 4]), torch.Size([5, 2, 4]))
    """

    shapes = staticmethod(lstm_shapes)

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(h, c), both (length, batch, hidden_size). Without a state (h0, c0) both start with zeros."""
        h0, c0 = state or (None, None)
        return lstm(x, self.begin(x, h0), self.begin(x, c0), self.by_name(), mask=mask, **self.norms)
