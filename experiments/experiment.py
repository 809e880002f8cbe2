"""What an experiment is: a folder or file that has an ``EXPERIMENT``, by its name in ``NAMES``. No array library.

A run has a trainer for every norm. They train step by step in turns, on the same batches: whatever a step draws, it
draws from its number and the seed alone, so that all norms see the same, and so does a run that continues another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from experiments.norms import KINDS
from rmsnorm.specification import errors

NAMES: Final = ("mlp", "translation", "transformer", "reader", "retrieval", "cifar")
NORMS: Final = ("none", "batch", "weight", "layer", "rms", "prms")
PARTIAL: Final = 0.0625  # of pRMSNorm in the paper

State = Mapping[str, np.ndarray[Any, Any]]


class Trainer(Protocol):
    """A model with one norm in training.

    Attributes:
        parameters: how many numbers it learns.
    """

    parameters: int

    def step(self, number: int) -> float:
        """Train on the batch of this number, counted from 0, to the end: no work of a device is left. The loss."""
        ...

    def seconds(self) -> dict[str, float]:
        """Train on the first batch once more. Seconds of ``forward`` and ``backward``, and of the whole ``step``.

        The first call may compile.
        """
        ...

    def evaluate(self) -> dict[str, float]:
        """Measures of quality by name, ``Experiment.quality`` among them. Leaves the training as it is."""
        ...

    def state(self) -> State:
        """All that training changes, as arrays by name."""
        ...

    def restore(self, state: State) -> None:
        """Go on from what ``state`` returned."""
        ...


class Task(Protocol):
    """The data of an experiment, read and checked.

    Attributes:
        facts: what summary.json says of the data.
    """

    @property
    def facts(self) -> Mapping[str, Any]: ...

    def trainer(self, norm: str, seed: int) -> Trainer:
        """A new model with this norm. Norms of the same seed begin with the same weights, where they have the same."""
        ...


def partial_of(norm: str) -> float | None:
    """The fraction of the elements in the statistic of a norm: that in its name in percent, or the paper's 6.25 %.

    >>> partial_of("rms"), partial_of("prms"), partial_of("prms-25")
    (None, 0.0625, 0.25)
    """
    name, _, percent = norm.partition("-")
    if name != "prms":
        return None
    return float(percent) / 100 if percent else PARTIAL


def option(default: Any, text: str, *, least: float | None = None, choices: tuple[str, ...] = ()) -> Any:
    """A field of ``Options``, which is an option on the command line."""
    return field(default=default, metadata={"help": text, "least": least, "choices": choices})


@dataclass(frozen=True)
class Options:
    """The options of every experiment. An experiment adds its own, or has other defaults.

    Raises:
        ValueError: a value is out of its domain.
    """

    steps: int = option(1000, "Training steps.", least=1)
    every: int = option(100, "Steps from one evaluation to the next.", least=1)
    operations: str = option(
        "ours", "LayerNorm of the framework and RMSNorm of this package; both of the framework; or both as separate"
        " operations, as in the paper's programs:", choices=KINDS,
    )  # fmt: skip
    threads: int = option(1, "Threads of the framework; small matrices are fastest on one.", least=1)

    def __post_init__(self) -> None:
        for name, row in self.__dataclass_fields__.items():
            value, least, choices = getattr(self, name), row.metadata["least"], row.metadata["choices"]
            if least is not None and not value >= least:
                raise errors.out_of_domain("experiments", name, value, f"a number >= {least:g}", "choose another")
            if choices and value not in choices:
                raise errors.not_a_choice("experiments", name, value, choices)


@dataclass(frozen=True)
class Experiment:
    """An experiment.

    Attributes:
        name: on the command line.
        title: in the report.
        quality: the measure that counts, as ``Trainer.evaluate`` names it; higher is better.
        norms: those that its model can have; all of them run by default.
        options: the class of its options.
        open: reads the data from a folder, or makes the default data where that is None. Loads the framework.
        paper: time of a step in percent of that with LayerNorm, minus 100, by norm, as the paper has it.
        level: the quality that the best norm should reach by default.
        margin: RMSNorm is not worse than LayerNorm, if its quality is not lower by more than this.
    """

    name: str
    title: str
    quality: str
    norms: tuple[str, ...]
    options: type[Options]
    open: Callable[[Any, Path | None], Task]
    paper: Mapping[str, float] = field(default_factory=dict)
    level: float = 0.0
    margin: float = 0.0


def get(name: str) -> Experiment:
    """The experiment of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in NAMES:
        raise errors.not_a_choice("experiments", "the experiment", name, NAMES)
    return import_module(f"experiments.{name}").EXPERIMENT
