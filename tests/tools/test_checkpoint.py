"""The gains of a checkpoint: w or 1 + w, or no gains of an RMSNorm at all."""

from __future__ import annotations

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


def gains(mean: float, dtype: Any = np.float32, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(mean, 0.1, 64).astype(dtype)


LLAMA = {f"model.layers.{i}.{name}_layernorm.weight": gains(1, seed=i) for i in range(3) for name in ("input", "post")}
GEMMA = {name: values - 1 for name, values in LLAMA.items()}
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
    else:
        save_file(arrays, path)
    return path


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_a_variant_of_the_other_kind_is_contradicted(name: str, tmp_path: Path) -> None:
    llama, gemma = (saved(tmp_path / f"{i}{name}", {**arrays, **OTHERS}) for i, arrays in enumerate((LLAMA, GEMMA)))
    for path, right, wrong, fits in ((llama, "llama", "gemma", "w"), (gemma, "gemma", "llama", "1 + w")):
        assert [(kind.count, kind.fits) for kind in identify_checkpoint(path).kinds] == [(3, fits), (3, fits)]
        assert [identify_checkpoint(path, variant).agrees for variant in (None, right, wrong)] == [True, True, False]
    text = identify_checkpoint(llama, "gemma").text
    assert text.startswith(
        "gains have mean 1: with gemma's offset 1 every norm's y is 2 times as large (model.layers.*."
    )


def test_bfloat16_in_several_files(tmp_path: Path) -> None:
    """Which NumPy alone does not read."""
    torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
    from safetensors.torch import save_file

    for number, (name, values) in enumerate(GEMMA.items()):
        save_file({name: torch.from_numpy(values).bfloat16()}, tmp_path / f"model-{number}-of-6.safetensors")
    found = identify_checkpoint(tmp_path)
    assert [(kind.count, kind.fits) for kind in found.kinds] == [(3, "1 + w")] * 2
    rounded = np.stack([values.astype(ml_dtypes.bfloat16) for name, values in GEMMA.items() if "input" in name])
    assert found.kinds[0].mean == rounded.astype(np.float64).mean()


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
        ({"norm1.norm.weight": gains(1), "norm1.linear.weight": gains(0).reshape(8, 8)}, "w"),
    ],
)
def test_what_gains_are_called_and_what_they_say(arrays: dict[str, Any], fits: str, tmp_path: Path) -> None:
    (kind,) = identify_checkpoint(saved(tmp_path / "a.safetensors", arrays)).kinds
    assert kind.fits == fits


MATRIX = gains(0).reshape(8, 8)


@pytest.mark.parametrize(
    "arrays",
    [
        {"joint_transformer_blocks.0.norm1.linear.weight": MATRIX},  # AuraFlow: AdaLN without biases
        {"blocks.0.norm1_context.linear.weight": MATRIX, "blocks.0.norm1_context.linear.bias": gains(0)[:8]},
        {"decoder.norm1.conv_y.weight": gains(0).reshape(8, 8, 1, 1)},
        {"norm.conv.weight": gains(0).reshape(16, 1, 4)},
        {"norm_in.weight": MATRIX, "norm_in.bias": gains(0)[:8]},  # a gain has a bias of its own shape
        {"layernorm_qkv.weight": MATRIX},
        {"norm/dense/vars/0": MATRIX, "norm/dense/vars/1": gains(0)[:8]},
        {"norm.alpha": gains(1)[:1]},  # of dynamic tanh
    ],
)
def test_matrices_within_a_norm_are_no_gains(arrays: dict[str, Any], tmp_path: Path) -> None:
    """Linear and convolution layers whose names, or whose module's, have norm in them."""
    with pytest.raises(ValueError, match="has no gain of a norm among its"):
        identify_checkpoint(saved(tmp_path / "a.safetensors", arrays))
    found = identify_checkpoint(saved(tmp_path / "b.safetensors", arrays | LLAMA), "llama")
    assert (found.agrees, len(found.kinds)) == (True, 2)


