"""The layer of PyTorch, for the tests that hold for every framework's."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any, ClassVar

import layer_kinds
import torch
from calls import Row
from layer_kinds import PARAMETERS, of_rows
from packaging import version
from torch import nn
from torch.utils.checkpoint import checkpoint

from rmsnorm.torch_impl import RMSNorm

NAMES = {"scale": "weight", "bias": "bias"}


def _saved(layer: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def _stacked(function: Any) -> Any:
    """With parameters for each row: torch.func.stack_module_state makes such arrays of several layers."""

    def stacked(arrays: Any) -> Any:
        same = {name: arrays[name] for name in PARAMETERS}
        every = {name: value.expand(len(arrays["x"]), *value.shape) for name, value in same.items()}
        return (torch.vmap(lambda arrays: function(arrays)[0])({**arrays, **every}),)

    return stacked


class Layer(layer_kinds.Layer):
    KEY = ARRAYS = VARIANT = "torch"
    CLASSES = (RMSNorm, nn.RMSNorm)
    CALL, ATTRIBUTES = "forward", ("normalized_shape", "eps", "elementwise_affine")
    BUILT_IN = ({}, {"eps": 1e-3}, {"axis": (-2, -1)}, {"scale": False}, {"parameters": "x"})
    ROUNDS_ONCE = version.parse(torch.__version__) >= version.parse("2.11")
    LEVELS: ClassVar = {
        "layout": ("rows", "odd rows", "width 1", "two axes", "wide", "tall"), "out": ("as the variant",)
    }  # fmt: skip
    WAYS: ClassVar = {
        "checkpoint": lambda f: lambda arrays: checkpoint(f, arrays, use_reentrant=False),
        "torch.compile": lambda f: torch.compile(f, fullgraph=True, backend="aot_eager"),
        "vmap": of_rows(lambda function: torch.vmap(function, 1, 1)),
        "stacked": _stacked,
    }

    def make(
        self, kind: Any, axis: Any, parameters: str, *, feature_axis: Any = None, scale: bool = True, dtype: Any = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        sizes = self.shape[-len(axis) if isinstance(axis, tuple) else -1 :]
        return kind(sizes, elementwise_affine=scale, dtype=getattr(torch, parameters), **options)

    @classmethod
    def row(cls, row: Row) -> Row | None:
        """There is no bias without a gain."""
        return {**row, "bias": "no bias"} if row["gain"] == "no gain" else row

    @property
    def weights(self) -> dict[str, Any]:
        every = {name: getattr(self.own, own, None) for name, own in NAMES.items()}
        return {name: weight for name, weight in every.items() if weight is not None}

    def assign(self, name: str, value: Any) -> None:
        getattr(self.own, NAMES[name]).data.copy_(value)

    def outputs(self, arrays: Any) -> tuple[Any, ...]:
        weights = {own: arrays[name] for name, own in NAMES.items() if name in arrays}
        more = {name: arrays[name] for name in ("mask", "residual", "gate") if name in arrays}
        result = torch.func.functional_call(self.own, weights, (arrays["x"],), more)
        return result if isinstance(result, tuple) else (result,)

    def write(self, folder: Path) -> None:
        torch.save(self.own.state_dict(), folder / "state.pt")

    def read(self, folder: Path) -> None:
        self.own.load_state_dict(torch.load(folder / "state.pt", weights_only=True), strict=True)

    def copies(self) -> dict[str, Any]:
        return {
            "copy": copy.deepcopy(self.own), "pickle": pickle.loads(pickle.dumps(self.own)), "file": _saved(self.own),
        }  # fmt: skip
