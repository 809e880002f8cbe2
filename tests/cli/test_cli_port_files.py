"""``rmsnorm port nematus`` and ``info``: every conversion, what is said of a model, and what is not written."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nematus_commands import run, saved, skip_without
from nematus_models import config_of, random_parameters
from safetensors.numpy import load_file

from rmsnorm import nematus
from rmsnorm.nematus import convert as converting
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.names import unused, variables
from rmsnorm.nematus.numpy_models import RNNSearch
from rmsnorm.nematus.vocabulary import vocabularies
from rmsnorm.specification import frameworks


@pytest.mark.parametrize(
    ("kind", "to"), [*(("layer", to) for to in converting.TARGETS), ("factors", "torch"), ("factors", "theano")]
)
def test_conversions_keep_every_bit(kind: str, to: str, tmp_path: Path) -> None:
    skip_without(to)
    config, parameters = saved(tmp_path, kind)
    out = tmp_path / "out"
    out.mkdir()  # empty
    shown = run("nematus", tmp_path, out, "--to", to)
    error, *_ = (float(number) for number in shown.split("max error ")[1].split(" of logits up to ")[0].split())
    assert error <= 1e-12
    assert f"{len(parameters)} parameters in {out}" in shown
    loaded = nematus.load(out)
    assert loaded.config == config
    for name, array in loaded.parameters.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, parameters[name])
    assert vocabularies(loaded)[1].ids == vocabularies(nematus.load(tmp_path / "model.npz"))[1].ids
    assert (out / "0.json").stat().st_mode == (tmp_path / "source").stat().st_mode, "readable by the same users"
    assert run("translate", out, "--source", tmp_path / "source", "--max-length", 5) == run(
        "translate", tmp_path / "model.npz", "--source", tmp_path / "source", "--max-length", 5
    )
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    if to == "torch":
        from rmsnorm.nematus.torch_models import RNNSearch as InTorch

        model = InTorch(config, random_parameters(config, "float32", seed=1))
        import torch

        state = {name: torch.tensor(array) for name, array in load_file(out / "model.safetensors").items()}
        model.load_state_dict(state)
        for name, array in model.by_name().items():
            np.testing.assert_array_equal(array.detach(), parameters[name])


def test_layer_norm_becomes_rms_norm(tmp_path: Path) -> None:
    """Exact in float64; the rounding of the new weights is what it costs."""
    config, parameters = saved(tmp_path, "deep theano with offset")
    out = tmp_path / "out"
    shown = run("nematus", tmp_path, out, "--to", "numpy", "--norm", "rms")
    assert "LayerNorm to RMSNorm: max error " in shown
    assert "gains and offsets are kept" in shown
    exact, cost = (float(text.split()[0]) for text in shown.split("max error ")[1:])
    largest = float(shown.split("of logits up to ")[1].split(",")[0])
    assert exact <= 1e-12 * largest
    assert 1e-9 * largest < cost <= 1e-5 * largest
    loaded = nematus.load(out)
    assert (loaded.config.norm, loaded.config.norm_offset) == ("rms", True)
    x, x_mask, y = converting._sentences(config)
    wanted = RNNSearch(config, parameters).logits(x, x_mask, y)
    moved = abs(RNNSearch(loaded.config, loaded.parameters).logits(x, x_mask, y) - wanted).max()
    assert f"{moved:.2g}" == f"{cost:.2g}"
    again = run("nematus", out, tmp_path / "again", "--to", "numpy", "--norm", "rms", status=2)
    assert (
        "the model is 'rnn with rms', expected 'rnn with layer'" in again.replace('"', "'") or "rnn with rms" in again
    )
    assert not (tmp_path / "again").exists()


def test_other_numbers_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)

    def wrong(path: Path, config: Config, parameters: dict[str, Any]) -> None:
        nematus.save_safetensors(path, config.replace(output_hidden_activation="relu"), parameters)

    target = converting.TARGETS["numpy"]
    monkeypatch.setitem(converting.TARGETS, "numpy", target._replace(save=wrong))
    before = sorted(path.name for path in tmp_path.iterdir())
    shown = run("nematus", tmp_path, tmp_path / "out", "--to", "numpy", status=1)
    assert "other numbers: nothing is written" in shown

    def other(path: Path, config: Config, parameters: dict[str, Any]) -> None:
        nematus.save_safetensors(path, config, {name: 2 * array for name, array in parameters.items()})

    monkeypatch.setitem(converting.TARGETS, "numpy", target._replace(save=other))
    shown = run("nematus", tmp_path, tmp_path / "out", "--to", "numpy", status=3)
    assert "was read back with other values, expected those written" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_what_a_form_cannot_keep(tmp_path: Path) -> None:
    saved(tmp_path)
    nematus.save_safetensors(tmp_path / "deep.safetensors", config_of("deep"), random_parameters(config_of("deep")))
    shown = run("nematus", tmp_path / "deep.safetensors", tmp_path / "theano", "--to", "theano")
    assert (
        "warning: save_theano: Theano Nematus will compute other numbers: it adds the biases of decoder/high" in shown
    )
    (tmp_path / "out").write_text("a file")
    shown = run("nematus", tmp_path / "model.npz", tmp_path / "out", "--to", "numpy", status=2)
    assert "out exists, expected a new or an empty folder; name another" in shown
    assert (tmp_path / "out").read_text() == "a file"
    shown = run("nematus", tmp_path / "model.npz", tmp_path / "theano", "--to", "numpy", status=2)
    assert "theano exists, expected a new or an empty folder; name another" in shown
    shown = run("nematus", tmp_path / "model.npz", tmp_path / "no" / "out", "--to", "numpy", status=2)
    assert "no is not a folder, expected one to make out in; make it" in shown


def test_without_the_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    monkeypatch.setattr(frameworks, "find_spec", lambda name: None if name.startswith("torch") else sys)
    shown = run("nematus", tmp_path, tmp_path / "out", "--to", "torch", status=2)
    assert "torch is not installed, expected for this backend; from a checkout: pip install '.[torch]'" in shown
    assert not (tmp_path / "out").exists()
    options = ["--source", tmp_path / "source", "--max-length", 5]
    assert len(run("translate", tmp_path, *options).splitlines()) == 3
    shown = run("translate", tmp_path, *options, "--backend", "torch", status=2)
    assert "torch is not installed, expected for this backend; from a checkout: pip install '.[torch]'" in shown


def test_info(tmp_path: Path) -> None:
    saved(tmp_path, "deep theano with offset")
    shown = {row[:11].strip(): row[11:].strip() for row in run("info", tmp_path).splitlines() if row[:11].strip()}
    assert shown["framework"] == "Theano"
    assert shown["version"] == "Nematus Theano"
    assert shown["norm"] == "LayerNorm"
    assert shown["sizes"] == "embedding 6, state 5"
    assert shown["options"] == (
        "rnn_enc_depth 2, rnn_enc_transition_depth 2, rnn_dec_depth 3, rnn_dec_base_transition_depth 3, "
        "rnn_dec_high_transition_depth 2, rnn_dec_deep_context True"
    )
    assert shown["vocabulary"] == "source 9, target 8"
    config = config_of("deep theano with offset")
    count = sum(math.prod(row.shape) for row in variables(config))
    assert shown["parameters"] == f"{count:,} in {len(variables(config))} tensors, float32"
    assert shown["left out"] == "decoder_c_tt: it is added to every score of attention, and has no effect"
    assert f"{tmp_path / '0.json'}: 9 words" in run("info", tmp_path)
    (tmp_path / "1.json").unlink()
    assert f"{tmp_path / '1.json'} is missing, expected a dictionary" in run("info", tmp_path)


def test_info_of_what_a_training_run_leaves(tmp_path: Path) -> None:
    """Slots, averages that are taken, biases that are never added."""
    config, parameters = saved(tmp_path, "deep", rnn_dec_depth=1, dialect="tensorflow", exponential_smoothing=1e-4)
    with np.load(tmp_path / "model.npz") as archive:
        arrays = dict(archive)
    spare = [name for name in arrays if name in unused(config)]
    averages = {f"{row.theano}_smooth": parameters[row.name] for row in variables(config)}
    np.savez(tmp_path / "model.npz", uidx=np.int64(7), adam_t=np.ones(1), **arrays, **averages)
    options = json.loads((tmp_path / "model.npz.json").read_text())
    (tmp_path / "model.npz.json").write_text(json.dumps({**options, "exponential_smoothing": 1e-4}))
    shown = run("info", tmp_path)
    assert "Nematus master, under the names of Theano" in shown
    assert "float32, averages of exponential smoothing" in shown
    left_out = [row.split("left out")[1].strip() for row in shown.splitlines() if "left out" in row]
    assert left_out == [
        "adam_t, uidx: of the trainer",
        "decoder_c_tt: it is added to every score of attention, and has no effect",
        f"Wemb, Wemb_dec and {len(averages) - 2} more: the averages are taken",
        f"{sorted(spare)[0]}, {sorted(spare)[1]} and {len(spare) - 2} more: "
        "biases of encoder transitions, which Nematus keeps but never adds",
    ]


def test_info_of_other_kinds(tmp_path: Path) -> None:
    config = config_of("transformer tied decoder")
    nematus.save_safetensors(tmp_path / "t.safetensors", config, random_parameters(config))
    shown = run("info", tmp_path / "t.safetensors")
    assert "t.safetensors: Transformer" in shown
    assert "PyTorch or none: a safetensors file of rmsnorm" in shown
    depths = "transformer_enc_depth 2, transformer_dec_depth 2"
    sizes = "transformer_ffn_hidden_size 6, transformer_num_heads 2"
    assert f"tie_decoder_embeddings True, {depths}, {sizes}" in " ".join(shown.split())
    assert "RMSNorm, without offsets" in shown
    v04 = config_of("factors").replace(search="costs")
    nematus.save_safetensors(tmp_path / "f.safetensors", v04, random_parameters(v04))
    shown = run("info", tmp_path / "f.safetensors")
    assert "Nematus v0.4" in shown
    assert "embedding 6, in factors of 4, 2, state 5" in shown
    saved(tmp_path, "rms with offset")
    options = json.loads((tmp_path / "model.npz.json").read_text())
    for name in ("layer_normalization_type", "norm", "dialect"):
        del options[name]
    (tmp_path / "old.json").write_text(json.dumps(options))
    arguments = ["info", tmp_path / "model.npz", "--config", tmp_path / "old.json"]
    shown = run(*arguments, status=2)
    assert "norm is None, expected 'layer' or 'rms', as the model was trained" in shown
    assert "in the commands --source-norm" in shown
    assert "RMSNorm, with offsets" in run(*arguments, "--source-norm", "rms")
    assert "pRMSNorm, with offsets" in run(*arguments, "--source-norm", "prms")


def test_the_targets_are_those_of_the_table() -> None:
    shown = run("nematus", "model", "out", "--to", "onnx", status=2)
    assert "to is 'onnx', expected" in shown
    assert re.findall(r"'(\w+)'", shown.split("expected")[1]) == list(converting.TARGETS)


@pytest.mark.filterwarnings("ignore:save_theano. Theano Nematus will compute other numbers:UserWarning")  # of deep v0.4
@pytest.mark.parametrize(
    ("kind", "to"),
    [("layer", "torch"), ("factors", "numpy"), ("deep v0.4", "theano"), ("transformer tied decoder", "tf")],
)
def test_a_proof_holds_until_the_model_is_another_one(kind: str, to: str, tmp_path: Path) -> None:
    if kind.startswith("transformer"):
        skip_without(to)
        config = config_of(kind)
        nematus.save_safetensors(tmp_path / "model.safetensors", config, random_parameters(config, "float32"))
    else:
        saved(tmp_path, kind)
    out = tmp_path / "out"
    shown = run("nematus", tmp_path, out, "--to", to)
    assert f"rmsnorm port verify {out} computes its proof again" in shown
    moved = out.rename(tmp_path / "moved")
    for backend in ("numpy", *(["torch"] if not frameworks.FRAMEWORKS["torch"].missing else [])):
        shown = run("verify", moved, "--backend", backend)
        assert f"held in {backend}: the same" in shown
        error, bound = (float(shown.split(word)[1].split()[0].rstrip(",")) for word in ("max error", "at most"))
        assert error <= 1e-12 < bound
    path = moved / "proof.json"
    written, proof = path.read_text(), json.loads(path.read_text())
    path.write_text(json.dumps({**proof, "scores": [proof["scores"][0] + 1e-6, proof["scores"][1]]}))
    shown = run("verify", moved, "--backend", "numpy", status=1)
    assert "not held in numpy: the same" in shown
    assert "max error 1e-06" in shown
    path.write_text(json.dumps({**proof, "output": [*proof["output"][::-1], 1]}))
    assert "not held in numpy: other words" in run("verify", moved, "--backend", "numpy", status=1)
    path.write_text(written)
    model = nematus.load(moved)
    name = max(model.parameters, key=lambda name: model.parameters[name].size)
    tuned = {**model.parameters, name: model.parameters[name] * np.float32(1.001)}
    converting.TARGETS[to].save(moved / converting.TARGETS[to].file, model.config, tuned)
    assert "not held in numpy" in run("verify", moved, "--backend", "numpy", status=1)


def test_no_proof(tmp_path: Path) -> None:
    saved(tmp_path)
    shown = run("verify", tmp_path, status=2)
    assert "proof.json is missing, expected the proof that rmsnorm port writes" in shown
    for text in ("[]", "{}", '{"source": [[]], "beam_size": 1}', '{"source": 3}'):
        (tmp_path / "proof.json").write_text(text)
        assert "proof.json is something else, expected the proof" in run("verify", tmp_path, status=2)


def test_a_dictionary_that_does_not_fit_is_not_converted(tmp_path: Path) -> None:
    """Too small, of another form, or exchanged; one that is missing is a warning."""
    config, _ = saved(tmp_path)
    sizes = *config.source_vocab_sizes, config.target_vocab_size
    assert sizes[0] > sizes[1]
    own, out = [(tmp_path / f"{number}.json").read_text() for number in (0, 1)], tmp_path / "out"

    def shown(*texts: str, status: int = 2) -> str:
        for number, text in enumerate(texts):
            (tmp_path / f"{number}.json").write_text(text)
        return run("nematus", tmp_path / "model.npz", out, "--to", "numpy", status=status)

    small = shown(own[0], '{"w0": 0, "w1": 1, "w2": 2}')
    assert f"1.json has no word for 3 and {sizes[1] - 4} more, expected one for each of the {sizes[1]} ids" in small
    assert "put that of this one in its place" in small
    exchanged = shown(*own[::-1])
    assert f"expected a dictionary of {sizes[0]} words for the source and one of {sizes[1]} for the target" in exchanged
    assert "exchange the two, in the options of the model or after --dictionary" in exchanged
    assert "0.json is no dictionary of Nematus" in shown("[1, 2]", own[1])
    assert not out.exists()
    (tmp_path / "1.json").unlink()
    assert "0.json has no word for 1 and" in shown('{"w0": 0}')
    (tmp_path / "0.json").write_text(own[0])
    assert "1.json is missing: copy it beside the result" in run(
        "nematus", tmp_path / "model.npz", out, "--to", "numpy"
    ).replace("\n", " ")
