"""The recurrent cells over whole sequences as the functions that users call, for a framework that runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rmsnorm.nematus.cells import PARTIAL, CellNorm
from rmsnorm.nematus.config import Bias
from rmsnorm.nematus.models import recurrent
from rmsnorm.nematus.models.operations import Array


class Functions(NamedTuple):
    """The functions of protocol.Cells."""

    nematus_gru: Callable[..., Any]
    gru: Callable[..., Any]
    lstm: Callable[..., Any]


def functions(run: Callable[..., Any], module: str) -> Functions:
    """The functions of a module of a framework.

    run: ``run(function, parameters, *arrays, norm=..., partial=..., **options)`` calls a function of recurrent.
    """

    def nematus_gru(
        x: Array,
        h0: Array,
        parameters: Mapping[str, Array],
        *,
        biases: Sequence[Bias] = ("input",),
        mask: Array | None = None,
        masking: Literal["zero", "carry"] = "zero",
        reverse: bool = False,
        norm: CellNorm = "none",
        partial: float = PARTIAL,
    ) -> Array:
        """Nematus's GRU with deep transition: see rmsnorm.nematus.protocol.Cells.nematus_gru."""
        return run(
            recurrent.nematus_level, parameters, x, h0, mask,
            norm=norm, partial=partial, biases=tuple(biases), masking=masking, reverse=reverse,
        )  # fmt: skip

    def gru(
        x: Array,
        h0: Array,
        parameters: Mapping[str, Array],
        *,
        mask: Array | None = None,
        norm: CellNorm = "none",
        partial: float = PARTIAL,
    ) -> Array:
        """The GRU of the authors' Theano code: see rmsnorm.nematus.protocol.Cells.gru."""
        own = recurrent.renamed(parameters, norm)
        return nematus_gru(x, h0, own, mask=mask, masking="carry", norm=norm, partial=partial)

    def lstm(
        x: Array,
        h0: Array,
        c0: Array,
        parameters: Mapping[str, Array],
        *,
        mask: Array | None = None,
        norm: CellNorm = "none",
        partial: float = PARTIAL,
    ) -> tuple[Array, Array]:
        """The LSTM of the authors' Theano code: see rmsnorm.nematus.protocol.Cells.lstm."""
        h, c = run(recurrent.lstm, parameters, x, h0, c0, mask, norm=norm, partial=partial)
        return h, c

    for function in (nematus_gru, gru, lstm):
        function.__module__, function.__qualname__ = module, function.__name__
    return Functions(nematus_gru, gru, lstm)
