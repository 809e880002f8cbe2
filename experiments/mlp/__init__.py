"""Digits by three hidden layers of sigmoids: the seed experiment on LayerNorm, at batch sizes 60 and 4."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.experiment import NORMS, Experiment, Options, Task, option
from experiments.images import digits, mnist


@dataclass(frozen=True)
class MLPOptions(Options):
    """Those of the seed experiment."""

    steps: int = option(50_000, "Training steps.", least=1)
    every: int = option(500, "Steps from one evaluation to the next.", least=1)
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
    norms=NORMS,
    options=MLPOptions,
    open=_open,
)
