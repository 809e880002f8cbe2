"""Translation by RNNSearch, as the paper has it with Nematus, in PyTorch and Flax."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.experiment import Experiment, Options, Task, option

NORMS = ("none", "layer", "rms", "prms")


@dataclass(frozen=True)
class TranslationOptions(Options):
    """Those of every model that translates. No dropout, no smoothing of labels."""

    steps: int = option(600, "Training steps; the paper's figures have 10,000 and more.", least=1)
    every: int = option(50, "Steps from one evaluation to the next.", least=1)
    framework: str = option("flax", "Framework:", choices=("torch", "flax"))
    batch_size: int = option(32, "Sentences in a batch; Nematus has 80.", least=1)
    rate: float = option(0.004, "Learning rate of Adam; Nematus has 1e-4.", least=0)
    clip: float = option(1.0, "Largest norm of the gradient, as in Nematus.", least=1e-9)
    init_center: float = option(0.0, "Added to every matrix at the beginning; the paper has 0.2 for its robustness.")
    longest: int = option(50, "Words of a sentence for training; longer ones are left out.", least=1)
    words: int = option(30_000, "Words of a vocabulary that is made.", least=4)
    tested: int = option(100, "Sentences of the test, the first ones.", least=1)
    beam_size: int = option(1, "Hypotheses of a search; Nematus has 12.", least=1)
    sentences: int = option(4000, "Sentences of the default data for training.", least=1)

    def model(self) -> dict[str, Any]:
        """Fields of the Config of the model."""
        raise NotImplementedError


@dataclass(frozen=True)
class RNNSearchOptions(TranslationOptions):
    """Sizes of RNNSearch."""

    embedding: int = option(32, "Size of the embeddings; Nematus has 512.", least=1)
    state: int = option(64, "Size of the states; Nematus has 1000.", least=1)

    def model(self) -> dict[str, Any]:
        return {"embedding_size": self.embedding, "state_size": self.state}


def open_task(options: TranslationOptions, data: Path | None) -> Task:
    """The data and what trains on them: the framework is loaded with the first model."""
    from experiments.translation.task import TranslationTask
    from experiments.translation.texts import generated, read

    return TranslationTask(options, read(data, options.words) if data else generated(options.sentences))


EXPERIMENT = Experiment(
    name="translation",
    title="translation by RNNSearch",
    quality="BLEU",
    norms=NORMS,
    options=RNNSearchOptions,
    open=open_task,
    level=80.0,
    margin=5.0,
    paper={"rms": -24.7, "prms": -25.9},
)
