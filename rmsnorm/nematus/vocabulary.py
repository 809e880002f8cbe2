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
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rmsnorm.files import read_json, read_text, write_text
from rmsnorm.nematus.dialects import rules
from rmsnorm.nematus.rules import RULES, Dialect
from rmsnorm.specification import errors

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

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


def _of_sizes(paths: Sequence[Any], sizes: Sequence[int], config: Config) -> list[Vocabulary]:
    """The dictionaries of a model, that of the target last; of those that were exchanged the error says so."""
    unknown, dialect = rules(config).unknown, config.dialect

    def read(paths: Sequence[Any]) -> list[Vocabulary]:
        return [read_vocabulary(path, size, unknown, dialect) for path, size in zip(paths, sizes, strict=True)]

    try:
        return read(paths)
    except errors.InputValueError as error:
        if not len(paths) == 2 == len(config.source_vocab_sizes) + 1:
            raise
        try:
            read(paths[::-1])
        except errors.InputError:
            raise error from None
        want = f"a dictionary of {sizes[0]} words for the source and one of {sizes[1]} for the target"
        raise errors.out_of_domain(
            "vocabulary",
            "the order of the dictionaries",
            list(map(str, paths)),
            want,
            "exchange the two, in the options of the model or after --dictionary",
        ) from None


def require_dictionaries(model: Loaded) -> None:
    """Refuses a model whose dictionaries have too few words for it; those that are missing or not named are no fault.

    Raises:
        ValueError: a dictionary that is there has no word for an id of the model, or another form.
    """
    paths, config = dictionaries(model), model.config
    sizes = (*config.source_vocab_sizes, config.target_vocab_size)
    if not paths:
        return
    if len(paths) != len(sizes):
        want = f"{len(sizes)} files"
        raise errors.out_of_domain("vocabularies", "the dictionaries", list(map(str, paths)), want, "name all of them")
    there = [(path, size) for path, size in zip(paths, sizes, strict=True) if path.exists()]
    _of_sizes([path for path, _ in there], [size for _, size in there], config)


def read_entries(path: str | os.PathLike[str], dialect: Dialect) -> dict[str, int]:
    """All words of a dictionary with their ids: JSON of Nematus, or lines of zero. ValueError if it is neither."""
    if RULES[dialect].own_options:
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
    text = "\n".join(entries) if RULES[dialect].own_options else json.dumps(entries, ensure_ascii=False, indent=2)
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
    config = model.config

    def files(usual: Sequence[Any]) -> list[Any]:
        return [*(usual[:-1] if source is None else source), *(usual[-1:] if target is None else [target])]

    usual = dictionaries(model)
    paths, sizes = files(usual), [*config.source_vocab_sizes, config.target_vocab_size]
    if len(paths) != len(sizes):
        shown, want = list(map(str, files(_in_options(config)))), f"{len(sizes)} files"
        raise errors.out_of_domain("vocabularies", "the dictionaries", shown, want, "name all of them")
    if missing := [path for path in paths if path in usual and not path.exists()]:
        names, where = " and ".join(path.name for path in missing), missing[0].parent
        raise FileNotFoundError(
            f"vocabularies: {missing[0]} is missing, expected a dictionary of the model; copy {names} from the folder "
            f"of the model that this one was made from into {where}, or name the files with --dictionary"
        )
    read = _of_sizes(paths, sizes, config)
    if scoring:
        read = [words if words.ids.get("<UNK>") == 2 else replace(words, unknown=1) for words in read]
    return read[:-1], read[-1]


def dictionaries(model: Loaded) -> list[Path]:
    """The dictionaries that the options of a model name: beside the model, or at a relative path in the current folder.

    Options from outside choose no files elsewhere: of an absolute path, or one with "..", the last part counts.
    """
    return _dictionaries(model.config)


def _dictionaries(config: Config) -> list[Path]:
    files = []
    for path in map(Path, _in_options(config)):
        beside, leaves = Path(config.folder) / path.name, path.is_absolute() or ".." in path.parts
        files.append(beside if leaves or beside.is_file() or not path.is_file() else path)
    return files


def _in_options(config: Config) -> list[str]:
    options = config.options
    of_zero = [options[name] for name in _ZERO_FILES if options.get(name)]
    names: Any = of_zero if rules(config).own_options else options.get("dictionaries") or []
    if not isinstance(names, list) or not all(isinstance(name, str) and Path(name).name for name in names):
        where = "dictionaries in the options"
        raise errors.out_of_domain("vocabularies", where, names, "a list of file names", "mend it")
    return names


def copied(config: Config, folder: Path) -> Config:
    """Write the dictionaries of a model that was read into a folder. The config that names them, for a model there."""
    names: list[str] = []
    for number, path in enumerate(_dictionaries(config) if config.folder else ()):
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
    if rules(config).own_options:
        named = dict(zip(filter(config.options.get, _ZERO_FILES), names, strict=True))
    return config.replace(options={**config.options, **named})


def count_unknown(sentence: str, factors: Sequence[Vocabulary]) -> tuple[int, int]:
    """How many words of a sentence the model does not know, in one of their factors, and how many words it has."""
    words = sentence.split()
    parts = [word.split("|") if len(factors) > 1 else [word] for word in words]
    known = [all(part in own.ids for part, own in zip(of_word, factors, strict=False)) for of_word in parts]
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
            parts = word.split("|") if len(factors) > 1 else [word]
            if len(parts) != len(factors):
                where, want = f"a word of sentence {column + 1}", f"{len(factors)} factors"
                raise errors.out_of_domain("batch", where, word, want, "separate them by |")
            pairs = zip(parts, factors, strict=True)
            x[:, row, column] = [vocabulary.ids.get(part, vocabulary.unknown) for part, vocabulary in pairs]
    mask = np.arange(length)[:, None] <= np.array([len(words) for words in lines])
    return x, mask.astype(np.float64)
