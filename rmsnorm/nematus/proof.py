"""The proof of a conversion: a sentence with its translation and scores, which can be computed again anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.files import read_json, write_text
from rmsnorm.nematus.backends import ArrayModel
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.rules import RULES
from rmsnorm.specification import errors

FILE: Final = "proof.json"
# Two float64 computations of the same scores differ by rounding errors of about 1e-13 of the largest score, as those of
# logits do. The smallest known mistake, a bias in the wrong place of an untrained model, changes logits by 1e-7.
BOUND: Final = 1e-10
_WANTED: Final = "the proof that rmsnorm port writes: source, beam_size, max_length, output, target and scores"
_WIDEST, _LONGEST = 4, 12  # of the search: enough to see a mistake, and soon done by the golden


class Answer(NamedTuple):
    """What a model says of the source: the best translation, as ids, and -log p of it and of the target."""

    output: list[int]
    scores: list[float]


class Verdict(NamedTuple):
    """What a model says now and what the proof expects. ``error`` is the largest difference of a score."""

    now: Answer
    expected: Answer
    error: float

    @property
    def bound(self) -> float:
        """The largest difference of a score that is rounding."""
        return BOUND * max(1.0, *map(abs, self.expected.scores))

    @property
    def holds(self) -> bool:
        """Whether the words are the same, and the scores but for rounding."""
        return self.now.output == self.expected.output and self.error <= self.bound


def write(folder: Path, config: Config, parameters: Mapping[str, Any], x: Any, y: Any) -> None:
    """Write what the golden says of a source (factors, length, 1) and of a target (length, 1)."""
    asked: dict[str, Any] = {
        "source": x[:, :, 0].tolist(), "target": y[:, 0].tolist(),
        "beam_size": min(config.beam_size, config.target_vocab_size, _WIDEST), "max_length": _LONGEST,
    }  # fmt: skip
    answer = _answer(ArrayModel("numpy", config, wide(parameters)), config, asked, None)
    write_text(folder / FILE, json.dumps({**asked, **answer._asdict()}, indent=2) + "\n")


def verify(folder: Path, backend: str, config: Config, parameters: Mapping[str, Any]) -> Verdict:
    """Compute again, in a framework and in float64, what stands in the proof beside a model.

    Raises:
        FileNotFoundError: there is no proof.
        ValueError: it is no proof, or that of a model of other sizes.
    """
    path = folder / FILE
    if not path.exists():
        raise FileNotFoundError(f"verify: {path} is missing, expected {_WANTED}; convert the model again")
    proof = read_json("verify", path, _WANTED)
    if not _is_proof(proof):
        raise errors.InputValueError(f"verify: {path} is something else, expected {_WANTED}; convert the model again")
    expected = Answer(proof["output"], proof["scores"])
    now = _answer(ArrayModel(backend, config, wide(parameters)), config, proof, expected.output)
    error = max(abs(one - other) for one, other in zip(now.scores, expected.scores, strict=True))
    return Verdict(now, expected, error if np.isfinite(error) else float("inf"))


def wide(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters in float64."""
    return {name: array.astype(np.float64) for name, array in parameters.items()}


def _answer(model: ArrayModel, config: Config, asked: Mapping[str, Any], scored: list[int] | None) -> Answer:
    """What a model says; ``scored`` is the translation that gets a score if it is not the model's own."""
    x = np.array(asked["source"], np.int64)[:, :, None]
    mask = np.ones(x.shape[1:])
    sequences, _ = model.translate(x, mask, beam_size=asked["beam_size"], max_length=asked["max_length"])
    best, end = sequences[0, 0].tolist(), RULES[config.dialect].end
    output = best[: best.index(end) + 1] if end in best else best

    def score(words: list[int]) -> float:
        y = np.array(words, np.int64)[:, None]
        return float(model.loss(x, mask, y, np.ones(y.shape))[0])

    return Answer(output, [score(scored or output), score(asked["target"])])


def _is_proof(proof: Any) -> bool:
    """Whether a value from a file has the parts of a proof; the model checks ids and sizes itself."""

    def numbers(values: Any, kinds: Any) -> bool:
        return isinstance(values, list) and 0 < len(values) < 1000 and all(type(one) in kinds for one in values)

    return (
        isinstance(proof, dict)
        and isinstance(source := proof.get("source"), list)
        and bool(source)
        and all(numbers(row, (int,)) and len(row) == len(source[0]) for row in source)
        and all(numbers(proof.get(name), (int,)) for name in ("output", "target"))
        and numbers(proof.get("scores"), (int, float))
        and len(proof["scores"]) == 2
        and all(type(proof.get(name)) is int and 0 < proof[name] <= 100 for name in ("beam_size", "max_length"))
    )
