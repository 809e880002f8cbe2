"""The attentive reader in training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from experiments.batches import batch_of, check_batch
from experiments.norms import used
from experiments.reader import cloze
from experiments.reader.model import AttentiveReader, Config
from experiments.torch_training import TorchTrainer, seeded
from experiments.weights import initial
from rmsnorm.nematus.config import Norm
from rmsnorm.specification import errors

if TYPE_CHECKING:
    from experiments.reader import ReaderOptions

EVALUATED = 64  # questions at once


class ReaderTask:
    """See experiments.experiment.Task.

    Raises:
        FileNotFoundError, ValueError: the data are missing or damaged, or a batch is larger than they are.
    """

    def __init__(self, options: ReaderOptions, data: Path | None) -> None:
        self.options = options
        sizes = options.questions, options.tested
        self.data = cloze.read(data, *sizes, options.longest, options.vocabulary) if data else cloze.generated(*sizes)
        check_batch(options.batch_size, len(self.data.train))
        if not self.data.test:
            raise errors.out_of_domain("experiments", "tested", options.tested, "1 or more without --data", "take more")
        sizes = len(self.data.train), len(self.data.test)
        counts = {"training questions": sizes[0], "test questions": sizes[1], "words": self.data.words}
        self.facts = {**counts, "elements of a norm": f"{options.width} or {4 * options.width}"}

    def trainer(self, norm: Any, seed: int) -> ReaderTrainer:
        return ReaderTrainer(self.options, self.data, norm, seed)


class ReaderTrainer(TorchTrainer):
    """Adam."""

    def __init__(self, options: ReaderOptions, data: cloze.Cloze, norm: Norm, seed: int) -> None:
        self.options, self.data = options, data
        width = options.width
        config = Config(words=data.words, width=width, embedding=width, hidden=width, norm=norm, keep=options.keep)
        model = AttentiveReader(config, initial(config.shapes(), seed)).train()
        super().__init__(model, torch.optim.Adam(model.parameters(), lr=options.rate), seed)
        self.norms = used("torch", options.operations)

    def loss(self, number: int) -> Tensor:
        seeded(self.seed, number)
        rows = batch_of(len(self.data.train), self.options.batch_size, self.seed, number)
        with self.norms:
            cost: Tensor = self.model.cost(*cloze.batch([self.data.train[row] for row in rows]))
        return cost

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Of all words, and of the entities in the document, as the authors' program counts errors."""
        self.model.eval()
        right: list[Any] = []
        for start in range(0, len(self.data.test), EVALUATED):
            desc, *rest, answers = cloze.batch(self.data.test[start : start + EVALUATED])
            probs = self.model(desc, *rest).probs.numpy()
            seen = np.zeros(probs.shape, bool)
            seen[np.arange(len(answers)), desc] = True
            allowed = np.zeros(probs.shape[1], bool)
            allowed[self.data.entities] = True
            of_entities = np.where(seen & allowed, probs, 0).argmax(axis=1)
            right.append((probs.argmax(axis=1) == answers, of_entities == answers))
        self.model.train()
        of_words, of_entities = np.concatenate(right, axis=1).mean(axis=1).tolist()
        return {"accuracy": of_words, "accuracy of entities": of_entities}
