"""Dictionaries of Nematus, vocabularies of zero, and batches of sentences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nematus_commands import run, save
from nematus_models import CONFIGS

from rmsnorm import nematus
from rmsnorm.nematus.numpy_models import RNNSearch
from rmsnorm.nematus.translate import translate
from rmsnorm.nematus.vocabulary import (
    Vocabulary,
    batch,
    read_entries,
    read_vocabulary,
    vocabularies,
    with_names,
    write_entries,
)

SPECIAL = {"<EOS>": 0, "<GO>": 1, "<UNK>": 2}


def saved(folder: Path, special: dict[str, int] = SPECIAL, kind: str = "rms", **changes: Any) -> nematus.Model:
    """A model whose dictionaries have two words more than it has ids."""
    config = CONFIGS[kind].replace(**changes)
    names = [f"{number}.json" for number in range(len(config.source_vocab_sizes) + 1)]
    save(folder, config, options={"dictionaries": [f"/elsewhere/{name}" for name in names]})
    for name, size in zip(names, (*config.source_vocab_sizes, config.target_vocab_size), strict=True):
        (folder / name).write_text(json.dumps({**special, **{f"w{index}": index for index in range(3, size + 2)}}))
    return nematus.load(folder)


def test_from_words_to_words(tmp_path: Path) -> None:
    """The dictionaries that the options name, beside the model; the words above its vocabulary are unknown to it."""
    model = saved(tmp_path, kind="factors")
    sources, target = vocabularies(model)
    assert [len(vocabulary.ids) for vocabulary in (*sources, target)] == [8, 4, 8]
    x, x_mask = batch(["w3|w3 w7|<GO>  w8|w4", "", "what|w3"], sources)
    np.testing.assert_array_equal(x[0].T, [[3, 7, 2, 0], [0, 0, 0, 0], [2, 0, 0, 0]])
    np.testing.assert_array_equal(x[1].T, [[3, 1, 2, 0], [0, 0, 0, 0], [3, 0, 0, 0]])
    np.testing.assert_array_equal(x_mask.T, [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]])
    names = {index: word for word, index in target.ids.items()}
    for sequence in RNNSearch(model.config, model.parameters).translate(x, x_mask, 2, 5).sequences[:, 0]:
        ended = list(sequence).index(0) if 0 in sequence else len(sequence)
        assert target.words(sequence) == " ".join(names[index] for index in sequence[:ended])


@pytest.mark.parametrize(
    ("dialect", "translating", "scoring"),
    [("tensorflow", (2, 2), (1, 2)), ("tensorflow-v0.3", (1, 1), (1, 1)), ("theano", (1, 1), (1, 1))],
)
def test_the_id_of_unknown_words(dialect: str, translating: Any, scoring: Any, tmp_path: Path) -> None:
    """Master trains and scores by the dictionary, and translates with 2 whatever that is; others know only 1."""
    for first, *ids in zip(({"eos": 0, "UNK": 1, "w2": 2}, SPECIAL), translating, scoring, strict=True):
        model = saved(tmp_path, first, dialect=dialect)
        for wanted, asked in zip(ids, (False, True), strict=True):
            sources, target = vocabularies(model, scoring=asked)
            assert [vocabulary.unknown for vocabulary in (*sources, target)] == [wanted, wanted]
            assert batch(["what"], sources)[0][0, 0, 0] == wanted


def test_what_is_wrong_with_a_dictionary_is_said(tmp_path: Path) -> None:
    model = saved(tmp_path, kind="factors")
    with pytest.raises(FileNotFoundError, match=r"none.json is missing, expected a dictionary of Nematus; name"):
        vocabularies(model, target="none.json")
    small = tmp_path / "small.json"
    for text, message in (
        ("{", r"is not JSON \(.*\), expected a dictionary"),
        ("[]", "is no dictionary of Nematus"),
        (json.dumps(SPECIAL), "small.json has no word for 3 and 0 more, expected one for each of the 4 ids"),
        *((json.dumps({**SPECIAL, name: 3}), "is 'w.*3', expected words without") for name in ("w\n3", "w\ud8003")),
    ):
        small.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_vocabulary(small, 4, 2)
    with pytest.raises(ValueError, match=r"a word of sentence 2 is 'w3', expected 2 factors; separate them by \|"):
        batch(["w3|w3", "w3"], vocabularies(model)[0])


def test_vocabularies_of_zero(tmp_path: Path) -> None:
    """Three words come first, repeated ones are left out, and spaces around words too."""
    path = tmp_path / "vocab"
    path.write_bytes("\r\n".join([" a ", *"abcade", "<eos>", "\u2028x"]).encode() + b"\n")
    entries = read_entries(path, "zero")
    assert list(entries) == ["<pad>", "<unk>", "<eos>", "a", "b", "c", "d", "e", "x"]
    write_entries(tmp_path / "again", entries, "zero")
    assert read_entries(tmp_path / "again", "zero") == entries
    vocabulary = read_vocabulary(path, 9, 1, "zero")
    assert [vocabulary.words(ids) for ids in ([3, 0, 4], [3, 4, 2, 4])] == ["a", "a b"]
    ids, mask = batch(["a other", "e"], [vocabulary])
    np.testing.assert_array_equal(ids[0].T, [[3, 1, 2], [7, 2, 0]])
    np.testing.assert_array_equal(mask.T, [[1, 1, 1], [1, 1, 0]])
    config = CONFIGS["zero rms"].replace(options={"src_vocab_file": "", "tgt_vocab_file": "elsewhere/vocab.tgt"})
    options = with_names(config, ["vocab.tgt"]).options
    assert (options["src_vocab_file"], options["tgt_vocab_file"]) == ("", "vocab.tgt"), "a missing one keeps its place"


def test_batches_are_those_of_zero() -> None:
    """Sorted within buffers of lines; a batch that is too small waits for the next buffer, if there is one."""
    config = CONFIGS["zero rms"].replace(options={"buffer_size": 5, "eval_batch_size": 2, "data_leak_ratio": 1.0})
    batches = []

    class Recording:
        def translate(self, x: Any, x_mask: Any, **options: Any) -> tuple[Any, Any]:
            batches.append(x_mask.sum(axis=0).astype(int).tolist())
            assert options == dict.fromkeys(("beam_size", "max_length", "normalization_alpha"))
            return np.zeros((x.shape[2], 1, 1), int), np.zeros((x.shape[2], 1))

    target = Vocabulary({"<pad>": 0, "<unk>": 1, "<eos>": 2, "w": 3}, unknown=1, end=2)
    lines = ["w " * count for count in (5, 1, 0, 4, 2, 3, 9, 8)]
    assert list(translate(Recording(), config, lines, [target], target)) == [""] * 8
    assert batches == [[2, 3], [4, 5], [6, 9], [10]]


def test_the_commands_of_zero_translate_and_score(tmp_path: Path) -> None:
    """Empty lines stay empty; what docs/porting.md does not show."""
    names = {"src_vocab_file": "/elsewhere/vocab.src", "tgt_vocab_file": "vocab.tgt"}
    config, parameters = save(tmp_path, "zero rnn", "numpy", options=names)
    for side, size in (("src", config.source_vocab_sizes[0]), ("tgt", config.target_vocab_size)):
        (tmp_path / f"vocab.{side}").write_text("".join(f"{side}{index}\n" for index in range(size - 3)))
    sources, target = vocabularies(nematus.load(tmp_path))
    source, texts = ["src0 src1", "", "src2 other src0"], ["tgt0", "tgt1 tgt1", "other"]
    for name, lines in (("source", source), ("target", texts)):
        (tmp_path / name).write_text("\n".join(lines))
    model = RNNSearch(config.replace(label_smoothing=0.0), parameters)
    first, last = (target.words(beam[0]) for beam in model.translate(*batch(source[::2], sources)).sequences)
    files = "--source", tmp_path / "source", "--backend", "numpy"
    assert run("translate", tmp_path, *files).split("\n") == [first, "", last, ""]
    scored = run("score", tmp_path, *files, "--target", tmp_path / "target")
    (y,), y_mask = batch(texts, [target])
    losses = model.loss(*batch(source, sources), y, y_mask)
    np.testing.assert_allclose(list(map(float, scored.split())), losses, rtol=1e-5)
