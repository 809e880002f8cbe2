"""Nematus's dictionaries, and batches of sentences."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from nematus_commands import save
from nematus_models import config_of

from rmsnorm import nematus
from rmsnorm.nematus.numpy import RNNSearch
from rmsnorm.nematus.vocabulary import batch, read_vocabulary, vocabularies

SPECIAL = {"<EOS>": 0, "<GO>": 1, "<UNK>": 2}


def dictionary(path: Path, size: int, special: dict[str, int] = SPECIAL) -> Path:
    path.write_text(json.dumps({**special, **{f"w{index}": index for index in range(3, size)}}))
    return path


def saved(directory: Path, kind: str) -> nematus.Model:
    config = config_of(kind)
    sizes = enumerate((*config.source_vocab_sizes, config.target_vocab_size))
    names = [dictionary(directory / f"{index}.json", size + 2).name for index, size in sizes]
    save(directory, config, options={"dictionaries": [f"/elsewhere/{name}" for name in names]})
    return nematus.load(directory)


def test_from_words_to_words(tmp_path: Path) -> None:
    """The dictionaries that the options name, beside the model; the words above its vocabulary are unknown to it."""
    model = saved(tmp_path, "factors")
    sources, target = vocabularies(model)
    assert [len(vocabulary.ids) for vocabulary in (*sources, target)] == [8, 4, 8]
    x, x_mask = batch(["w3|w3 w7|<GO>  w8|w4", "", "what|w3"], sources)
    np.testing.assert_array_equal(x[0].T, [[3, 7, 2, 0], [0, 0, 0, 0], [2, 0, 0, 0]])
    np.testing.assert_array_equal(x[1].T, [[3, 1, 2, 0], [0, 0, 0, 0], [3, 0, 0, 0]])
    np.testing.assert_array_equal(x_mask.T, [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]])
    translations = RNNSearch(model.config, model.parameters).translate(x, x_mask, 2, 5)
    names = {index: word for word, index in target.ids.items()}
    for sequence in translations.sequences[:, 0]:
        ended = list(sequence).index(0) if 0 in sequence else len(sequence)
        assert target.words(sequence) == " ".join(names[index] for index in sequence[:ended])


def test_the_id_of_unknown_words(tmp_path: Path) -> None:
    """Master trains and scores by the dictionary, and translates with 2 whatever that is; others know only 1."""
    for first, ids in (({"eos": 0, "UNK": 1, "w2": 2}, 1), (SPECIAL, 2)):
        for name, size in (("0", 9), ("1", 8)):
            dictionary(tmp_path / f"{name}.json", size, first)
        for dialect, translating, scoring in (("tensorflow", 2, ids), ("tensorflow-v0.3", 1, 1), ("theano", 1, 1)):
            save(tmp_path, dialect=dialect, options={"dictionaries": ["0.json", "1.json"]})
            model = nematus.load(tmp_path)
            for wanted, asked in ((translating, False), (scoring, True)):
                sources, target = vocabularies(model, scoring=asked)
                assert [vocabulary.unknown for vocabulary in (*sources, target)] == [wanted, wanted]
                assert batch(["what"], sources)[0][0, 0, 0] == wanted


def test_errors(tmp_path: Path) -> None:
    model = saved(tmp_path, "factors")
    sources, _ = vocabularies(model)
    small = dictionary(tmp_path / "small.json", 6)
    lacks = r"small.json has no word for 6 and 1 more, expected one for each of the 8 ids"
    for options, message in (
        ({"target": small}, lacks),
        ({"target": "none.json"}, r"none.json is missing, expected a dictionary of Nematus; name"),
        ({"source": [small]}, r"the dictionaries is \['.*', '/elsewhere/2.json'\], expected 3 files"),
    ):
        with pytest.raises(FileNotFoundError if "none" in message else ValueError, match=message):
            vocabularies(model, **options)
    word = r"small.json is 'w.*3', expected words without line feeds, in UTF-8"
    for text, message in (
        ("{", r"is not JSON \(.*\), expected a dictionary"),
        ("[]", "is no dictionary of Nematus"),
        *((json.dumps({**SPECIAL, name: 3}), word) for name in ("w\n3", "w\ud8003")),
    ):
        small.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_vocabulary(small, 3, 2)
    with pytest.raises(ValueError, match=r"sentences is \[\], expected at least one; is the file empty\?"):
        batch([], sources)
    with pytest.raises(ValueError, match=r"a word of sentence 2 is 'w3', expected 2 factors; separate them by \|"):
        batch(["w3|w3", "w3"], sources)
