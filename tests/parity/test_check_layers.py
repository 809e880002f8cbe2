"""`rmsnorm.parity.check` on layers of frameworks and of transformers, gradients included."""

from __future__ import annotations

from typing import Any

import pytest

from rmsnorm import Variant
from rmsnorm.parity import check
from rmsnorm.parity.circumstances import levels_of, options_of


@pytest.mark.slow
def test_torch() -> None:
    """In every circumstance; test_zoo.py has an eighth of them for many layers."""
    zoo = pytest.importorskip("torch_zoo")
    result = check(zoo.torch.nn.RMSNorm, "torch", dtypes="bfloat16")
    assert result.passed, result.text
    assert {record.quantity for record in result.run.records} == {"y", "dx", "dscale"}
    failures = check(zoo.as_if_dy_were_dense, framework="torch", dtypes="float32").run.failures
    assert {record.quantity for record in failures} == {"dx", "dscale"}


@pytest.mark.slow
def test_groups() -> None:
    """Of 16 elements, of 8, of all, and every fourth element: each is right for itself alone."""
    zoo = pytest.importorskip("torch_zoo")

    class Sixteen(zoo.Mamba2):  # type: ignore[misc, name-defined, unused-ignore]
        size = 16

    class Eight(zoo.Mamba2):  # type: ignore[misc, name-defined, unused-ignore]
        size = 8

    class Apart(Sixteen):
        axis = -2

    variant = Variant.get("llama").replace(gate_position="before")
    options: dict[str, Any] = {"dtypes": "bfloat16", "group_size": 16}
    right = check(Sixteen, variant, **options)
    assert right.passed, right.text
    assert {True, False} == {"gate" in options_of(record.case) for record in right.run.records}
    for wrong in (Eight, Apart, zoo.torch.nn.RMSNorm):
        failures = check(wrong, variant, **options).run.failures
        assert {"y", "dx"} <= {record.quantity for record in failures}
    assert check(Sixteen(48), variant, **options).passed
    with pytest.raises(ValueError, match="group_size is 7, expected a positive divisor of the width"):
        check(Sixteen(48), variant, group_size=7)


@pytest.mark.slow
@pytest.mark.needs("keras>=3.9", "it is about keras.layers.RMSNormalization, which is of 3.9")
def test_keras() -> None:
    pytest.importorskip("tensorflow", reason="tensorflow is not installed; pip install '.[tf]'")
    keras = pytest.importorskip("keras", reason="keras is not installed; pip install '.[tf]'")
    result = check(keras.layers.RMSNormalization(), "keras", dtypes=["float32", "bfloat16"])
    assert result.passed, result.text
    assert {record.quantity for record in result.run.records} == {"y", "dx", "dscale"}
    assert not check(keras.layers.LayerNormalization(epsilon=1e-6), "keras", dtypes="float32").passed

    import tensorflow as tf

    def eager_only(x: Any, weight: Any) -> Any:
        y = x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True) + 1e-6) * tf.cast(weight, x.dtype)
        return y if tf.executing_eagerly() else 2 * y

    assert check(eager_only, dtypes="float32").passed
    assert "y: compiled: at (" in check(eager_only, dtypes="float32", compiled=True).text


@pytest.mark.slow
def test_flax() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed; pip install '.[flax]'")
    result = check(nnx.RMSNorm(12, rngs=nnx.Rngs(0)), "flax", dtypes="float32", extremes=True)
    assert {"huge", "NaN under the mask"} >= {
        level for record in result.run.failures for level in levels_of(record.case)
        if level in ("huge", "tiny", "NaN under the mask", "normal")
    }  # fmt: skip
    assert all({"huge", "NaN under the mask"} & {*levels_of(record.case)} for record in result.run.failures)
    assert {record.quantity for record in result.run.records} == {"y", "dx", "dscale"}


def test_on_a_device() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    result = check(torch.nn.RMSNorm, "torch", device="cuda")
    assert result.passed, result.text
