"""Recurrent layers as PyTorch modules: Nematus's GRU, the GRU and the LSTM of the authors' Theano code, with any norm.

Sequences are time-major, as for the functions in ``recurrent``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import init

from rmsnorm.nematus.cells import PARTIAL, CellNorm, gru_shapes, lstm_shapes, nematus_gru_shapes
from rmsnorm.nematus.config import Bias
from rmsnorm.nematus.torch.parameters import Named
from rmsnorm.nematus.torch.recurrent import gru, lstm, nematus_gru

__all__ = ["GRU", "LSTM", "NematusGRU"]


class _Cell(Named):
    """A layer with parameters of these shapes; initial values as in Nematus."""

    def __init__(
        self,
        hidden_size: int,
        shapes: Mapping[str, tuple[int, ...]],
        norm: CellNorm,
        partial: float,
        device: Any,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__({name: torch.empty(shape, device=device, dtype=dtype) for name, shape in shapes.items()})
        self.hidden_size = hidden_size
        self.norms: dict[str, Any] = {"norm": norm, "partial": partial}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, value in self.by_name().items():
            leaf = name.rpartition("/")[2]
            if value.ndim == 1:
                init.constant_(value, float(leaf[0] == "s" or leaf == "new_std"))
            elif leaf.startswith(("U", "state")):
                for square in value.detach().split(self.hidden_size, dim=1):
                    init.orthogonal_(square)
            else:
                init.normal_(value, std=0.01)

    def initial(self, x: Tensor, state: Tensor | None) -> Tensor:
        return x.new_zeros(x.shape[1], self.hidden_size) if state is None else state

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (f"norm={self.norms['norm']!r}", super().extra_repr())))


class NematusGRU(_Cell):
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
        dtype: torch.dtype | None = None,
    ) -> None:
        shapes = nematus_gru_shapes(input_size, hidden_size, biases, norm)
        super().__init__(hidden_size, shapes, norm, partial, device, dtype)
        self.options: dict[str, Any] = {"biases": tuple(biases), "masking": masking, "reverse": reverse}

    def forward(self, x: Tensor, h0: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """The states, (length, batch, hidden_size). Without h0 the first state is zero."""
        return nematus_gru(x, self.initial(x, h0), self.by_name(), mask=mask, **self.norms, **self.options)


class GRU(_Cell):
    """The GRU of the authors' Theano code, as gru computes it.

    Args:
        input_size, hidden_size: features of x and of the states.
        norm, partial: as for gru.
        device, dtype: of the parameters.

    Raises:
        ValueError: there is no such norm.

    Example:
        >>> layer = GRU(3, 4, norm="rms")
        >>> layer(torch.zeros(5, 2, 3), mask=torch.ones(5, 2)).shape
        torch.Size([5, 2, 4])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        norm: CellNorm = "none",
        partial: float = PARTIAL,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, gru_shapes(input_size, hidden_size, norm), norm, partial, device, dtype)

    def forward(self, x: Tensor, h0: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """The states, (length, batch, hidden_size). Without h0 the first state is zero."""
        return gru(x, self.initial(x, h0), self.by_name(), mask=mask, **self.norms)


class LSTM(_Cell):
    """The LSTM of the authors' Theano code, as lstm computes it.

    Args:
        input_size, hidden_size: features of x and of the states.
        norm, partial: as for lstm.
        device, dtype: of the parameters.

    Raises:
        ValueError: there is no such norm.

    Example:
        >>> layer = LSTM(3, 4, norm="rms")
        >>> h, c = layer(torch.zeros(5, 2, 3))
        >>> h.shape, c.shape
        (torch.Size([5, 2, 4]), torch.Size([5, 2, 4]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        norm: CellNorm = "none",
        partial: float = PARTIAL,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, lstm_shapes(input_size, hidden_size, norm), norm, partial, device, dtype)

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(h, c), both (length, batch, hidden_size). Without a state (h0, c0) both start with zeros."""
        h0, c0 = state or (None, None)
        return lstm(x, self.initial(x, h0), self.initial(x, c0), self.by_name(), mask=mask, **self.norms)
