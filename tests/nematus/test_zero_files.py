"""zero's files: its checkpoints, vocabularies and options, written back for zero and in every other form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nematus_commands import run, skip_without
from nematus_models import RELA, batch, config_of, random_parameters, same

from rmsnorm import nematus
from rmsnorm.nematus.centring import to_rms_norm
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.numpy import RNNSearch
from rmsnorm.nematus.translate import translate
from rmsnorm.nematus.vocabulary import (
    Vocabulary,
    read_entries,
    read_vocabulary,
    vocabularies,
    with_names,
    write_entries,
)
from rmsnorm.nematus.vocabulary import batch as batch_of


def saved(folder: Path, kind: str) -> tuple[Config, dict[str, Any]]:
    """A model in the files of zero, with vocabularies."""
    skip_without("tf")
    names = {"src_vocab_file": "/elsewhere/vocab.src", "tgt_vocab_file": "vocab.tgt", "scope_name": "nmt"}
    config = config_of(kind).replace(options=names)
    parameters = random_parameters(config, "float32")
    nematus.save_tensorflow(folder / "model-7", config, parameters)
    for side, size in (("src", config.source_vocab_sizes[0]), ("tgt", config.target_vocab_size)):
        (folder / f"vocab.{side}").write_text("".join(f"{side}{index}\n" for index in range(size - 3)))
    return config, parameters


def test_the_saver_of_tensorflow_restores_what_is_written(tmp_path: Path) -> None:
    """Under the scope of the options, with the graph for whose file zero looks; and options on one line."""
    _, parameters = saved(tmp_path, RELA)
    options = json.loads((tmp_path / "param.json").read_text())
    asked = (options[name] for name in ("model_name", "hidden_size", "num_heads", "ema_decay"))
    assert tuple(asked) == ("transformer_rela", 9, 3, -1.0), "there are no averages"
    assert len((tmp_path / "param.json").read_text().splitlines()) == 1
    assert (tmp_path / "checkpoint").read_text().splitlines()[0] == 'model_checkpoint_path: "model-7"'
    v1 = pytest.importorskip("tensorflow").compat.v1
    with v1.Graph().as_default(), v1.Session() as session:
        variables = {name: v1.get_variable(f"nmt/{name}", value.shape) for name, value in parameters.items()}
        v1.train.Saver().restore(session, str(tmp_path / "model-7"))
        same(session.run(variables), parameters)


def test_the_commands_convert_translate_and_score(tmp_path: Path) -> None:
    """And what comes back to zero's files is what went out."""
    (tmp_path / "model").mkdir()
    config, parameters = saved(tmp_path / "model", "zero rnn")
    assert "max error" in run("zero", tmp_path / "model", tmp_path / "torch", "--to", "pytorch")
    run("zero", tmp_path / "torch", tmp_path / "back", "--to", "tf")
    back = nematus.load(tmp_path / "back")
    same(back.parameters, parameters)
    assert back.config == config
    assert back.config.options["scope_name"] == "nmt"
    assert (tmp_path / "back" / "vocab.src").read_text().splitlines()[:4] == ["<pad>", "<unk>", "<eos>", "src0"]
    (tmp_path / "lines").write_text("src0 src1\n\nsrc2 other src0\n")
    translated = run("translate", tmp_path / "back", "--source", tmp_path / "lines", "--backend", "numpy").split("\n")
    model = RNNSearch(config, parameters)
    sources, target = vocabularies(back)
    lines = ["src0 src1", "src2 other src0"]
    wanted = [target.words(beam[0]) for beam in model.translate(*batch_of(lines, sources)).sequences]
    assert translated == [wanted[0], "", wanted[1], ""]
    (tmp_path / "target").write_text("tgt0\ntgt1 tgt1\nother\n")
    scored = run("score", tmp_path / "torch", "--source", tmp_path / "lines", "--target", tmp_path / "target")
    x, x_mask = batch_of(["src0 src1", "", "src2 other src0"], sources)
    (y,), y_mask = batch_of(["tgt0", "tgt1 tgt1", "other"], [target])
    losses = RNNSearch(config.replace(label_smoothing=0.0), parameters).loss(x, x_mask, y, y_mask)
    np.testing.assert_allclose(list(map(float, scored.split())), losses, rtol=1e-5)
    refused = run("nematus", tmp_path / "torch", tmp_path / "other", "--to", "torch", status=2)
    assert "the model is 'of zero', expected nematus; use rmsnorm port zero" in " ".join(refused.split())


