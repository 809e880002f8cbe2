"""identify: other names, axes and arguments, JSON, and its findings. test_zoo_identify.py has a row for a norm."""

from __future__ import annotations

import json

import numpy_zoo
import pytest
import torch_zoo
from torch_zoo import torch

from rmsnorm import PRESETS
from rmsnorm.identify import identify
from rmsnorm.identify.names import described


def test_presets_with_the_same_numbers_are_one_with_several_names():
    identity = identify(numpy_zoo.standard, framework="numpy")
    assert identity.headline.endswith("is RMSNorm: the variant standard")
    assert [row.word for row in identity.rows if row.name == "also known as"] == ["gemma4, olmo2, keras"]
    assert "also known as" in identity.text


def test_shape_axis_and_options_are_as_asked():
    with pytest.raises(ValueError, match="requires 'condition', whose value cannot be guessed"):
        identify(torch_zoo.channels)
    identity = identify(
        torch_zoo.channels, framework="torch", shape=(4, 64, 3, 2), axis=1, init={"condition": torch.zeros(1)}
    )
    assert "is RMSNorm over axis 1 of 4 (not the last): the variant standard" in identity.headline
    assert identity.recognised
    assert [identity.is_over(axis) for axis in (None, 1, -3, (1,), 2, (1, 2))] == [
        False,
        True,
        True,
        True,
        False,
        False,
    ]


def test_without_gradients_none_are_asked_for():
    asked = []

    def norm(x, weight):
        asked.append(x.requires_grad)
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight)

    assert identify(norm, gradients=False).recognised
    assert not any(asked)
    assert identify(norm)["gradients"] == "agree"
    assert any(asked)


def test_an_identity_is_written_as_json():
    identity = identify(torch_zoo.AllInT)
    data = json.loads(json.dumps(identity.json))
    assert data["variant"] == json.loads(identity.variant.json)
    assert {finding["name"] for finding in data["findings"]} == {finding.name for finding in identity.findings}
    assert (data["kind"], data["recognised"]) == (identity.kind, identity.recognised)


def test_a_fraction_is_written_as_one():
    assert described(PRESETS["torch"].replace(partial=0.25, eps=1e-5), {"partial": 0.25}).endswith("partial is 1/4")
