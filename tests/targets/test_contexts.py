"""A norm is what it is, whatever modes of PyTorch the caller is in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")

from rmsnorm.identify import identify  # noqa: E402
from rmsnorm.parity import check  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_circumstances")


def norm(x: Any, weight: Any) -> Any:
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype)


class Norm(torch.nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(dim))

    def forward(self, x: Any) -> Any:
        return norm(x, self.weight)


def counter() -> Any:
    return pytest.importorskip("torch.utils.flop_counter").FlopCounterMode(display=False)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "flop counter": counter,
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_no_context_of_the_caller_makes_a_defect(name: str) -> None:
    with CONTEXTS[name]():
        if name == "flop counter":  # it puts hooks on every module
            result = identify(Norm)
            assert result.recognised, result.text
        report = check(norm, dtypes="float32")
        assert report.passed, report.text


def test_the_modes_of_the_caller_are_there_afterwards() -> None:
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), counter() as counted:
        identify(Norm, gradients=False)
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert counted.get_total_flops() == 2 * 4**3
