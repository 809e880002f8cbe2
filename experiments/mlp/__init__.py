"""Digits by three hidden layers of sigmoids: the seed experiment on batch and LayerNorm, at batch sizes 60 and 4."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.experiment import NORMS, Experiment, Options, Task, option
from experiments.images import digits, mnist


@dataclass(frozen=True)
class MLPOptions(Options):
    """A model that trains in seconds; the seed experiment has 50,000 steps."""

    steps: int = option(1500, "Training steps; the seed experiment has 50,000.", least=1)
    every: int = option(100, "Steps from one evaluation to the next.", least=1)
    batch_size: int = option(60, "Images in a batch; the seed experiment has 60 and 4.", least=2)
    rate: float = option(0.5, "Learning rate of SGD.", least=0)
    width: int = option(100, "Size of the hidden layers.", least=1)


def _open(options: MLPOptions, data: Path | None) -> Task:
    from experiments.mlp.torch import MLPTask

    return MLPTask(options, mnist(data) if data else digits())


EXPERIMENT = Experiment(
    name="mlp",
    title="digits by three hidden layers of 100 sigmoids",
    quality="accuracy",
    norms=(*NORMS, "prms-12.5", "prms-25", "prms-50"),
    options=MLPOptions,
    open=_open,
    level=0.95,
    margin=0.02,
)
