"""Retrieval of images and captions by order embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.experiment import Experiment, Options, Task, option


@dataclass(frozen=True)
class RetrievalOptions(Options):
    """Those of the generated images; the paper has batches of 128, 1024 features, and words of 300."""

    steps: int = option(1000, "Training steps.", least=1)
    every: int = option(100, "Steps from one evaluation to the next.", least=1)
    batch_size: int = option(64, "Images in a batch; the paper has 128.", least=2)
    rate: float = option(1e-3, "Learning rate of Adam.", least=0)
    width: int = option(128, "Features of an embedding; the paper has 1024.", least=1)
    embedding: int = option(64, "Features of a word; the paper has 300.", least=1)
    margin: float = option(0.05, "Margin of the contrastive cost.", least=0)
    images: int = option(2000, "Generated training images.", least=1)
    tested: int = option(500, "Generated test images.", least=5)
    features: int = option(64, "Features of a generated image.", least=1)


def _open(options: RetrievalOptions, data: Path | None) -> Task:
    from experiments.retrieval.training import RetrievalTask

    return RetrievalTask(options, data)


EXPERIMENT = Experiment(
    name="retrieval",
    title="images and captions that find each other by order embeddings",
    quality="recall",
    norms=("none", "layer", "rms", "prms"),
    options=RetrievalOptions,
    open=_open,
    level=90.0,
    margin=2.0,
    paper={"rms": -40.8, "prms": -63.9},
)
