"""Training and test of a model that translates, in any framework."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol
from zlib import crc32

import numpy as np

from experiments.batches import batch_of, check_batch
from experiments.experiment import State
from experiments.translation.texts import Texts
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.names import variables
from rmsnorm.nematus.translate import translate
from rmsnorm.nematus.vocabulary import Vocabulary
from rmsnorm.specification import errors
from rmsnorm.specification.frameworks import framework

if TYPE_CHECKING:
    from experiments.translation import TranslationOptions

Array = np.ndarray[Any, Any]
Batch = tuple[Array, Array, Array, Array]

BLOCK: Final = 8  # lengths of batches are multiples of this, as JAX compiles for every length
_SPREAD: Final = 0.01  # standard deviation of Nematus's matrices that are not square


class Learner(Protocol):
    """A model of a framework and its optimizer, made from (config, parameters, options)."""

    model: Any

    def minimise(self, batch: Batch) -> float:
        """One step of Adam on the mean loss of the sentences, which is returned."""
        ...

    def seconds_of(self, batch: Batch) -> dict[str, float]:
        """Train on the batch. See experiments.experiment.Trainer.seconds."""
        ...

    def state(self) -> State: ...
    def restore(self, state: State) -> None: ...


class TranslationTask:
    """See experiments.experiment.Task.

    Raises:
        ModuleNotFoundError: the framework, or sacrebleu, is not installed.
        ValueError: no sentence is short enough, or a batch is larger than the data.
    """

    def __init__(self, options: TranslationOptions, texts: Texts) -> None:
        self.options = options
        _sacrebleu()
        row = framework("experiments", options.framework)
        if row.missing is not None:
            raise errors.missing_framework(row.missing, row.extra)
        self.config = _config(options, [len(vocabulary.ids) for vocabulary in texts.vocabularies])
        self.texts = texts
        sides = zip((texts.source, texts.target), texts.vocabularies, strict=True)
        pairs = zip(*([_ids(line, words) for line in lines] for lines, words in sides), strict=True)
        self.pairs = [pair for pair in pairs if min(map(len, pair)) > 1 and max(map(len, pair)) <= options.longest + 1]
        check_batch(options.batch_size, len(self.pairs))
        sizes = {"source words": self.config.source_vocab_sizes[0], "target words": self.config.target_vocab_size}
        rows = variables(self.config.replace(norm="rms"))
        gains = sorted({row.shape[-1] for row in rows if row.name.endswith("/scale")})
        self.facts = {"sentences": len(self.pairs), **sizes, "elements of a norm": " or ".join(map(str, gains))}

    def trainer(self, norm: str, seed: int) -> TranslationTrainer:
        config = self.config.replace(norm=norm)
        learner = import_module(f"experiments.translation.{self.options.framework}").Learner
        parameters = begin(config, seed, self.options.init_center)
        return TranslationTrainer(self, config, learner(config, parameters, self.options), seed)

    @lru_cache(maxsize=1)  # noqa: B019  (a task lives as long as the program)
    def batch(self, seed: int, number: int) -> Batch:
        """Ids (1, length, batch) and mask (length, batch) of the source, ids (length, batch) and mask of the target."""
        rows = batch_of(len(self.pairs), self.options.batch_size, seed, number)
        x, x_mask = _padded([self.pairs[row][0] for row in rows])
        return x[None], x_mask, *_padded([self.pairs[row][1] for row in rows])


class TranslationTrainer:
    """See experiments.experiment.Trainer. The loss is that of a word: the mean of -log p, with the ends of sentence."""

    def __init__(self, task: TranslationTask, config: Config, learner: Learner, seed: int) -> None:
        self.task, self.config, self.learner, self.seed = task, config, learner, seed
        self.parameters = sum(int(np.prod(row.shape)) for row in variables(config))
        self.state, self.restore = learner.state, learner.restore

    def step(self, number: int) -> float:
        batch = self.task.batch(self.seed, number)
        loss, y_mask = self.learner.minimise(batch), batch[3]
        return loss * y_mask.shape[1] / float(y_mask.sum())

    def seconds(self) -> dict[str, float]:
        return self.learner.seconds_of(self.task.batch(self.seed, 0))

    def evaluate(self) -> dict[str, float]:
        texts, options = self.task.texts, self.task.options
        lines, references = (part[: options.tested] for part in (texts.test_source, texts.test_target))
        source, target = texts.vocabularies
        longest = 2 + 2 * max(len(line.split()) for line in lines)
        model, vocabularies, beam = self.learner.model, ([source], target), options.beam_size
        translations = list(translate(model, self.config, lines, *vocabularies, beam_size=beam, max_length=longest))
        right = sum(line.split() == reference.split() for line, reference in zip(translations, references, strict=True))
        score = _sacrebleu().corpus_bleu(
            [line.strip() for line in translations], [references], tokenize="none", force=True
        )
        return {"BLEU": score.score, "right": right / len(lines)}


def _config(options: TranslationOptions, sizes: Sequence[int]) -> Config:
    drops = {name: 0.0 for name in Config.__dataclass_fields__ if "_drop" in name}
    fields: dict[str, Any] = {**drops, **options.model()}
    return Config(**fields, source_vocab_sizes=(sizes[0],), target_vocab_size=sizes[1])


def begin(config: Config, seed: int, center: float) -> dict[str, Array]:
    """Parameters as Nematus draws them: orthogonal where a matrix is made of squares, else N(0, 0.01²).

    Of a Transformer matrices are Glorot's, uniform, and embeddings have the variance 1/d. Gains are 1, biases and
    offsets 0.

    ``center`` is added to every matrix. A variable has the same values with every norm.
    """
    parameters = {}
    for row in variables(config):
        draw = np.random.default_rng([seed, crc32(row.name.encode())])
        if len(row.shape) == 1:
            value = np.full(row.shape, float(row.name.endswith(("/scale", "/new_std"))))
        elif config.model_type == "transformer":
            is_table = "embedding" in row.name
            width = (3 / row.shape[1]) ** 0.5 if is_table else (6 / sum(row.shape)) ** 0.5
            value = draw.uniform(-width, width, row.shape) + center
        elif row.shape[1] % row.shape[0] == 0 and "embedding" not in row.name:
            squares = draw.standard_normal((row.shape[1] // row.shape[0], row.shape[0], row.shape[0]))
            value = np.concatenate(np.linalg.qr(squares).Q, axis=1) + center
        else:
            value = _SPREAD * draw.standard_normal(row.shape) + center
        parameters[row.name] = value.astype(np.float32)
    return parameters


def _ids(line: str, vocabulary: Vocabulary) -> Array:
    words = [vocabulary.ids.get(word, vocabulary.unknown) for word in line.split()]
    return np.array([*words, vocabulary.end], np.int64)


def _padded(sentences: Sequence[Array]) -> tuple[Array, Array]:
    """Time-major ids and mask."""
    length = -(-max(map(len, sentences)) // BLOCK) * BLOCK
    ids, mask = np.zeros((length, len(sentences)), np.int64), np.zeros((length, len(sentences)), np.float32)
    for column, sentence in enumerate(sentences):
        ids[: len(sentence), column], mask[: len(sentence), column] = sentence, 1
    return ids, mask


def _sacrebleu() -> Any:
    try:
        import sacrebleu
    except ModuleNotFoundError:
        raise errors.missing_framework("sacrebleu", "experiments") from None
    return sacrebleu