def test_all_gains_together_have_a_limit(tmp_path: Path) -> None:
    """A file of 1 MB that says so would take 1 GB; none of its tensors is read."""
    zeros = np.zeros(2**21, np.float32)
    path = tmp_path / "a.npz"
    np.savez_compressed(path, **{f"layers.{i}.norm.weight": zeros for i in range(17)})
    assert path.stat().st_size < 2**19
    with pytest.raises(ValueError, match=r"a.npz is damaged \(285212672 bytes in memory, of a file of \d+ at most"):
        identify_checkpoint(path)
    h5py = pytest.importorskip("h5py", reason="h5py is not installed; pip install '.[tf]'")
    with h5py.File(tmp_path / "a.weights.h5", "w") as file:
        for i in range(17):
            file.create_dataset(f"layers/norm_{i}/vars/0", (2**21,), "f4")  # never written, so it takes no room
    with pytest.raises(ValueError, match="285212672 bytes in memory, of a file of"):
        identify_checkpoint(tmp_path / "a.weights.h5")


@pytest.mark.parametrize(
    "names",
    [
        [f"layers/rms_normalization{number}/vars/0" for number in ("", "_1", "_2", "_3", "_4", "_5")],
        [f"norm{number}.weight" for number in range(6)],
    ],
)
def test_norms_that_only_their_own_number_tells_apart_are_not_pooled(names: list[str], tmp_path: Path) -> None:
    """Keras counts the layers of a class, whatever they are: here one of six has Gemma's gain."""
    arrays = {name: gains(0 if index == 4 else 1, seed=index) for index, name in enumerate(names)}
    found = identify_checkpoint(saved(tmp_path / "a.safetensors", arrays), "llama")
    assert found.agrees is False
    assert {kind.name: kind.fits for kind in found.kinds} == {
        name: "1 + w" if index == 4 else "w" for index, name in enumerate(names)
    }
    assert f"{names[4]} has mean " in found.text
    assert "unlike the others: left out when the others were converted?" in found.text


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
    for name, words in (
        ("a.pt", r"expected a .safetensors.*files of pickle \(.pt, .bin, .ckpt\) are never read"),
        ("others.npz.json", r"is a JSON file, expected a .safetensors.*; did you mean others\.npz, which is beside it"),
        ("a.npz", "is an array of Python objects, expected numbers; it is never unpickled"),
        ("cut.safetensors", "cut.safetensors is damaged"),
        ("others.npz", "has no gain of a norm among its 11 tensors, expected a name such as .*; its names are model"),
        ("escape.safetensors", r"has the name 'norm\.\\x1b\[2Jweight', expected printable words"),
        ("nan.npz", "norm.weight has NaN or infinity, expected finite gains"),
        ("inf.safetensors", "norm.weight has NaN or infinity, expected finite gains"),
    ):
        with pytest.raises(ValueError, match=words):
            identify_checkpoint(tmp_path / name)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "a.safetensors")
    with pytest.raises(ValueError, match=r"a\.safetensors is no regular file, expected a \.safetensors"):
        identify_checkpoint(tmp_path / "folder")
    with pytest.raises(FileNotFoundError, match=r"nothing.npz is missing, expected a .safetensors, .gguf, .npz"):
        identify_checkpoint(tmp_path / "nothing.npz")
    assert not (tmp_path / "sprung").exists()


def test_an_archive_has_the_arrays_alone(tmp_path: Path) -> None:
    """np.savez takes some names for arguments of its own, and older ones take its arguments for names."""
    rng, path = np.random.default_rng(0), tmp_path / "a.npz"
    arrays: dict[str, Any] = {name: rng.standard_normal((2, 3)) for name in ("norm/weight", "file", "allow_pickle")}
    arrays |= {"big": np.arange(3, dtype=">f4"), "columns": np.asfortranarray(rng.standard_normal((3, 2))), "one": 2.5}
    tensors.write_npz(path, arrays)
    with np.load(path, allow_pickle=False) as archive:
        assert archive.files == list(arrays)
        for name, array in arrays.items():
            assert archive[name].dtype == np.asarray(array).dtype
            np.testing.assert_array_equal(archive[name], array)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        tensors.write_npz(path, {"norm/weight": np.array([{}])})


def test_the_command(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.npz", LLAMA)
    shown = rmsnorm("gains", path, "--variant", "gemma")
    assert shown.exit_code == 1, shown.stderr
    assert "every norm's y is 2 times as large" in " ".join(shown.stdout.split())
    done = rmsnorm("gains", path, "--json")
    assert (done.exit_code, [kind["fits"] for kind in json.loads(done.stdout)["kinds"]]) == (0, ["w", "w"])
    refused = rmsnorm("gains", path, "--variant", "gema")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("rmsnorm gains: variant is 'gema', expected ")
    assert "did you mean 'gemma'?" in refused.stderr
