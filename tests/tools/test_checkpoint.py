"""The gains of a checkpoint, w or 1 + w or none of an RMSNorm, and those of two forms of one model."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from commands import rmsnorm
from safetensors.numpy import save_file

from rmsnorm.files import tensors
from rmsnorm.identify import identify_checkpoint
from rmsnorm.identify.gain_pairs import compare_gains
from rmsnorm.specification.errors import InputValueError

NAMES = [f"model.layers.{i}.{name}_layernorm.weight" for i in range(4) for name in ("input", "post_attention")]
FINAL = "model.norm.weight"


def gains(mean: float, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(mean, 0.1, 64).astype(np.float32)


def model(mean: float, last: float | None = None, **others: Any) -> dict[str, Any]:
    """Gains of a decoder; that of the last norm is often far from the others."""
    trunk = {name: gains(mean, seed) for seed, name in enumerate(NAMES)}
    return trunk | {FINAL: gains(mean if last is None else last, 99)} | others


LLAMA, GEMMA = model(1), model(0)
MATRIX = gains(0).reshape(8, 8)
OTHERS = {
    "model.layers.0.q_proj.scale": gains(0.01),
    "blocks.0.ls1.gamma": gains(0),
    "blocks.0.bn1.weight": gains(1),
    "blocks.0.norm1.weight": gains(1),
    "blocks.0.norm1.running_mean": gains(0),
    "exp_avg.model.norm.weight": gains(0),
    "optimizer/norm/weight": gains(0),
    "mu/norm/scale": gains(0),
    "model.norm.counts": np.arange(3),
    "model.norm_proj.weight": np.zeros((4, 4, 4, 4), np.float32),
    "batch_normalization/vars/0": gains(1),
}


def saved(path: Path, arrays: dict[str, Any]) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    elif path.suffix == ".gguf":
        gguf = pytest.importorskip("gguf", reason="gguf is not installed; pip install '.[gguf]'")
        writer = gguf.GGUFWriter(path, "llama")
        for name, values in arrays.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    else:
        save_file(arrays, path)
    return path


# One file.


@pytest.mark.parametrize(
    ("file", "arrays", "variant", "agrees", "words"),
    [
        ("a.npz", LLAMA | OTHERS, "llama", True, "they fit w, as llama has it"),
        ("a.npz", LLAMA | OTHERS, "gemma", False, "gains have mean 1: with gemma's offset 1 every norm's y is 2 times"),
        ("a.safetensors", GEMMA | OTHERS, "gemma", True, "they fit 1 + w"),
        ("a.safetensors", GEMMA | OTHERS, "llama", False, "with llama's offset 0 every norm's y is"),
        ("a.safetensors", model(0, last=8.69), "gemma", True, f"{FINAL} has mean 8.7 and fits w, unlike the others"),
        (
            "a.safetensors",
            GEMMA | {"visual.blocks.0.norm1.weight": gains(1, 7)},
            "gemma",
            True,
            "differ from the trunk",
        ),
        ("a.safetensors", GEMMA | {FINAL: gains(1, 7)}, "gemma", False, "left out when the others were converted?"),
        ("a.safetensors", LLAMA | {NAMES[2]: gains(0, 7)}, "llama", False, f"{NAMES[2]} do not fit w: left out"),
        ("a.safetensors", model(2), "gemma", False, "they lie around 2: 1 was added twice"),
        ("a.safetensors", model(1, last=1.9), "llama", True, "they fit w, as llama has it"),
    ],
)
def test_a_variant_of_the_other_kind_is_contradicted(
    file: str, arrays: dict[str, Any], variant: str | None, agrees: bool, words: str, tmp_path: Path
) -> None:
    found = identify_checkpoint(saved(tmp_path / file, arrays), variant)
    assert (found.agrees, words in found.text) == (agrees, True), found.text
    assert [kind.count for kind in found.kinds][:2] == [4, 4] or NAMES[2] in words


def test_bfloat16_in_several_files(tmp_path: Path) -> None:
    """Which NumPy alone does not read."""
    torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
    from safetensors.torch import save_file

    for number, (name, values) in enumerate(GEMMA.items()):
        save_file({name: torch.from_numpy(values).bfloat16()}, tmp_path / f"model-{number}-of-9.safetensors")
    first = identify_checkpoint(tmp_path).kinds[0]
    assert (first.count, first.fits) == (4, "1 + w")
    rounded = np.stack([values.astype(ml_dtypes.bfloat16) for name, values in GEMMA.items() if "input" in name])
    assert first.mean == rounded.astype(np.float64).mean()


@pytest.mark.parametrize(
    ("arrays", "fits"),
    [
        ({"layers.0.layer_norm_weight": gains(0)}, "1 + w"),  # of Transformer Engine
        ({"layers/rms_normalization_3/vars/0": gains(1)}, "w"),
        ({"blocks/ln_1/scale": np.stack([gains(1)] * 4)}, "w"),  # of layers that were scanned
        ({"norm.weight": gains(0.5)}, "unclear"),
        ({"norm.weight": np.abs(gains(0.1))}, "unclear"),  # small and positive, as in the first layers of LLaMA
        ({"layer_normalization/vars/0": gains(1), "layer_normalization/vars/1": gains(0)}, "bias"),
        ({"layer_norm_weight": gains(1), "layer_norm_bias": gains(0)}, "bias"),
        ({"encoder.norm1.gamma": gains(1).reshape(64, 1, 1, 1)}, "w"),  # of models of images and of video
        ({"q_norm.weight": gains(1).reshape(8, 8)}, "w"),  # a gain for each head
        ({"norm.alpha": gains(1), "norm.bias": gains(0)}, "bias"),
        ({"norm1.norm.weight": gains(1), "norm1.linear.weight": MATRIX}, "w"),
        # Linear and convolution layers whose names, or whose module's, have norm in them.
        ({"joint_transformer_blocks.0.norm1.linear.weight": MATRIX}, None),  # AuraFlow: AdaLN without biases
        ({"blocks.0.norm1_context.linear.weight": MATRIX, "blocks.0.norm1_context.linear.bias": gains(0)[:8]}, None),
        ({"decoder.norm1.conv_y.weight": gains(0).reshape(8, 8, 1, 1)}, None),
        ({"norm.conv.weight": gains(0).reshape(16, 1, 4)}, None),
        ({"norm_in.weight": MATRIX, "norm_in.bias": gains(0)[:8]}, None),  # a gain has a bias of its own shape
        ({"layernorm_qkv.weight": MATRIX}, None),
        ({"norm/dense/vars/0": MATRIX, "norm/dense/vars/1": gains(0)[:8]}, None),
        ({"norm.alpha": gains(1)[:1]}, None),  # of dynamic tanh
    ],
)
def test_what_gains_are_called_and_what_they_say(arrays: dict[str, Any], fits: str | None, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.safetensors", arrays)
    if fits is None:
        with pytest.raises(ValueError, match="has no gain of a norm among its"):
            identify_checkpoint(path)
    else:
        assert [kind.fits for kind in identify_checkpoint(path).kinds] == [fits]


def test_gains_that_stay_at_1_in_16_bits(tmp_path: Path) -> None:
    """Steps of an optimiser that are smaller than those of bfloat16 are lost: float32 gains move."""
    steps = np.random.default_rng(0).normal(0, 3e-3, (8, 64))
    for dtype, is_stuck in ((ml_dtypes.bfloat16, True), (np.float32, False)):
        arrays = {name: (1 + steps[i]).astype(dtype) for i, name in enumerate(NAMES)}
        found = identify_checkpoint(saved(tmp_path / f"{is_stuck}.safetensors", arrays))
        assert ("are exactly 1, where bfloat16 moves by 0.0039" in found.text) == is_stuck
        assert found.kinds[0].stuck == np.mean(np.concatenate([arrays[n].astype(float) for n in NAMES[::2]]) == 1)


@pytest.mark.parametrize("name", ["layers/rms_normalization{}/vars/0", "norm{}.weight"])
def test_norms_that_only_their_own_number_tells_apart_are_not_pooled(name: str, tmp_path: Path) -> None:
    """Keras counts the layers of a class, whatever they are: here one of six has Gemma's gain."""
    names = [name.format(number) for number in ("", "_1", "_2", "_3", "_4", "_5")]
    arrays = {name: gains(0 if index == 4 else 1, seed=index) for index, name in enumerate(names)}
    found = identify_checkpoint(saved(tmp_path / "a.safetensors", arrays), "llama")
    assert found.agrees is False
    assert {kind.name: kind.fits for kind in found.kinds} == dict.fromkeys(names, "w") | {names[4]: "1 + w"}
    assert f"{names[4]} has mean " in found.text


