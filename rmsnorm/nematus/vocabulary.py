"""Nematus's dictionaries and zero's vocabularies: words to ids and back, and batches of sentences for its models."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import StringIO
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rmsnorm.files import read_json, read_text, write_text
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.dialects import RULES, Dialect
from rmsnorm.specification import errors

PADDING = 0  # the id that fills the rows after the end of a sentence
ZERO_FIRST = ("<pad>", "<unk>", "<eos>")  # the first words of every vocabulary of zero
_ZERO_FILES = ("src_vocab_file", "tgt_vocab_file")  # zero's options


class Loaded(Protocol):
    """A model that ``nematus.load`` returned."""

    @property
    def config(self) -> Config: ...


@dataclass(frozen=True)
class Vocabulary:
    """Words of one factor of the source, or of the target."""

    ids: dict[str, int]  # of the words that the model knows
    unknown: int  # the id of all others
    end: int = 0  # the id that ends every sentence

    @cached_property
    def named(self) -> dict[int, str]:
        """The word of every id."""
        return {index: word for word, index in self.ids.items()}

    def words(self, sequence: Sequence[int]) -> str:
        """The words of a sequence up to the end of sentence or the padding, with spaces between them."""
        ids = takewhile(lambda index: index not in (self.end, PADDING), map(int, sequence))
        return " ".join(self.named[index] for index in ids)


def read_vocabulary(
    path: str | os.PathLike[str], size: int, unknown: int, dialect: Dialect = "tensorflow"
) -> Vocabulary:
    """The first ``size`` words of a dictionary; ValueError if it has too few, and what read_entries raises."""
    ids = {word: index for word, index in read_entries(path, dialect).items() if 0 <= index < size}
    missing = sorted(set(range(size)) - set(ids.values()))
    if missing:
        raise errors.InputValueError(
            f"vocabulary: {path} has no word for {missing[0]} and {len(missing) - 1} more, expected one for each of "
            f"the {size} ids of the model; is it the dictionary of another model? put that of this one in its place"
        )
    return Vocabulary(ids, unknown, RULES[dialect].end)


def read_entries(path: str | os.PathLike[str], dialect: Dialect) -> dict[str, int]:
    """All words of a dictionary of Nematus in JSON, or of zero with a word a line, with their ids.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is none, or has a word that cannot be written as a line.
    """
    if RULES[dialect].is_zero:
        text = read_text("vocabulary", path, "a vocabulary of zero")
        lines = [line.strip() for line in StringIO(text, newline=None)]
        return {word: index for index, word in enumerate(dict.fromkeys((*ZERO_FIRST, *lines)))}
    entries = read_json("vocabulary", path, "a dictionary of Nematus")
    if not isinstance(entries, dict) or not all(type(index) is int for index in entries.values()):
        raise errors.InputValueError(
            f"vocabulary: {path} is no dictionary of Nematus, expected words with ids; name another"
        )
    for word in entries:
        if "\n" in word or any("\ud800" <= letter <= "\udfff" for letter in word):
            want = "words without line feeds, in UTF-8, as a line is a sentence"
            raise errors.out_of_domain("vocabulary", f"a word of {path}", word, want, "mend the dictionary")
    return entries


def write_entries(path: Path, entries: dict[str, int], dialect: Dialect) -> None:
    """Write a dictionary so that read_entries reads the same words."""
    text = "\n".join(entries) if RULES[dialect].is_zero else json.dumps(entries, ensure_ascii=False, indent=2)
    write_text(path, text + "\n")


def vocabularies(
    model: Loaded,
    source: Sequence[str | os.PathLike[str]] | None = None,
    target: str | os.PathLike[str] | None = None,
    *,
    scoring: bool = False,
) -> tuple[list[Vocabulary], Vocabulary]:
    """The vocabularies of the factors of the source, and that of the target, of a model that ``load`` returned.

    The files are by default those of dictionaries(). The id of unknown words is 1 in zero, Theano and v0.3. Master
    translates with 2. It trains and scores with 2 if 2 is ``<UNK>`` in the dictionary, and otherwise with 1.
    """
    usual = dictionaries(model.config)
    paths = [*(usual[:-1] if source is None else source), *(usual[-1:] if target is None else [target])]
    pairs = _with_sizes(paths, model.config)
    if missing := [path for path in paths if path in usual and not path.exists()]:
        names, where = " and ".join(path.name for path in missing), missing[0].parent
        raise FileNotFoundError(
            f"vocabularies: {missing[0]} is missing, expected a dictionary of the model; copy {names} from the folder "
            f"of the model that this one was made from into {where}, or name the files with --dictionary"
        )
    read = _read(pairs, model.config)
    if scoring:
        read = [words if words.ids.get("<UNK>") == 2 else replace(words, unknown=1) for words in read]
    return read[:-1], read[-1]


def require_dictionaries(config: Config) -> None:
    """Refuses a model whose dictionaries have too few words for it; those that are missing or not named are no fault.

    Raises:
        ValueError: a dictionary that is there has no word for an id of the model, or another form.
    """
    if paths := dictionaries(config):
        _read([(path, size) for path, size in _with_sizes(paths, config) if path.exists()], config)


def _with_sizes(paths: Sequence[Any], config: Config) -> list[tuple[Any, int]]:
    sizes = (*config.source_vocab_sizes, config.target_vocab_size)
    if len(paths) != len(sizes):
        shown, want = list(map(str, paths)), f"{len(sizes)} files"
        raise errors.out_of_domain("vocabularies", "the dictionaries", shown, want, "name all of them")
    return list(zip(paths, sizes, strict=True))


def _read(pairs: list[tuple[Any, int]], config: Config) -> list[Vocabulary]:
    """The dictionaries of a model, that of the target last; of those that were exchanged the error says so."""

    def read(pairs: list[tuple[Any, int]]) -> list[Vocabulary]:
        return [read_vocabulary(path, size, config.rules.unknown, config.dialect) for path, size in pairs]

    try:
        return read(pairs)
    except errors.InputValueError as error:
        if len(pairs) != 2:
            raise
        (source, size), (target, size_of_target) = pairs
        try:
            read([(target, size), (source, size_of_target)])
        except errors.InputError:
            raise error from None
        shown, fix = [str(source), str(target)], "exchange the two, in the options of the model or after --dictionary"
        want = f"a dictionary of {size} words for the source and one of {size_of_target} for the target"
        raise errors.out_of_domain("vocabulary", "the order of the dictionaries", shown, want, fix) from None


def dictionaries(config: Config) -> list[Path]:
    """The dictionaries that the options of a model name: beside the model, or at a relative path in the current folder.

    Options from outside choose no files elsewhere: of an absolute path, or one with "..", the last part counts.
    """
    options, files = config.options, []
    of_zero = [options[name] for name in _ZERO_FILES if options.get(name)]
    names: Any = of_zero if config.rules.is_zero else options.get("dictionaries") or []
    if not isinstance(names, list) or not all(isinstance(name, str) and Path(name).name for name in names):
        where = "dictionaries in the options"
        raise errors.out_of_domain("vocabularies", where, names, "a list of file names", "mend it")
    for path in map(Path, names):
        beside, leaves = Path(config.folder) / path.name, path.is_absolute() or ".." in path.parts
        files.append(beside if leaves or beside.is_file() or not path.is_file() else path)
    return files


def copied(config: Config, folder: Path) -> Config:
    """Write the dictionaries of a model that was read into a folder. The config that names them, for a model there."""
    names: list[str] = []
    for number, path in enumerate(dictionaries(config) if config.folder else ()):
        name = path.name if path.name not in names else f"{number}.{path.name}"
        names.append(name)
        if not path.exists():
            missing = f"{path} is missing: copy it beside the result, or translate with --dictionary"
            warnings.warn(missing, stacklevel=3)
        elif path.resolve() != (folder / name).resolve():
            # Options from outside may name any file: only words that were read are written.
            write_entries(folder / name, read_entries(path, config.dialect), config.dialect)
    return with_names(config, names).replace(folder=str(folder)) if names else config


def with_names(config: Config, names: list[str]) -> Config:
    """The config whose options name these dictionaries."""
    named: dict[str, Any] = {"dictionaries": names, "source_dicts": names[:-1], "target_dict": names[-1]}
    if config.rules.is_zero:
        named = dict(zip(filter(config.options.get, _ZERO_FILES), names, strict=True))
    return config.replace(options={**config.options, **named})


def count_unknown(sentence: str, factors: Sequence[Vocabulary]) -> tuple[int, int]:
    """How many words of a sentence the model does not know, in one of their factors, and how many words it has."""
    words = [_parts(word, factors) for word in sentence.split()]
    known = [all(part in own.ids for part, own in zip(parts, factors, strict=False)) for parts in words]
    return known.count(False), len(words)


def batch(sentences: Sequence[str], factors: Sequence[Vocabulary]) -> tuple[Any, Any]:
    """Ids (factors, length, batch) and mask (length, batch) of sentences with their ends: words, of factors with |."""
    if not sentences:
        raise errors.out_of_domain("batch", "sentences", [], "at least one", "is the file empty?")
    lines = [sentence.split() for sentence in sentences]
    length = 1 + max(map(len, lines))
    x = np.full((len(factors), length, len(lines)), PADDING, np.int64)
    for column, words in enumerate(lines):
        x[:, len(words), column] = [vocabulary.end for vocabulary in factors]
        for row, word in enumerate(words):
            parts = _parts(word, factors)
            if len(parts) != len(factors):
                where, want = f"a word of sentence {column + 1}", f"{len(factors)} factors"
                raise errors.out_of_domain("batch", where, word, want, "separate them by |")
            pairs = zip(parts, factors, strict=True)
            x[:, row, column] = [vocabulary.ids.get(part, vocabulary.unknown) for part, vocabulary in pairs]
    mask = np.arange(length)[:, None] <= np.array([len(words) for words in lines])
    return x, mask.astype(np.float64)


def _parts(word: str, factors: Sequence[Vocabulary]) -> list[str]:
    return word.split("|") if len(factors) > 1 else [word]
