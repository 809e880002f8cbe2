"""Names that users spell in several ways, and what is said of them in one way: dtypes, families, extras, lazy names."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import typer

import rmsnorm
from rmsnorm import dtypes, numpy_impl
from rmsnorm.frameworks import FRAMEWORKS

X = np.ones((4, 16), np.float32)
LAZY = {
    "rmsnorm": ["conversion", "torch_impl"],
    "rmsnorm.conversion": ["replace"],
    "rmsnorm.nematus": ["load"],
    "rmsnorm.parity": ["check"],
    "rmsnorm.tf_impl": ["RMSNormalization", "rms_norm"],
    "rmsnorm.flax_impl": ["RMSNorm"],
}


def test_one_sentence_says_what_installs_an_extra():
    texts = {path: path.read_text(encoding="utf-8") for path in Path(rmsnorm.__file__).parent.rglob("*.py")}
    lines = [(path.name, line) for path, text in texts.items() for line in text.splitlines()]
    sentences = [(name, line) for name, line in lines if re.search("(?<!as in )pip install (?!triton)", line)]
    assert {name for name, _ in sentences} == {"errors.py"}
    assert {extra for text in texts.values() for extra in re.findall(r"install\([\"'](\w+)", text)} == {
        "jit",
        "plot",
        "torch",
    }


BF16 = ["bf16", "bfloat16", "torch.bfloat16", "jnp.bfloat16", "tf.bfloat16", ml_dtypes.bfloat16, np.dtype("bfloat16")]


@pytest.mark.parametrize("dtype", BF16, ids=str)
def test_a_dtype_has_one_name_however_it_is_spelled(framework, dtype):
    assert framework.rms_norm(X, out_dtype=dtype).dtype.name == "bfloat16"


def test_the_dtypes_of_the_frameworks_are_spellings(framework):
    package = {"torch": "torch", "tf": "tensorflow", "flax": "jax.numpy", "numpy": "ml_dtypes"}[framework.name]
    bfloat16 = importlib.import_module(package).bfloat16
    assert dtypes.spelled(bfloat16) == "bfloat16"
    assert framework.rms_norm(X, out_dtype=bfloat16).dtype.name == "bfloat16"


def test_a_dtype_is_spelled_in_options_as_in_arguments(capsys):
    from rmsnorm.cli.usage import choices
    from rmsnorm.parity import check

    assert choices("dtype", ["bf16", "torch.bfloat16"], dtypes.FLOATS) == ("bfloat16",)
    assert check(lambda x: x, dtypes=np.float16).run.records[0].dtype == "float16"
    sentence = r"dtype is 'bf17', expected 'float16', 'bfloat16', 'float32' or 'float64'; choose one of these"
    with pytest.raises(ValueError, match=f"^check: {sentence}$"):
        check(lambda x: x, dtypes="bf17")
    with pytest.raises(typer.Exit):
        choices("dtype", ["bf17"], dtypes.FLOATS)
    assert re.search(sentence, " ".join(capsys.readouterr().err.split()))


def test_a_family_of_models_has_a_variant():
    sentence = (
        "variant is 'Qwen3', a family of models, expected a name of a variant; its variant is llama, with eps 1e-06"
    )
    with pytest.raises(ValueError, match=f"^rms_norm: {sentence}$"):
        numpy_impl.rms_norm(X, variant="Qwen3")


@pytest.mark.parametrize("package", LAZY)
def test_a_lazy_package_lists_its_names(package):
    """Whether they were imported before or not."""
    for row in FRAMEWORKS.values():
        if package.endswith(row.folder):
            pytest.importorskip(row.package)
    module = importlib.import_module(package)
    assert {*module.__all__, *LAZY[package]} <= {*module.__dir__()}
