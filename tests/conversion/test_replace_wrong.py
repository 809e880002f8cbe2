"""replace: norms that are wrong in one circumstance of a call stay as they are, beside right ones that are replaced."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch_layers import LlamaRMSNorm  # noqa: E402

from rmsnorm.conversion import replace  # noqa: E402

sys.path.append(str(Path(__file__).parents[1] / "parity"))
from wrong_circumstances import WRONG  # noqa: E402

WIDTHS = {
    "64 rows of 128": 128,
    "multiples of 8 from 256": 256,
    "one wide row": 128,
    "width 768": 768,
    "width 1024": 1024,
}
WORDS = {  # of the line, where the fault has a level of its own
    "one wide row": "in a call of 1 row", "no_grad": "under no_grad", "inference": "in inference mode",
    "autocast": "in autocast", "rows beyond 64-row tiles": "'8,209 rows'", "strided gain": "strided gain",
    "frozen gain": "'frozen gain'",
    "frozen x": "'frozen x'", "expanded dy": "; expanded dy'", "a second backward pass": "'a second backward pass'",
}  # fmt: skip
OTHERS = ("y with gradients", "a row of NaN", "unaligned", "static output", "the first shape", "1,024 to 4,096 rows")
NAMES = [*WIDTHS, *(name for name in WORDS if name not in WIDTHS), *OTHERS]


def wrong(name: str) -> Any:
    """A module of a class of its own that computes a wrong norm."""

    class WrongNorm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return WRONG[name](x, self.weight)

    return WrongNorm(WIDTHS.get(name, 72))


@pytest.mark.parametrize("name", NAMES)
def test_a_norm_that_is_wrong_in_one_circumstance_stays(name: str) -> None:
    """And the line says in which, in the words of check. All 20: the comparison on few rows took 14 of them."""
    layer = wrong(name)
    kind = type(layer)
    (entry,) = replace(layer)
    assert (entry.variant, type(layer)) == (None, kind)
    assert WORDS.get(name, "") in entry.why


def test_right_norms_beside_a_wrong_one_are_replaced() -> None:
    model = nn.Sequential(LlamaRMSNorm(72), wrong("1,024 to 4,096 rows"), nn.RMSNorm(72), LlamaRMSNorm(72))
    assert [entry.variant is not None for entry in replace(model)] == [True, False, True, True]
