"""What `check` asks beside the zoo: presets, layers and widths of models, groups, batches, compiled code."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import zoo

from rmsnorm import Quantisation, Variant, numpy_impl
from rmsnorm.identify import identify
from rmsnorm.numpy_impl import fast
from rmsnorm.parity import check, check_quantised
from rmsnorm.parity.batches import BATCHES
from rmsnorm.parity.design import levels_of
from rmsnorm.targets import open_target

few = pytest.mark.usefixtures("few_circumstances")
BEFORE = Variant.get("llama").replace(gate_position="before")
ALL = {"y", "dx", "dscale"}


def quantities(records: Any) -> set[str]:
    return {record.quantity for record in records}


@few
@pytest.mark.parametrize(
    ("preset", "dtype"),
    [("llama", "bfloat16"), ("zhang_tf", "float32"), ("x_transformers", "bfloat16"), ("lasagne", "float32")],
)
def test_the_golden_is_every_kind_of_preset(preset: str, dtype: str) -> None:
    """With every option that a case can pass to a function."""

    def golden(x: Any, weight: Any, bias: Any, mask: Any = None, residual: Any = None) -> Any:
        return fast.rms_norm(x, weight, bias, variant=preset, mask=mask, residual=residual)

    result = check(golden, preset, framework="numpy", dtypes=dtype, extremes=True)
    assert result.passed, result.text
    asked = [{*levels_of(record.case), *zoo.options_of(record.case)} for record in result.run.records]
    assert {"mask", "residual"} <= set().union(*asked)


@few
def test_a_function_in_bfloat16_must_have_the_right_bits() -> None:
    """One that rounds after the gain is not llama, although hardly any element is two ulps off."""

    def once(x: Any, weight: Any) -> Any:
        y = numpy_impl.rms_norm(x, weight, variant="standard")
        return y if x.dtype == weight.dtype else y.astype(np.promote_types(x.dtype, weight.dtype))

    failures = check(once, "llama", dtypes="bfloat16", framework="numpy").run.failures
    assert any(failure.parity_ratio <= failure.bound for failure in failures), "only the ends of a rounding see it"


@few
@pytest.mark.parametrize("altered", [False, True])
def test_a_quantisation_is_named(altered: bool) -> None:
    """And one that was altered is not named as its preset."""
    quantisation = Quantisation.get("vllm.dynamic_fp8").replace(**({"scale_floor": 0.0} if altered else {}))

    def fused(x: Any, scale: Any, eps: float, residual: Any = None) -> Any:
        return numpy_impl.rms_norm_quantised(x, scale, residual=residual, eps=eps, quantisation=quantisation)

    result = check_quantised(fused, quantisation, dtypes="float32", framework="numpy")
    assert f"fused is vllm.dynamic_fp8{' with scale_floor=0.0' if altered else ''}: " in result.text


# Layers of other packages.

CLASSES = {
    "LlamaRMSNorm": ("llama", "llama"), "GemmaRMSNorm": ("gemma", "gemma"), "T5LayerNorm": ("t5", "t5"),
    "Qwen3RMSNorm": ("qwen3", "llama"), "Olmo2RMSNorm": ("olmo2", "olmo2"), "RMSNorm": ("", "torch"),
}  # fmt: skip


@few
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(("name", "width", "dtype"), [
    ("LlamaRMSNorm", 768, "bfloat16"), ("LlamaRMSNorm", 8192, "float32"), ("GemmaRMSNorm", 4096, "float16"),
    ("T5LayerNorm", 768, "bfloat16"), ("Qwen3RMSNorm", 8192, "float32"), ("Olmo2RMSNorm", 4096, "float16"),
    ("RMSNorm", 768, "bfloat16"), ("RMSNorm", 4096, "float16"),
    ("LlamaRMSNorm", 5120, None), ("T5LayerNorm", 64, None), ("T5LayerNorm", 5120, None),
])  # fmt: skip
def test_layers_agree_at_the_widths_of_models(name: str, width: int, dtype: str | None) -> None:
    """Roundings are within the bounds, and so is a float32 sum that errs to one side beside an outlier.

    That is no eps that acts as a share of the largest |x| either, which identify is asked (no dtype).
    """
    family, variant = CLASSES[name]
    pytest.importorskip("transformers" if family else "torch")
    module = import_module(f"transformers.models.{family}.modeling_{family}" if family else "torch.nn")
    layer = getattr(module, name)(width)
    if dtype is None:
        found = identify(layer, gradients=False)
        assert (found.recognised, found.variant.name) == (True, variant), found.text
        return
    result = check(layer, variant, dtypes=dtype)
    assert result.passed, result.text
    assert quantities(result.run.records) == ALL
    if (name, width) == ("RMSNorm", 4096):
        assert not check(layer, "llama", dtypes="bfloat16").passed, "another rounding does not agree there"


@few
@pytest.mark.torch
def test_groups() -> None:
    """Of 16 elements, of 8, of all, and every fourth element: each is right for itself alone."""
    layers = pytest.importorskip("zoo_torch")
    sixteen, eight = (layers.plain(f"Of{size}", layers.Mamba2, size=size) for size in (16, 8))
    options: dict[str, Any] = {"dtypes": "bfloat16", "group_size": 16}
    right = check(sixteen, BEFORE, **options)
    assert right.passed, right.text
    assert {True, False} == {"gate" in zoo.options_of(record.case) for record in right.run.records}
    for wrong in (eight, layers.plain("Apart", sixteen, axis=-2), layers.torch.nn.RMSNorm):
        assert {"y", "dx"} <= quantities(check(wrong, BEFORE, **options).run.failures)
    assert check(sixteen(48), BEFORE, **options).passed
    with pytest.raises(ValueError, match="group_size is 7, expected a positive divisor of the width"):
        check(sixteen(48), BEFORE, group_size=7)


@few
@pytest.mark.tf
@pytest.mark.needs("keras>=3.9", "it is about keras.layers.RMSNormalization, which is of 3.9")
def test_keras() -> None:
    tf, keras = pytest.importorskip("tensorflow"), pytest.importorskip("keras")
    result = check(keras.layers.RMSNormalization(), "keras", dtypes=["float32", "bfloat16"])
    assert result.passed, result.text
    assert quantities(result.run.records) == ALL
    assert not check(keras.layers.LayerNormalization(epsilon=1e-6), "keras", dtypes="float32").passed

    def eager_only(x: Any, weight: Any) -> Any:
        y = x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True) + 1e-6) * tf.cast(weight, x.dtype)
        return y if tf.executing_eagerly() else 2 * y

    assert check(eager_only, dtypes="float32").passed
    assert "y: compiled: at (" in check(eager_only, dtypes="float32", compiled=True).text


@few
@pytest.mark.flax
def test_flax_and_jax() -> None:
    """nnx.RMSNorm squares in float32; of JAX, whose calls are compiled, less is asked."""
    nnx, jax = pytest.importorskip("flax.nnx"), pytest.importorskip("jax")
    result = check(nnx.RMSNorm(12, rngs=nnx.Rngs(0)), "flax", dtypes="float32", extremes=True)
    assert all({"huge", "NaN under the mask"} & {*levels_of(record.case)} for record in result.run.failures)
    assert quantities(result.run.records) == ALL

    def norm(x: Any) -> Any:
        wide = x.astype("float32")
        return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)

    result = check(norm, framework="jax", dtypes=["float32", "bfloat16"])
    assert result.passed, result.text
    assert "not compared: some rows, widths and calls before: only with strength=2 or more, or --all" in result.text
    assert not {record.case for record in result.run.records if "8,209 rows" in record.case}
    assert quantities(result.run.records) == {"y", "dx"}


# Batches, and what is compiled.


@few
@pytest.mark.torch
def test_rows_that_depend_on_their_number_and_calls_that_differ() -> None:
    """The norm is right in every case, so that `identify` names the variant."""
    layers = pytest.importorskip("zoo_torch")
    asked: dict[str, Any] = {"dtypes": "float32", "batch_invariant": True}
    right = check(zoo.standard, framework="torch", **asked)
    assert right.passed, right.text
    assert quantities(r for r in right.run.records if r.case == BATCHES) == ALL
    assert identify(layers.blocks_by_rows).recognised
    report = check(layers.blocks_by_rows, **asked)
    assert {record.case for record in report.run.failures} == {BATCHES}
    assert "'batches' f32 y: y of a row depends on how many rows there are: from 256 rows on, " in report.text
    calls = iter(range(10**6))

    class Unsteady(layers.torch.autograd.Function):  # type: ignore[misc, name-defined, unused-ignore]
        @staticmethod
        def forward(ctx: Any, weight: Any) -> Any:
            return weight.clone()

        @staticmethod
        def backward(ctx: Any, dw: Any) -> Any:
            return dw * (1 + next(calls) % 2 * 2.0**-23)

    report = check(lambda x, weight: zoo.standard(x, Unsteady.apply(weight)), framework="torch", **asked)
    (sentence,) = [record.detail for record in report.run.failures if record.case == BATCHES]
    assert sentence.startswith("dscale is not the same in two equal calls: ")


@few
@pytest.mark.torch
def test_rows_of_what_is_compiled_are_asked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler of this target makes another function, whose rows depend on how many there are."""
    layers = pytest.importorskip("zoo_torch")
    target, changed = (open_target(norm, framework="torch") for norm in (zoo.standard, layers.blocks_by_rows))
    monkeypatch.setattr(type(target), "compiled", property(lambda self: changed))
    options: dict[str, Any] = {"dtypes": "float32", "gradients": False, "batch_invariant": True}
    assert check(target, **options).passed
    assert BATCHES in {record.case for record in check(target, **options, compiled=True).run.failures}
