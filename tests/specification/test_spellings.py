"""Names that users spell in several ways, and what is said of them in one way: dtypes and families."""

from __future__ import annotations

import importlib

import ml_dtypes
import numpy as np
import pytest

from rmsnorm import numpy_impl
from rmsnorm.specification import dtypes

X = np.ones((4, 16), np.float32)
BF16 = ["bf16", "bfloat16", "torch.bfloat16", "jnp.bfloat16", "tf.bfloat16", ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", [*BF16, "its own"], ids=str)
def test_a_dtype_has_one_name_however_it_is_spelled(framework, dtype):
    """Also as that of the framework."""
    package = {"torch": "torch", "tf": "tensorflow", "flax": "jax.numpy", "numpy": "ml_dtypes"}[framework.name]
    dtype = importlib.import_module(package).bfloat16 if dtype == "its own" else dtype
    assert framework.rms_norm(X, out_dtype=dtype).dtype.name == dtypes.spelled(dtype) == "bfloat16"


NO_NAMES = {  # and what is suggested
    "half": "float16",
    "f2": "float16",
    "single": "float32",
    "FLOAT32": "float32",
    " float32": "float32",
    "module.float32": "float32",
    np.dtype(">f4"): "float32",
    "double": "float64",
    "bfloat": "bfloat16",
} | dict.fromkeys((float, "f8", "d", np.longdouble, "complex64", ml_dtypes.float8_e4m3fn, np.float32(3), b"float32"))


@pytest.mark.parametrize("dtype", NO_NAMES, ids=repr)
def test_another_spelling_of_a_dtype_is_refused(framework, dtype):
    """float is float32 in PyTorch and float64 in NumPy; f8 counts bytes in NumPy, and bits where fp8 is used."""
    fix = f"did you mean '{NO_NAMES[dtype]}'[?]" if NO_NAMES[dtype] else "choose one of these"
    sentence = rf"out_dtype is .*, expected 'float16', 'bfloat16', 'float32' or 'float64'; {fix}$"
    with pytest.raises(ValueError, match=f"^rms_norm: {sentence}"):
        framework.rms_norm(X, out_dtype=dtype)


def test_layers_spell_dtypes_as_functions_do():
    torch, nnx, jax = (pytest.importorskip(name) for name in ("torch", "flax.nnx", "jax"))
    from rmsnorm import flax_impl, torch_impl
    from rmsnorm.flax_impl import linen

    rngs, key = nnx.Rngs(0), jax.random.key(0)
    for new, argument, dtype_of in (
        (lambda **o: torch_impl.RMSNorm(16, **o), "dtype", lambda layer: layer.weight.dtype),
        (lambda **o: flax_impl.RMSNorm(16, rngs=rngs, **o), "param_dtype", lambda layer: layer.scale[...].dtype),
        (lambda **o: flax_impl.RMSNorm(16, rngs=rngs, **o), "dtype", lambda layer: layer(X).dtype),
        (linen.RMSNorm, "param_dtype", lambda layer: layer.init(key, X)["params"]["scale"].dtype),
        (linen.RMSNorm, "dtype", lambda layer: layer.init_with_output(key, X)[0].dtype),
    ):
        for dtype in ("bf16", torch.bfloat16, ml_dtypes.bfloat16):
            assert dtypes.spelled(dtype_of(new(**{argument: dtype}))) == "bfloat16"
        for dtype in (float, "double"):
            with pytest.raises(ValueError, match=f"^RMSNorm: {argument} is .*, expected 'float16', 'bfloat16'"):
                new(**{argument: dtype})


@pytest.mark.parametrize(("name", "sentence"), [
    ("Qwen3", "Qwen3', a family of models, expected a name of a variant; its variant is llama, with eps 1e-06$"),
    ("qwen3-next", r"qwen3-next'.*its norms are apex, with a silu .*; gemma, with eps 1e-06 .`rmsnorm variants q"),
])  # fmt: skip
def test_a_family_of_models_has_a_variant(name, sentence):
    with pytest.raises(ValueError, match=f"^rms_norm: variant is '{sentence}"):
        numpy_impl.rms_norm(X, variant=name)


@pytest.mark.parametrize("package", ["rmsnorm", "rmsnorm.conversion", "rmsnorm.nematus", "rmsnorm.parity"])
def test_a_lazy_package_lists_its_names(package):
    module = importlib.import_module(package)
    assert {*module.__all__} <= {*module.__dir__()}
