"""What gains say: of one checkpoint, and of two forms of it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from commands import rmsnorm
from safetensors.numpy import save_file

from rmsnorm.identify import identify_checkpoint
from rmsnorm.identify.gain_pairs import compare_gains
from rmsnorm.specification.errors import InputValueError

BLOCKS = range(4)
NAMES = [f"model.layers.{i}.{name}_layernorm.weight" for i in BLOCKS for name in ("input", "post_attention")]


def gains(mean: float, seed: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).normal(mean, 0.1, 64).astype(dtype)


def model(mean: float, last: float | None = None) -> dict[str, Any]:
    """Gains of a decoder; that of the last norm is often far from the others."""
    return {
        **{name: gains(mean, seed) for seed, name in enumerate(NAMES)},
        "model.norm.weight": gains(mean if last is None else last, 99),
    }


def saved(path: Path, arrays: dict[str, Any]) -> Path:
    save_file(arrays, path)
    return path


@pytest.mark.parametrize(
    ("arrays", "variant", "agrees", "words"),
    [
        (model(0, last=8.69), "gemma", True, "model.norm.weight has mean 8.7 and fits w, unlike the others: such numb"),
        (model(0) | {"visual.blocks.0.norm1.weight": gains(1, 7)}, "gemma", True, "may differ from the trunk"),
        (model(0) | {"model.norm.weight": gains(1, 7)}, "gemma", False, "left out when the others were converted?"),
        (model(1) | {NAMES[2]: gains(0, 7)}, "llama", False, f"{NAMES[2]} do not fit w: left out"),
        (model(2), "gemma", False, "they lie around 2: 1 was added twice"),
        (model(1, last=1.9), "llama", True, "they fit w, as llama has it"),
        (model(1), "gemma", False, "every norm's y is 2 times as large"),
    ],
)
def test_a_checkpoint(arrays: dict[str, Any], variant: str, agrees: bool, words: str, tmp_path: Path) -> None:
    found = identify_checkpoint(saved(tmp_path / "a.safetensors", arrays), variant)
    assert (found.agrees, words in found.text) == (agrees, True), found.text


def test_gains_that_stay_at_1_in_16_bits(tmp_path: Path) -> None:
    """Steps of an optimiser that are smaller than those of bfloat16 are lost: float32 gains move."""
    steps = np.random.default_rng(0).normal(0, 3e-3, (8, 64))
    for dtype, is_stuck in ((ml_dtypes.bfloat16, True), (np.float32, False)):
        arrays = {name: (1 + steps[i]).astype(dtype) for i, name in enumerate(NAMES)}
        found = identify_checkpoint(saved(tmp_path / f"{is_stuck}.safetensors", arrays))
        said = [line for line in found.text.splitlines() if "are exactly 1, where bfloat16 moves by 0.0039" in line]
        assert bool(said) == is_stuck
        assert found.kinds[0].stuck == np.mean(np.concatenate([arrays[n].astype(float) for n in NAMES[::2]]) == 1)


def in_gguf(path: Path, arrays: dict[str, Any]) -> Path:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed; pip install '.[gguf]'")
    writer = gguf.GGUFWriter(path, "llama")
    for name, values in arrays.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TO_GGUF = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
TO_NEMO = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "post_attention_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def renamed(name: str, changes: dict[str, str], blocks: str, last: str) -> str:
    if name == "model.norm.weight":
        return last
    for old, new in changes.items():
        name = name.replace(old, new)
    return name.replace("model.layers.", blocks)


def test_two_forms_of_a_model(tmp_path: Path) -> None:
    a = saved(tmp_path / "a.safetensors", model(0))
    added = {name: values + np.float32(1) for name, values in model(0).items()}
    g = {renamed(name, TO_GGUF, "blk.", "output_norm.weight"): values for name, values in added.items()}
    n = {renamed(name, TO_NEMO, "decoder.layers.", "decoder.final_layernorm.weight"): v for name, v in model(0).items()}
    b = in_gguf(tmp_path / "b.gguf", g)
    found = compare_gains(a, b, "plus-one")
    assert (found.agrees, found.text) == (True, "B = A + 1 in 9 of 9 norms")
    assert compare_gains(b, a, "minus-one").agrees
    assert not compare_gains(a, b, "same").agrees
    assert compare_gains(a, saved(tmp_path / "n.safetensors", n)).text == "same in 9 of 9 norms"
    missed = in_gguf(tmp_path / "c.gguf", g | {"output_norm.weight": model(0)["model.norm.weight"]})
    found = compare_gains(a, missed, "plus-one")
    assert (found.agrees, found.text.splitlines()) == (
        False, ["B = A + 1 in 8 of 9 norms: not output_norm.weight", "  output_norm.weight: same"],
    )  # fmt: skip
    assert identify_checkpoint(b, "llama").agrees


def test_rounded_twice_as_much_missing_and_another(tmp_path: Path) -> None:
    a = saved(tmp_path / "a.safetensors", model(0))
    rounded = {name: (values + 1).astype(ml_dtypes.bfloat16) for name, values in model(0).items()}
    found = compare_gains(a, saved(tmp_path / "b.safetensors", rounded))
    assert found.agrees
    assert "9 of them are rounded to 16 bits in one of the files" in found.text
    twice = {name: values + np.float32(2) for name, values in model(0).items()}
    assert compare_gains(a, saved(tmp_path / "c.safetensors", twice)).text == "B = A + 2 in 9 of 9 norms"
    few = model(0)
    few.pop(NAMES[0])
    few[NAMES[1]] = few[NAMES[1]] * np.float32(1.5)
    found = compare_gains(a, saved(tmp_path / "d.safetensors", few))
    assert not found.agrees
    assert f"only in A: {NAMES[0]}" in found.text
    assert f"  {NAMES[1]}: another, up to " in found.text
    with pytest.raises(ValueError, match="have no norm in common, expected two forms of one model"):
        compare_gains(a, saved(tmp_path / "e.safetensors", {"a.my_layernorm.weight": gains(1, 0)}))


def test_a_damaged_gguf_is_refused(tmp_path: Path) -> None:
    whole = in_gguf(tmp_path / "a.gguf", {"blk.0.attn_norm.weight": gains(1, 0)}).read_bytes()
    random = np.random.default_rng(0)
    for number in range(60):
        data = bytearray(whole[: random.integers(5, len(whole))] if number % 2 else whole)
        for place in random.integers(4, min(len(data), 200), 6):
            data[place] = random.integers(256)
        (tmp_path / "b.gguf").write_bytes(bytes(data))
        with contextlib.suppress(InputValueError):  # and nothing else
            identify_checkpoint(tmp_path / "b.gguf")


def test_the_command_of_two_files(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a.safetensors", model(0)), saved(tmp_path / "b.safetensors", model(0))
    done = rmsnorm("gains", a, b, "--expect", "same", "-v")
    assert done.exit_code == 0, done.stderr
    assert "same in 9 of 9 norms" in done.stdout
    assert "the same name" in done.stdout
    assert rmsnorm("gains", a, b, "--expect", "plus-one").exit_code == 1
    for arguments, words in (
        ((a, "--expect", "same"), "--expect is given for another number of files, expected two files; drop it"),
        ((a, b, "--variant", "gemma"), "--variant is given for another number of files, expected one file"),
        ((a, b, "--expect", "more"), "expect is 'more', expected 'same', 'plus-one' or 'minus-one'"),
    ):
        done = rmsnorm("gains", *arguments)
        assert (done.exit_code, words in done.stderr) == (2, True), done.stderr
