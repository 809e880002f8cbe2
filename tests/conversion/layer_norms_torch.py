"""Models of PyTorch with LayerNorm for the tests of their conversion, and how near its results have to be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from conversions import IDS, ROUNDING, SINGLE, distance, shown

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from rmsnorm.conversion.layer_norm import Conversion, to_rms_norm  # noqa: E402


def randomised(model: Any) -> Any:
    """With gains, offsets and means of weights that show."""
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            draw = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.add_((0.2 + 0.3 * draw).to(parameter.dtype))
    return model.eval()


def tensors(value: Any) -> list[Any]:
    """Those of a result of transformers or of a module."""
    if hasattr(value, "to_tuple"):
        value = value.to_tuple()
    values = value if isinstance(value, tuple) else (value,)
    return [tensor for tensor in values if isinstance(tensor, torch.Tensor)]


def run(model: Any, *inputs: Any) -> list[Any]:
    with torch.no_grad():
        return [tensor.double().numpy() for tensor in tensors(model(*inputs))]


def assert_equal(model: Any, result: Conversion, *inputs: Any, bound: float = ROUNDING) -> None:
    """In float32, and in float64 when converted there; ``bound`` is that of a model with casts to float32."""
    for before, after in zip(run(model, *inputs), run(result.model, *inputs), strict=True):
        assert distance(before, after) <= SINGLE
    wide = copy.deepcopy(model).double()
    inputs = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs)
    again = to_rms_norm(wide, *inputs)
    assert shown(again) == shown(result)
    for before, after in zip(run(wide, *inputs), run(again.model, *inputs), strict=True):
        assert distance(before, after) <= bound


def net(forward: Callable[..., Any], **parts: Any) -> Any:
    """A module that calls ``forward`` with its modules, its parameters and x."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.m, self.p = nn.Module(), nn.Module()
            for name, part in parts.items():
                setattr(*((self.p, name, nn.Parameter(part)) if torch.is_tensor(part) else (self.m, name, part)))

        def forward(self, x):
            return forward(self.m, self.p, x)

    return Net()


def sample(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)) if shape else torch.tensor(IDS)