def test_all_gains_together_have_a_limit(tmp_path: Path) -> None:
    """A file of 1 MB that says so would take 1 GB; none of its tensors is read."""
    zeros = np.zeros(2**21, np.float32)
    np.savez_compressed(tmp_path / "a.npz", **{f"layers.{i}.norm.weight": zeros for i in range(17)})
    with pytest.raises(ValueError, match=r"a.npz is damaged \(285212672 bytes in memory, of a file of \d+ at most"):
        identify_checkpoint(tmp_path / "a.npz")
    h5py = pytest.importorskip("h5py", reason="h5py is not installed; pip install '.[tf]'")
    with h5py.File(tmp_path / "a.weights.h5", "w") as file:
        for i in range(17):
            file.create_dataset(f"layers/norm_{i}/vars/0", (2**21,), "f4")  # never written, so it takes no room
    with pytest.raises(ValueError, match="285212672 bytes in memory, of a file of"):
        identify_checkpoint(tmp_path / "a.weights.h5")


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    (tmp_path / "a.pt").write_bytes(pickle.dumps(Trap()))
    np.savez(tmp_path / "a.npz", **{"norm.weight": np.array([Trap()], object)})
    (tmp_path / "cut.safetensors").write_bytes(saved(tmp_path / "whole.safetensors", LLAMA).read_bytes()[:-5])
    saved(tmp_path / "others.npz", OTHERS)
    (tmp_path / "others.npz.json").write_text("{}")
    saved(tmp_path / "escape.safetensors", {"norm.\x1b[2Jweight": gains(1)})
    saved(tmp_path / "nan.npz", {"norm.weight": np.array([1.0, np.nan])})
    saved(tmp_path / "inf.safetensors", {"norm.weight": np.array([1.0, np.inf], "bfloat16")})
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "a.safetensors")
    for name, words in (
        ("a.pt", r"expected a .safetensors.*files of pickle \(.pt, .bin, .ckpt\) are never read"),
        ("others.npz.json", r"is a JSON file, expected a .safetensors.*; did you mean others\.npz, which is beside it"),
        ("a.npz", "is an array of Python objects, expected numbers; it is never unpickled"),
        ("cut.safetensors", "cut.safetensors is damaged"),
        ("others.npz", "has no gain of a norm among its 11 tensors, expected a name such as .*; its names are model"),
        ("escape.safetensors", r"has the name 'norm\.\\x1b\[2Jweight', expected printable words"),
        ("nan.npz", "norm.weight has NaN or infinity, expected finite gains"),
        ("inf.safetensors", "norm.weight has NaN or infinity, expected finite gains"),
        ("folder", r"a\.safetensors is no regular file, expected a \.safetensors"),
        ("nothing.npz", r"nothing.npz is missing, expected a .safetensors, .gguf, .npz"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            identify_checkpoint(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


def test_a_damaged_gguf_is_refused(tmp_path: Path) -> None:
    whole = saved(tmp_path / "a.gguf", {"blk.0.attn_norm.weight": gains(1)}).read_bytes()
    random = np.random.default_rng(0)
    for number in range(60):
        data = bytearray(whole[: random.integers(5, len(whole))] if number % 2 else whole)
        for place in random.integers(4, min(len(data), 200), 6):
            data[place] = random.integers(256)
        (tmp_path / "b.gguf").write_bytes(bytes(data))
        with contextlib.suppress(InputValueError):  # and nothing else
            identify_checkpoint(tmp_path / "b.gguf")


def test_an_archive_has_the_arrays_alone(tmp_path: Path) -> None:
    """np.savez takes some names for arguments of its own, and older ones take its arguments for names."""
    arrays: dict[str, Any] = {name: gains(1, seed) for seed, name in enumerate(("norm/weight", "file", "allow_pickle"))}
    arrays |= {"big": np.arange(3, dtype=">f4"), "columns": np.asfortranarray(MATRIX), "one": 2.5}
    tensors.write_npz(tmp_path / "a.npz", arrays)
    with np.load(tmp_path / "a.npz", allow_pickle=False) as archive:
        assert archive.files == list(arrays)
        for name, array in arrays.items():
            assert archive[name].dtype == np.asarray(array).dtype
            np.testing.assert_array_equal(archive[name], array)


# Two forms of a model.

TO_GGUF = {"model.layers.": "blk.", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
           FINAL: "output_norm.weight"}  # fmt: skip
TO_NEMO = {"model.layers.": "decoder.layers.", "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
           "post_attention_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
           FINAL: "decoder.final_layernorm.weight"}  # fmt: skip


def changed(plus: float, names: dict[str, str] | None = None, dtype: Any = "float32", **others: Any) -> dict[str, Any]:
    """Gemma's gains plus a number, by other names."""
    found = {}
    for name, values in GEMMA.items():
        for old, new in (names or {}).items():
            name = name.replace(old, new)
        found[name] = (values + np.float32(plus)).astype(dtype)
    return found | others


FEW = {name: values for name, values in GEMMA.items() if name != NAMES[0]} | {NAMES[1]: GEMMA[NAMES[1]] * 1.5}


@pytest.mark.parametrize(
    ("file", "arrays", "expected", "agrees", "lines"),
    [
        ("b.gguf", changed(1, TO_GGUF), "plus-one", True, ["B = A + 1 in 9 of 9 norms"]),
        ("b.gguf", changed(1, TO_GGUF), "same", False, ["same in 0 of 9 norms", "blk.0.attn_norm.weight: B = A + 1"]),
        ("b.gguf", changed(1, TO_GGUF) | {"output_norm.weight": GEMMA[FINAL]}, "plus-one", False,
         ["B = A + 1 in 8 of 9 norms: not output_norm.weight", "  output_norm.weight: same"]),
        ("b.safetensors", changed(-1), "minus-one", True, ["B = A - 1 in 9 of 9 norms"]),
        ("b.safetensors", changed(0, TO_NEMO), "same", True, ["same in 9 of 9 norms"]),
        ("b.safetensors", changed(1, dtype="bfloat16"), None, True, ["9 of them are rounded to 16 bits in one of the"]),
        ("b.safetensors", changed(2), None, True, ["B = A + 2 in 9 of 9 norms"]),
        ("b.safetensors", GEMMA | {"model.layers.4.input_layernorm.weight": gains(0)}, "same", False, ["only in B: "]),
        ("b.safetensors", FEW, None, False, [f"only in A: {NAMES[0]}", f"  {NAMES[1]}: another, up to "]),
    ],
)  # fmt: skip
def test_two_forms_of_a_model(
    file: str, arrays: dict[str, Any], expected: Any, agrees: bool, lines: list[str], tmp_path: Path
) -> None:
    found = compare_gains(saved(tmp_path / "a.safetensors", GEMMA), saved(tmp_path / file, arrays), expected)
    assert found.agrees == agrees
    assert all(line in found.text for line in lines), found.text


# The command.

COMMANDS = [  # what is asked of a file of LLaMA and of one of Gemma, its status, and what is said
    ("llama.npz --variant gemma", 1, "every norm's y is 2 times as large"),
    ("llama.npz", 0, "fit w"),
    ("llama.npz --variant gema", 2, "rmsnorm gains: variant is 'gema', expected "),
    ("gemma.npz llama.npz --expect plus-one -v", 0, "B = A + 1 in 9 of 9 norms"),
    ("gemma.npz llama.npz --expect plus-one -v", 0, "the same name"),
    ("gemma.npz llama.npz --expect same", 1, "same in 0 of 9 norms"),
    ("gemma.npz other.npz", 2, "have no norm in common, expected two forms of one model"),
    ("gemma.npz --expect same", 2, "--expect is given for another number of files, expected two files; drop it"),
    ("gemma.npz llama.npz --variant t5", 2, "--variant is given for another number of files, expected one file"),
    ("gemma.npz llama.npz --expect more", 2, "expect is 'more', expected 'same', 'plus-one' or 'minus-one'"),
]


@pytest.mark.parametrize(("arguments", "status", "words"), COMMANDS)
def test_the_command(arguments: str, status: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    llama = {name: values + np.float32(1) for name, values in GEMMA.items()}
    for file, arrays in (("llama", llama), ("gemma", GEMMA), ("other", {"a.my_layernorm.weight": gains(1)})):
        saved(tmp_path / f"{file}.npz", arrays)
    shown = rmsnorm("gains", *arguments.split())
    assert (shown.exit_code, words in " ".join(shown.output.split())) == (status, True), shown.output
    if arguments == "llama.npz":
        kinds = json.loads(rmsnorm("gains", arguments, "--json").stdout)["kinds"]
        assert {kind["fits"] for kind in kinds} == {"w"}
