"""Images of 32×32 by ConvPool-CNN-C, as the paper has it on CIFAR-10 after Salimans and Kingma 2016."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.experiment import NORMS, Experiment, Options, Task, option


@dataclass(frozen=True)
class CIFAROptions(Options):
    """Salimans and Kingma have 200 epochs, which are 100,000 steps. The defaults suit digits in colour."""

    steps: int = option(1500, "Training steps; Salimans and Kingma have 100,000.", least=1)
    every: int = option(100, "Steps from one evaluation to the next.", least=1)
    batch_size: int = option(32, "Images in a batch; Salimans and Kingma have 100.", least=2)
    rate: float = option(0.003, "Learning rate of Adam, which falls to 0 in the second half.", least=0)
    width: int = option(8, "Channels of the first convolutions, half of those of the others; they have 96.", least=1)
    noise: float = option(0.05, "Standard deviation of the noise on training images; they have 0.15.", least=0)
    drop: float = option(0.2, "Part of the features that dropout leaves out; they have 0.5.", least=0)
    whitening: float = option(0.1, "Added to the variances before whitening; they have 1e-5.", least=1e-12)
    images: int = option(1437, "Training images of the default data.", least=2)


def _open(options: CIFAROptions, data: Path | None) -> Task:
    from experiments.cifar.data import cifar, digits_in_colour
    from experiments.cifar.torch import CIFARTask

    return CIFARTask(options, cifar(data) if data else digits_in_colour(options.images))


EXPERIMENT = Experiment(
    name="cifar",
    title="images of 32 by 32 by ConvPool-CNN-C",
    quality="accuracy",
    norms=NORMS[:-1],
    options=CIFAROptions,
    open=_open,
    level=0.95,
    margin=0.02,
)
