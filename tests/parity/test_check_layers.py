"""`rmsnorm.parity.check` on layers of frameworks and of transformers, gradients included."""

from __future__ import annotations

from typing import Any

import pytest

from rmsnorm import Variant
from rmsnorm.parity import check
from rmsnorm.parity.second import SECOND


@pytest.mark.costly
def test_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
    result = check(torch.nn.RMSNorm, "torch", dtypes="bfloat16")
    assert result.passed, result.text
    assert {record.quantity for record in result.run.records} == {"y", "dx", "dscale"}
    assert check(torch.nn.RMSNorm(24), "torch", dtypes="float32").passed
    assert check(torch.nn.RMSNorm((3, 4), eps=1e-6), "standard", dtypes="float32").passed
    assert check(torch.nn.functional.rms_norm, "torch", dtypes="float32").passed
    assert not check(torch.nn.RMSNorm(24), "llama", dtypes="float32").passed

    class WithDropout(torch.nn.RMSNorm):  # type: ignore[misc, name-defined, unused-ignore]
        def forward(self, x: Any) -> Any:
            return torch.nn.functional.dropout(super().forward(x), 0.1, self.training)

    layer = WithDropout(24).eval()
    result = check(layer, "torch", dtypes="float32")
    assert "; training" in result.text
    assert not layer.training

    def dense_gradient(x: Any, weight: Any) -> Any:
        y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-6)
        if y.requires_grad:
            y.register_hook(lambda dy: dy.as_strided(dy.shape, torch.empty(dy.shape).stride()))
        return y

    result = check(dense_gradient, dtypes="float32")
    assert {record.quantity for record in result.run.failures} == {"dx", "dscale"}


@pytest.mark.costly
@pytest.mark.usefixtures("few_circumstances")
def test_a_gate() -> None:
    """Optional in Mamba-2's class, so that one case has it, and required in Qwen3-Next's, where all have."""
    zoo = pytest.importorskip("torch_zoo")

    class CutOff(zoo.Qwen3Next):
        def act(self, gate: Any) -> Any:
            return super().act(gate.clamp(-10, 10))

    class Constant(zoo.Qwen3Next):
        def act(self, gate: Any) -> Any:
            return super().act(gate.detach())

    before, apex = Variant.get("llama").replace(gate_position="before"), Variant.get("apex").replace(eps=1e-6)
    optional, required = check(zoo.Mamba2, before, dtypes="bfloat16"), check(zoo.Qwen3Next, apex, dtypes="bfloat16")
    for result, cases in (
        (optional, 1),
        (required, len({r.case for r in required.run.records if " of " not in r.case})),
    ):
        assert result.passed, result.text
        named = {r.case for r in result.run.records if r.quantity == "dgate"}  # and circumstances
        assert len({name for name in named if " of " not in name}) == cases
    wrong = {r.case for r in check(zoo.Mamba2, "llama", dtypes="bfloat16").run.failures}
    assert all(name == "gate" or "; gate" in name for name in wrong)
    assert "gate_position is 'after', llama has 'before'" in check(zoo.Qwen3Next, before, dtypes="bfloat16").text
    assert not check(CutOff, apex, dtypes="bfloat16", gradients=False).passed
    assert {r.quantity for r in check(Constant, apex, dtypes="float32").run.failures} == {"dgate"}


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
    assert {"gate", "rows", "odd", "tall", "constant", "wide"} <= {record.case for record in right.run.records}
    for wrong in (Eight, Apart, zoo.torch.nn.RMSNorm):
        failures = check(wrong, variant, **options).run.failures
        assert {"y", "dx"} <= {record.quantity for record in failures}
    assert check(Sixteen(48), variant, **options).passed
    with pytest.raises(ValueError, match="group_size is 7, expected a positive divisor of the width"):
        check(Sixteen(48), variant, group_size=7)


@pytest.mark.costly
@pytest.mark.usefixtures("few_circumstances")
def test_transformers() -> None:
    pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
    pytest.importorskip("transformers", reason="transformers is not installed; pip install '.[dev]'")
    for path, variant in (
        ("llama.modeling_llama:LlamaRMSNorm", "llama"),
        ("gemma.modeling_gemma:GemmaRMSNorm", "gemma"),
        ("t5.modeling_t5:T5LayerNorm", "t5"),
    ):
        result = check(f"transformers.models.{path}", variant, dtypes="bfloat16")
        assert result.passed, result.text
    result = check("transformers.models.llama.modeling_llama:LlamaRMSNorm", "llama", dtypes="float64")
    assert not result.passed, "it computes in float32"


@pytest.mark.slow
@pytest.mark.needs("keras>=3.9", "it is about keras.layers.RMSNormalization, which is of 3.9")
def test_keras() -> None:
    pytest.importorskip("tensorflow", reason="tensorflow is not installed; pip install '.[tf]'")
    keras = pytest.importorskip("keras", reason="keras is not installed; pip install '.[tf]'")
    result = check(keras.layers.RMSNormalization(), "keras", dtypes=["float32", "bfloat16"])
    assert result.passed, result.text
    assert {record.quantity for record in result.run.records} == {"y", "dx", "dscale", SECOND}
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
    assert {record.case for record in result.run.failures} == {"mask", "huge"}
    assert {record.quantity for record in result.run.records} == {"y", "dx", "dscale"}


def test_on_a_device() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    result = check(torch.nn.RMSNorm, "torch", device="cuda")
    assert result.passed, result.text