def test_vocabularies_of_zero(tmp_path: Path) -> None:
    """Three words come first, repeated ones are left out, and spaces around words too."""
    path = tmp_path / "vocab"
    path.write_bytes("\r\n".join([" a ", *"abcade", "<eos>", "\u2028x"]).encode() + b"\n")
    entries = read_entries(path, "zero")
    assert list(entries) == ["<pad>", "<unk>", "<eos>", "a", "b", "c", "d", "e", "x"]
    write_entries(tmp_path / "again", entries, "zero")
    assert read_entries(tmp_path / "again", "zero") == entries
    vocabulary = read_vocabulary(path, 9, 1, "zero")
    assert vocabulary.words([3, 0, 4]) == "a"
    assert vocabulary.words([3, 4, 2, 4]) == "a b"
    ids, mask = batch_of(["a other", "e"], [vocabulary])
    np.testing.assert_array_equal(ids[0].T, [[3, 1, 2], [7, 2, 0]])
    np.testing.assert_array_equal(mask.T, [[1, 1, 1], [1, 1, 0]])
    with pytest.raises(ValueError, match=r"has no word for 9 and 0 more, expected one for each of the 10 ids"):
        read_vocabulary(path, 10, 1, "zero")
    path.write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match=r"vocab is not UTF-8 .*, expected a vocabulary of zero; convert it"):
        read_entries(path, "zero")


def test_a_vocabulary_that_is_missing_keeps_its_place() -> None:
    """The options name it, and not the other one in its place."""
    config = config_of("zero rms").replace(options={"src_vocab_file": "", "tgt_vocab_file": "elsewhere/vocab.tgt"})
    options = with_names(config, ["vocab.tgt"]).options
    assert (options["src_vocab_file"], options["tgt_vocab_file"]) == ("", "vocab.tgt")


def test_batches_are_those_of_zero() -> None:
    """Sorted within buffers of lines; a batch that is too small waits for the next buffer, if there is one."""
    config = config_of("zero rms").replace(options={"buffer_size": 5, "eval_batch_size": 2, "data_leak_ratio": 1.0})
    batches = []

    class Recording:
        def translate(self, x: Any, x_mask: Any, **options: Any) -> tuple[Any, Any]:
            batches.append(x_mask.sum(axis=0).astype(int).tolist())
            assert options == dict.fromkeys(("beam_size", "max_length", "normalization_alpha", "seed"))
            return np.zeros((x.shape[2], 1, 1), int), np.zeros((x.shape[2], 1))

    model: Any = Recording()
    target = Vocabulary({"<pad>": 0, "<unk>": 1, "<eos>": 2, "w": 3}, unknown=1, end=2)
    lines = ["w " * count for count in (5, 1, 0, 4, 2, 3, 9, 8)]
    assert list(translate(model, config, lines, [target], target)) == [""] * 8
    assert batches == [[2, 3], [4, 5], [6, 9], [10]]


def test_layer_norm_into_rms_norm_where_the_graph_allows_it() -> None:
    """In the recurrent model, whose offsets go into biases."""
    config = config_of("zero rnn layer")
    parameters, sentences = random_parameters(config), batch(config)
    converted, new = to_rms_norm(config, parameters)
    assert (converted.norm, converted.norm_offset) == ("rms", False)
    wanted = RNNSearch(config, parameters).loss(*sentences)
    np.testing.assert_allclose(RNNSearch(converted, new).loss(*sentences), wanted, rtol=1e-12)
