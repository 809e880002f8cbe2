"""``rmsnorm gains --to`` writes w in place of 1 + w and back: exactly, or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from commands import rmsnorm

from rmsnorm.identify import identify_checkpoint, rewrite_gains
from rmsnorm.numpy_impl import rms_norm

numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
NORM = "model.layers.{}.input_layernorm.weight"


def written(path: Path, dtype: Any = np.float32, mean: float = 1.0, **more: Any) -> dict[str, Any]:
    """A file with three gains near ``mean`` that are multiples of 2^-7, an embedding, and more."""
    random = np.random.default_rng(3)
    arrays = {NORM.format(i): (mean + random.integers(-30, 31, 64) / 128).astype(dtype) for i in range(3)}
    arrays |= {"model.embed_tokens.weight": random.normal(size=(8, 4)).astype(dtype), **more}
    numpy.save_file(arrays, path, metadata={"format": "pt"})
    return arrays


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_y_is_the_same_and_the_way_back_gives_the_same_bytes(dtype: Any, tmp_path: Path) -> None:
    source, there, back = (tmp_path / f"{name}.safetensors" for name in "abc")
    arrays = written(source, dtype)
    before = source.read_bytes()
    rewritten = rewrite_gains(source, there, "gemma")
    assert rewritten.changed == {NORM.format("*"): (3, -1.0)}
    found = numpy.load_file(there)
    x = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
    for name, array in arrays.items():
        if "norm" in name:
            y = rms_norm(x, array.astype(np.float64), variant="llama", eps=1e-6, out_dtype="float64")
            same = rms_norm(x, found[name].astype(np.float64), variant="gemma", eps=1e-6, out_dtype="float64")
            np.testing.assert_allclose(same, y, rtol=1e-6)
        else:
            assert found[name].tobytes() == array.tobytes()
    assert identify_checkpoint(there, "gemma").agrees
    rewrite_gains(there, back, "llama", "gemma")
    assert back.read_bytes() == before == source.read_bytes()


def test_a_gain_that_would_lose_a_bit_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    source, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    gain = np.full(64, 1.0, ml_dtypes.bfloat16)
    gain[5] = 2.0**-9  # less 1 it has 9 digits
    written(source, ml_dtypes.bfloat16, **{NORM.format(7): gain})
    with pytest.raises(ValueError, match=r"1 of 64 elements of model\.layers\.7\..* bfloat16, .*float32 first"):
        rewrite_gains(source, out, "gemma")
    assert sorted(tmp_path.iterdir()) == [source]


def test_what_cannot_be_told_is_asked_and_what_contradicts_is_refused(tmp_path: Path) -> None:
    source, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    written(source, mean=0.5)
    with pytest.raises(ValueError, match=r"nothing shows whether .*; name the variant .*--variant"):
        rewrite_gains(source, out, "gemma")
    assert rewrite_gains(source, out, "gemma", "llama").changed == {NORM.format("*"): (3, -1.0)}
    written(source)
    with pytest.raises(ValueError, match="gemma's offset 1 every norm's y is 2 times as large"):
        rewrite_gains(source, out, "llama", "gemma")
    with pytest.raises(ValueError, match="the file that is read is never written to"):
        rewrite_gains(source, source, "gemma")
    with pytest.raises(ValueError, match=r"expected a \.safetensors file to rewrite"):
        rewrite_gains(tmp_path, out, "gemma")


def test_what_is_right_already_and_a_layernorm_are_copied(tmp_path: Path) -> None:
    source, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    more = {"ln_f.weight": np.ones(8, np.float32), "ln_f.bias": np.zeros(8, np.float32)}
    written(source, mean=0.0, **more)
    rewritten = rewrite_gains(source, out, "gemma")
    assert rewritten.kept == {
        NORM.format("*"): "gemma has the same", "ln_f.weight": "it has a bias beside it, as in a LayerNorm"
    }  # fmt: skip
    assert out.read_bytes() == source.read_bytes()


def test_the_command(tmp_path: Path) -> None:
    source, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    written(source)
    assert rmsnorm("gains", source, out, "--to", "gemma").stdout.splitlines() == [
        "model.layers.*.input_layernorm.weight: 3 tensors, each -1", f"written to {out}",
    ]  # fmt: skip
    assert json.loads(rmsnorm("gains", source, out, "--to", "gemma", "--json").stdout)["path"] == str(out)
    for arguments, words in (
        ((source, "--to", "gemma"), "the file to write is missing"),
        ((source, out), "--to VARIANT is missing"),
    ):
        refused = rmsnorm("gains", *arguments)
        assert refused.exit_code == 2
        assert words in refused.stderr
