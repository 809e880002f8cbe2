"""Trains one model for every norm, in turns, and keeps what is needed to continue after any end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from experiments.experiment import Experiment, Options, Trainer
from experiments.record import Record
from experiments.results import summary, write
from rmsnorm.specification import errors

SAVED: Final = 60.0  # seconds of training after which a checkpoint is written, also between evaluations


class Progress(Protocol):
    """What shows how far a run is."""

    def __enter__(self) -> Any: ...
    def __exit__(self, *error: Any) -> None: ...
    def begin(self, total: int, done: int) -> None: ...
    def advance(self) -> None: ...
    def evaluated(self, text: str) -> None: ...


def run(
    experiment: Experiment,
    options: Options,
    norms: Sequence[str],
    seeds: Sequence[int],
    data: Path | None,
    out: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Train every norm with every seed, or continue the run in the folder, and write its results. The summary.

    Raises:
        ValueError: a norm is not one of the experiment, data or checkpoint are damaged, or the folder has another run.
        FileNotFoundError: data are missing.
    """
    for norm in norms:
        if norm not in experiment.norms:
            raise errors.not_a_choice("experiments", "norm", norm, experiment.norms)
    settings = {
        "experiment": experiment.name,
        "norms": list(norms),
        "options": asdict(options),
        "statement": {"level": experiment.level, "margin": experiment.margin},  # before the run, and kept with it
        "data": str(data.resolve()) if data else None,
    }
    out.mkdir(parents=True, exist_ok=True)
    record = Record.open(out, settings)
    task = experiment.open(options, data)
    with progress:
        done = sum(min(record.steps(seed), options.steps) for seed in seeds)
        progress.begin(options.steps * len(seeds), done)
        for seed in seeds:
            if record.steps(seed) < options.steps:
                trainers = {norm: task.trainer(norm, seed) for norm in norms}
                record.begin(seed, trainers)
                _train(experiment, options, record, trainers, progress, seed)
    result = summary(experiment, record, seeds, task.facts)
    write(out, record, result)
    return result


def _train(
    experiment: Experiment,
    options: Options,
    record: Record,
    trainers: Mapping[str, Trainer],
    progress: Progress,
    seed: int,
) -> None:
    saved = time.monotonic()
    for number in range(record.steps(seed), options.steps):
        measured = {norm: _timed(trainers[norm], number) for norm in _order(list(trainers), seed, number)}
        record.add(seed, measured)
        progress.advance()
        is_evaluated = (number + 1) % options.every == 0 or number + 1 == options.steps
        if is_evaluated:
            for norm, trainer in trainers.items():
                record.evaluations.append({"seed": seed, "norm": norm, "step": number + 1, **trainer.evaluate()})
        if is_evaluated or time.monotonic() - saved > SAVED:
            record.save(seed, trainers)
            saved = time.monotonic()
        if is_evaluated:
            values = {row["norm"]: row[experiment.quality] for row in record.evaluations[-len(trainers) :]}
            shown = " ".join(f"{norm} {value:.4g}" for norm, value in values.items())
            progress.evaluated(f"seed {seed} {experiment.quality} {shown}")


def _timed(trainer: Trainer, number: int) -> tuple[float, float]:
    """Loss and seconds of a step."""
    began = time.perf_counter()
    loss = trainer.step(number)
    return loss, time.perf_counter() - began


def _order(norms: list[str], seed: int, number: int) -> list[str]:
    """The order of the turns, another one in every step: what a norm leaves in the caches meets all others."""
    return [norms[index] for index in np.random.default_rng([seed, number]).permutation(len(norms))]
