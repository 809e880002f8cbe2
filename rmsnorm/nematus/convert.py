"""Conversion of a Nematus model into another form; the result is read back and compared with the golden first.

Beside it is its proof: a sentence with its translation and scores, which can be computed again anywhere.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.files import read_json, write_text
from rmsnorm.nematus.backends import ArrayModel
from rmsnorm.nematus.centring import to_rms_norm
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.forms import save_keras, save_safetensors, save_tensorflow, save_theano
from rmsnorm.nematus.model import Model, load
from rmsnorm.nematus.vocabulary import require_dictionaries
from rmsnorm.specification import errors


class Target(NamedTuple):
    """A form of a model: the name of its file, what writes it, and the framework that is compared with the golden."""

    file: str
    save: Callable[[Path, Config, Mapping[str, Any]], None]
    framework: str


TARGETS: Final = {
    "torch": Target("model.safetensors", save_safetensors, "torch"),
    "keras": Target("model.keras", save_keras, "tf"),
    "flax": Target("model.safetensors", save_safetensors, "flax"),
    "numpy": Target("model.safetensors", save_safetensors, "numpy"),
    "tf": Target("model.npz", save_tensorflow, "numpy"),
    "theano": Target("model.npz", save_theano, "numpy"),
}

SENTENCES: Final = 4
FILE: Final = "proof.json"
# Two float64 computations of the same scores differ by rounding errors of about 1e-13 of the largest score, as those of
# logits do. The smallest known mistake, a bias in the wrong place of an untrained model, changes logits by 1e-7.
BOUND: Final = 1e-10
_WANTED: Final = "the proof that rmsnorm port writes: source, beam_size, max_length, output, target and scores"
_WIDEST, _LONGEST = 4, 12  # of the search: enough to see a mistake, and soon done by the golden


@dataclass(frozen=True)
class Conversion:
    """The model that was read back, and warnings of what its form cannot keep."""

    model: Model
    exact: float  # the largest change of a logit of random sentences, in float64
    error: float  # that with the parameters rounded to their dtype: another one if RMSNorm was made from LayerNorm
    largest: float  # the largest absolute logit
    warnings: tuple[str, ...]
    sentences: int = SENTENCES

    @property
    def is_exact(self) -> bool:
        """Whether the logits are the same but for rounding."""
        return self.exact <= BOUND * max(1.0, self.largest)


def convert(source: Model, folder: str | os.PathLike[str], to: str, *, rms_norm: bool = False) -> Conversion:
    """Write a model in another form, with its options and dictionaries, into a new folder if its logits stay the same.

    ``to`` is a key of TARGETS. With rms_norm LayerNorm becomes RMSNorm, exactly.

    Raises:
        ValueError: a dictionary of the model has too few words for it, or that of the source and of the target are
            exchanged; or what ``load`` and the form raise.
    """
    out, target = Path(folder), TARGETS[to]
    target = target._replace(file=target.file.replace("model.npz", source.config.rules.checkpoint))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"port: {out} exists, expected a new or an empty folder; name another")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"port: {out.parent} is not a folder, expected one to make {out.name} in; make it")
    require_dictionaries(source.config)
    config, parameters, exact = source.config, source.parameters, wide(source.parameters)
    wanted = ArrayModel("numpy", config, exact).logits(*_sentences(config))
    if rms_norm:
        config, exact = to_rms_norm(config, exact)
        dtype = next(iter(parameters.values())).dtype
        parameters = {name: array.astype(dtype) for name, array in exact.items()}
    temporary = out.parent / f".{out.name}.{os.getpid()}"
    temporary.mkdir()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            target.save(temporary / target.file, config, parameters)
        result = load(temporary)
        for name, array in parameters.items():
            if not np.array_equal(result.parameters[name], array):
                raise RuntimeError(f"port: {name} was read back with other values, expected those written")

        def change(parameters: Mapping[str, Any]) -> float:
            logits = ArrayModel(target.framework, result.config, parameters).logits(*_sentences(config))
            return abs(logits - wanted).max().item()

        error = change(wide(result.parameters))
        largest = change(exact) if rms_norm else error
        lost = tuple(str(w.message) for w in caught if issubclass(w.category, UserWarning))
        there = replace(result, config=result.config.replace(folder=str(out)), path=out / target.file)
        conversion = Conversion(there, largest, error, abs(wanted).max().item(), lost)
        if conversion.is_exact:
            x, mask, y = _sentences(config)
            prove(temporary, "numpy", result.config, result.parameters, (x[:, mask[:, 0] > 0, 0], y[:, 0]))
            if out.exists():
                out.rmdir()
            temporary.rename(out)
        return conversion
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sentences(config: Config) -> tuple[Any, Any, Any]:
    """Random source sentences of several lengths, their mask, and random target words."""
    rng = np.random.default_rng(0)
    lengths = rng.permutation(2 * SENTENCES)[:SENTENCES] + 1
    mask = (np.arange(lengths.max())[:, None] < lengths).astype(np.float64)
    x = np.stack([rng.integers(size, size=mask.shape) for size in config.source_vocab_sizes])
    return x, mask, rng.integers(config.target_vocab_size, size=(6, SENTENCES))


class Verdict(NamedTuple):
    """The translation and the scores that a model has now, and those that the proof expects."""

    output: list[int]
    scores: list[float]
    expected_output: list[int]
    expected_scores: list[float]

    @property
    def error(self) -> float:
        """The largest difference of a score; infinity if one is no number.

        >>> Verdict([], [1.0, float("nan")], [], [1.0, 1.0]).error
        inf
        """
        errors = np.abs(np.subtract(self.scores, self.expected_scores))
        return float(np.max(np.where(np.isnan(errors), np.inf, errors)))

    @property
    def bound(self) -> float:
        """The largest difference of a score that is rounding."""
        return BOUND * max(1.0, *map(abs, self.expected_scores))

    @property
    def holds(self) -> bool:
        """Whether the words are the same, and the scores but for rounding."""
        return self.output == self.expected_output and self.error <= self.bound


def prove(
    folder: Path, backend: str, config: Config, parameters: Mapping[str, Any], sentences: tuple[Any, Any] | None = None
) -> Verdict:
    """Compute in a framework and in float64 what stands in the proof beside a model.

    sentences: a source (factors, length) and a target (length,), of which a new proof is written.

    Raises:
        FileNotFoundError: there is no proof.
        ValueError: it is no proof, or that of a model of other sizes.
    """
    if sentences is None:
        proof = _read(folder / FILE)
    else:
        source, target = (ids.tolist() for ids in sentences)
        size = min(config.beam_size, config.target_vocab_size, _WIDEST)
        proof = {"source": source, "beam_size": size, "max_length": _LONGEST, "target": target}
    model = ArrayModel(backend, config, wide(parameters))
    x = np.array(proof["source"], np.int64)[:, :, None]
    mask, end = np.ones(x.shape[1:]), config.rules.end
    sequences, _ = model.translate(x, mask, beam_size=proof["beam_size"], max_length=proof["max_length"])
    best = sequences[0, 0].tolist()
    output = best[: best.index(end) + 1] if end in best else best
    expected = proof.get("output", output)
    targets = [np.array(words, np.int64)[:, None] for words in (expected, proof["target"])]
    scores = [float(model.loss(x, mask, y, np.ones(y.shape))[0]) for y in targets]  # -log p
    if sentences is not None:
        proof |= {"output": output, "scores": scores}
        write_text(folder / FILE, json.dumps(proof, indent=2) + "\n")
    return Verdict(output, scores, expected, proof["scores"])


def wide(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters in float64."""
    return {name: array.astype(np.float64) for name, array in parameters.items()}


def _read(path: Path) -> dict[str, Any]:
    """The proof in a file, if it has its parts; the model checks ids and sizes itself."""
    if not path.exists():
        raise FileNotFoundError(f"verify: {path} is missing, expected {_WANTED}; convert the model again")
    proof = read_json("verify", path, _WANTED)

    def are(values: Any, *kinds: type) -> bool:
        return isinstance(values, list) and 0 < len(values) < 1000 and all(type(one) in kinds for one in values)

    parts: Any = proof if isinstance(proof, dict) else {}
    source, scores = parts.get("source"), parts.get("scores")
    if not (
        are(source, list)
        and all(are(row, int) and len(row) == len(source[0]) for row in source)
        and all(are(parts.get(name), int) for name in ("output", "target"))
        and are(scores, int, float)
        and len(scores) == 2
        and all(type(parts.get(name)) is int and 0 < parts[name] <= 100 for name in ("beam_size", "max_length"))
    ):
        raise errors.InputValueError(f"verify: {path} is something else, expected {_WANTED}; convert the model again")
    return parts
