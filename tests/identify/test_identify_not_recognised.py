"""What is no RMSNorm, or has a gate of no known function, is not recognised, and the report says why."""

from __future__ import annotations

import pytest
import torch_zoo as zoo
from torch_zoo import torch

from rmsnorm.identify import identify


@pytest.mark.filterwarnings("ignore:You passed `rms_scaling=True`")
def test_a_root_of_the_variance_is_no_rmsnorm():
    keras = pytest.importorskip("keras")
    identity = identify(keras.layers.LayerNormalization(rms_scaling=True))
    assert (identity.kind, identity.recognised) == ("rms_scaling", False), identity.text
    assert "is not RMSNorm: x is divided by the root of its variance" in identity.headline


@pytest.mark.parametrize(
    ("function", "sentence"),
    [(zoo.writes, "it writes to its arguments: x"), (zoo.slow, "slow took more than its limit of 1 s")],
)
def test_a_target_that_misbehaves_gets_a_sentence(function, sentence):
    identity = identify(function, framework="torch", time_limit=1.0)
    assert any(sentence in defect for defect in identity.defects), identity.text
    assert not identity.recognised


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("act", "is_known"),
    [
        (lambda z: z.sigmoid(), True),
        (lambda z: torch.nn.functional.silu(z.clamp(max=10)), False),
        (lambda z: torch.nn.functional.relu6(z), False),
        (lambda z: torch.nn.functional.hardswish(z), False),
        (lambda z: z * torch.sigmoid(1.702 * z), False),
        (lambda z: torch.where(z == 0, 1.0, torch.nn.functional.silu(z)), False),
    ],
    ids=["sigmoid", "silu up to 10", "relu6", "hardswish", "quick gelu", "0"],
)
def test_a_gate_that_is_cut_off_or_unknown_says_nothing_false_of_the_norm(act, is_known, before):
    kind = type("Norm", (zoo.Required,), {"before": before, "act": lambda self, z: act(z)})
    identity = identify(kind)
    if not is_known:
        assert identity.kind == "none"
        assert "the gate acts in no known way" in identity.text
        return
    assert not identity.defects, identity.text
    assert not [words for words in identity.differences("standard") if not words.startswith("gate_")], identity.text
