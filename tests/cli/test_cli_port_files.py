"""``rmsnorm port nematus``, ``info`` and ``verify``: every conversion, what is said of a model, what is not written."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nematus_commands import rewrite, run, saved, skip_without
from nematus_models import config_of, random_parameters, reoption, same

from rmsnorm import nematus
from rmsnorm.nematus import convert as converting
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.names import unused, variables
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
    assert float(shown.split("max error ")[1].split()[0]) <= 1e-12
    assert f"{len(parameters)} parameters in {out}" in shown
    loaded = nematus.load(out)
    assert loaded.config == config
    same(loaded.parameters, parameters)
    assert vocabularies(loaded)[1].ids == vocabularies(nematus.load(tmp_path / "model.npz"))[1].ids
    assert (out / "0.json").stat().st_mode == (tmp_path / "source").stat().st_mode, "readable by the same users"
    usual = ["--source", tmp_path / "source", "--max-length", 5]
    assert run("translate", out, *usual) == run("translate", tmp_path / "model.npz", *usual)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    if to == "torch":
        from safetensors.torch import load_file
        from torch_nematus import Model

        model = Model(config, random_parameters(config, "float32", seed=1)).own
        model.load_state_dict(load_file(out / "model.safetensors"))
        same({name: array.detach().numpy() for name, array in model.by_name().items()}, parameters)


def test_layer_norm_becomes_rms_norm(tmp_path: Path) -> None:
    """Exact in float64; the rounding of the new weights is what it costs."""
    saved(tmp_path, "deep theano with offset")
    out = tmp_path / "out"
    shown = run("nematus", tmp_path, out, "--to", "numpy", "--norm", "rms")
    exact, cost = (float(text.split()[0]) for text in shown.split("max error ")[1:])
    largest = float(shown.split("of logits up to ")[1].split(",")[0])
    assert exact <= 1e-12 * largest
    assert 1e-9 * largest < cost <= 1e-5 * largest
    config = nematus.load(out).config
    assert (config.norm, config.norm_offset) == ("rms", True)
    again = run("nematus", out, tmp_path / "again", "--to", "numpy", "--norm", "rms", status=2)
    assert "rnn with rms" in again
    assert not (tmp_path / "again").exists()


def test_other_numbers_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    target = converting.TARGETS["numpy"]
    for options, factor, status, message in (
        ({"output_hidden_activation": "relu"}, 1, 1, "other numbers: nothing is written"),
        ({}, 2, 3, "was read back with other values, expected those written"),
    ):

        def wrong(path: Any, config: Config, parameters: Any, options: Any = options, factor: int = factor) -> None:
            changed = {name: factor * array for name, array in parameters.items()}
            nematus.save_safetensors(path, config.replace(**options), changed)

        monkeypatch.setitem(converting.TARGETS, "numpy", target._replace(save=wrong))
        assert message in run("nematus", tmp_path, tmp_path / "out", "--to", "numpy", status=status)
        assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_without_the_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    monkeypatch.setattr(frameworks, "find_spec", lambda name: None if name.startswith("torch") else sys)
    options = ["--source", tmp_path / "source", "--max-length", 5]
    assert len(run("translate", tmp_path, *options).splitlines()) == 3
    for command in (["nematus", tmp_path, tmp_path / "out", "--to"], ["translate", tmp_path, *options, "--backend"]):
        shown = run(*command, "torch", status=2)
        assert "torch is not installed, expected for this backend; from a checkout: pip install '.[torch]'" in shown
    assert not (tmp_path / "out").exists()


def info(*arguments: Any) -> dict[str, str]:
    """The rows of ``rmsnorm port info``; those without a name are part of the row above."""
    rows: dict[str, str] = {}
    name = ""
    for row in run("info", *arguments).splitlines():
        name = row[:11].strip() or name
        rows[name] = f"{rows[name]}\n{row[11:].strip()}" if name in rows else row[11:].strip()
    return rows


def test_info(tmp_path: Path) -> None:
    """Of an archive of Theano with options that do not say the norm, of what training leaves there, of other kinds."""
    config, parameters = saved(tmp_path, "deep theano with offset")
    shown, count = info(tmp_path), sum(math.prod(row.shape) for row in variables(config))
    wanted = {
        "framework": "Theano",
        "version": "Nematus Theano",
        "norm": "LayerNorm",
        "sizes": "embedding 6, state 5",
        "options": "rnn_enc_depth 2, rnn_enc_transition_depth 2, rnn_dec_depth 3, rnn_dec_base_transition_depth 3, "
        "rnn_dec_high_transition_depth 2, rnn_dec_deep_context True",
        "vocabulary": "\n".join(("source 9, target 8", f"{tmp_path}/0.json: 9 words", f"{tmp_path}/1.json: 8 words")),
        "parameters": f"{count:,} in {len(parameters)} tensors, float32",
        "left out": "decoder_c_tt: it is added to every score of attention, and has no effect",
    }
    assert wanted.items() <= shown.items()
    (tmp_path / "1.json").unlink()
    assert f"{tmp_path / '1.json'} is missing, expected a dictionary" in info(tmp_path)["vocabulary"]
    reoption(tmp_path, layer_normalization_type=None, norm=None, dialect=None)
    assert "in the commands --source-norm" in run("info", tmp_path, status=2)
    assert info(tmp_path, "--source-norm", "prms")["norm"] == "pRMSNorm, with offsets"

    config, parameters = saved(tmp_path, "deep", rnn_dec_depth=1, dialect="tensorflow")
    averages = {f"{row.theano}_smooth": parameters[row.name] for row in variables(config)}
    rewrite(tmp_path, uidx=np.int64(7), adam_t=np.ones(1), **averages)
    reoption(tmp_path, exponential_smoothing=1e-4)
    spare = sorted(row.theano for row in variables(config.replace(dialect="theano")) if row.theano in unused(config))
    shown = info(tmp_path)
    assert shown["version"] == "Nematus master, under the names of Theano"
    assert shown["parameters"].endswith("float32, averages of exponential smoothing")
    assert shown["left out"].splitlines() == [
        "adam_t, uidx: of the trainer",
        "decoder_c_tt: it is added to every score of attention, and has no effect",
        f"Wemb, Wemb_dec and {len(averages) - 2} more: the averages are taken",
        f"{spare[0]}, {spare[1]} and {len(spare) - 2} more: "
        "biases of encoder transitions, which Nematus keeps but never adds",
    ]
    config, path = config_of("transformer tied decoder"), tmp_path / "a.safetensors"
    nematus.save_safetensors(path, config, random_parameters(config))
    assert info(path)["norm"] == "pRMSNorm, without offsets"
    assert info(path)["model"].endswith("Transformer")


@pytest.mark.filterwarnings("ignore:save_theano. Theano Nematus will compute other numbers:UserWarning")  # of deep v0.4
@pytest.mark.parametrize(
    ("kind", "to"), [("layer", "torch"), ("deep v0.4", "theano"), ("transformer tied decoder", "tf")]
)
def test_a_proof_holds_until_the_model_is_another_one(kind: str, to: str, tmp_path: Path) -> None:
    skip_without(to)
    config = config_of(kind)
    nematus.save_safetensors(tmp_path / "model.safetensors", config, random_parameters(config, "float32"))
    shown = run("nematus", tmp_path, tmp_path / "out", "--to", to)
    assert ("it adds the biases of decoder/high elsewhere" in shown) == (to == "theano")
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    for backend in ("numpy", *(["torch"] if not frameworks.FRAMEWORKS["torch"].missing else [])):
        shown = run("verify", moved, "--backend", backend)
        assert f"held in {backend}: the same" in shown
        error, bound = (float(re.split("[ ,]", shown.split(word)[1])[1]) for word in ("max error", "at most"))
        assert error <= 1e-12 < bound
    path = moved / "proof.json"
    written, proof = path.read_text(), json.loads(path.read_text())
    for changes, words in (
        ({"scores": [proof["scores"][0] + 1e-6, proof["scores"][1]]}, "numpy: the same.*max error 1e-06"),
        ({"output": [*proof["output"][::-1], 1]}, "numpy: other words"),
    ):
        path.write_text(json.dumps({**proof, **changes}))
        assert re.search(f"not held in {words}", run("verify", moved, "--backend", "numpy", status=1))
    for text in ("[]", "{}", '{"source": [[]], "beam_size": 1}', '{"source": 3}'):
        path.write_text(text)
        assert "proof.json is something else, expected the proof" in run("verify", moved, status=2)
    path.write_text(written)
    model = nematus.load(moved)
    name = max(model.parameters, key=lambda name: model.parameters[name].size)
    tuned = {**model.parameters, name: model.parameters[name] * np.float32(1.001)}
    converting.TARGETS[to].save(moved / converting.TARGETS[to].file, model.config, tuned)
    assert "not held in numpy" in run("verify", moved, "--backend", "numpy", status=1)
    path.unlink()
    assert "proof.json is missing, expected the proof that rmsnorm port writes" in run("verify", moved, status=2)
