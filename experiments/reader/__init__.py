"""The attentive reader on CNN and Daily Mail."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.experiment import Experiment, Options, Task, option
from rmsnorm.specification import errors


@dataclass(frozen=True)
class ReaderOptions(Options):
    """Those of the generated documents; the paper has 240 features, a rate of 8e-5 and keeps half."""

    steps: int = option(400, "Training steps.", least=1)
    every: int = option(50, "Steps from one evaluation to the next.", least=1)
    batch_size: int = option(64, "Questions in a batch.", least=1)
    rate: float = option(3e-3, "Learning rate of Adam; the paper has 8e-5.", least=0)
    width: int = option(32, "Features of words and states; the paper has 240.", least=1)
    keep: float = option(1.0, "Probability with which dropout keeps; the paper has 0.5.", least=0)
    questions: int = option(10_000, "Training questions, generated or read at most; 0 reads all.", least=0)
    tested: int = option(500, "Test questions, generated or read at most; 0 reads all.", least=0)
    longest: int = option(2000, "Words of a document that are read with --data.", least=1)
    vocabulary: int = option(50_000, "Words that are known with --data, the most frequent ones.", least=3)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep > 1:
            raise errors.out_of_domain("experiments", "keep", self.keep, "a probability", "choose 1 or less")


def _open(options: ReaderOptions, data: Path | None) -> Task:
    from experiments.reader.training import ReaderTask

    return ReaderTask(options, data)


EXPERIMENT = Experiment(
    name="reader",
    title="answers to questions about documents by the attentive reader",
    quality="accuracy",
    norms=("none", "layer", "rms", "prms"),
    options=ReaderOptions,
    open=_open,
    paper={"rms": -15.1, "prms": -15.8},
    level=0.95,
    margin=0.02,
)
