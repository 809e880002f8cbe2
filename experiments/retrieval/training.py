"""The order embeddings in training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from jax import numpy as jnp

from experiments.batches import batch_of, check_batch, generator
from experiments.experiment import State
from experiments.norms import used
from experiments.retrieval import captions
from experiments.retrieval.model import Config, OrderEmbedding
from experiments.retrieval.ranks import FOLDS, over_folds
from experiments.timing import compiled_apart, of_programs
from experiments.weights import initial
from rmsnorm.specification import errors

if TYPE_CHECKING:
    from experiments.retrieval import RetrievalOptions

LARGEST = 2.0  # norm of a gradient of a parameter; larger ones are scaled down, as in the authors' program
EVALUATED = 500  # captions or images at once


class RetrievalTask:
    """See experiments.experiment.Task.

    Raises:
        FileNotFoundError, ValueError: the data are missing or damaged, or do not suffice.
    """

    def __init__(self, options: RetrievalOptions, data: Path | None) -> None:
        self.options = options
        self.data = (
            captions.read(data) if data else captions.generated(options.images, options.tested, options.features)
        )
        train, test = (len(pairs.images) for pairs in self.data[:2])
        check_batch(options.batch_size, train)
        if test < FOLDS:
            want = f"at least {FOLDS}, one for every fold"
            raise errors.out_of_domain("experiments", "number of test images", test, want, "take more")
        counts = {"training images": train, "test images": test, "words": self.data.words}
        self.facts = {**counts, "elements of a norm": f"{options.width} or {2 * options.width}"}
        self.compiled: dict[str, tuple[Any, ...]] = {}
        self.norms = used("flax", options.operations)

    def trainer(self, norm: Any, seed: int) -> RetrievalTrainer:
        if norm not in self.compiled:  # once for all seeds
            options = self.options
            features = self.data.train.images.shape[1]
            config = Config(self.data.words, options.width, options.embedding, features, norm, options.margin)
            self.compiled[norm] = config, *_functions(config, optax.adam(options.rate))
        return RetrievalTrainer(self, seed, *self.compiled[norm])


def _functions(config: Config, optimizer: Any) -> tuple[Any, tuple[Any, ...], Any, dict[str, Callable[..., Any]]]:
    """The optimizer; cost, gradients and a step; the compiled step; and what computes embeddings and errors."""

    def cost(parameters: Any, _: Any, *batch: Any) -> jax.Array:
        return OrderEmbedding(config, parameters).cost(*batch)

    both = jax.value_and_grad(cost)

    def step(parameters: Any, slots: Any, *batch: Any) -> Any:
        loss, gradients = both(parameters, slots, *batch)
        gradients = jax.tree.map(lambda g: g * jnp.minimum(1, LARGEST / jnp.linalg.norm(g.ravel())), gradients)
        with jax.numpy_dtype_promotion("standard"):  # Optax multiplies numbers of other dtypes
            updates, slots = optimizer.update(gradients, slots)
        return loss, optax.apply_updates(parameters, updates), slots

    def method(name: str) -> Callable[..., Any]:
        return jax.jit(lambda parameters, *batch: getattr(OrderEmbedding(config, parameters), name)(*batch))

    methods = {name: method(name) for name in ("sentences", "images", "errors")}
    return optimizer, (cost, both, step), jax.jit(step, donate_argnums=(0, 1)), methods


class RetrievalTrainer:
    """See experiments.experiment.Trainer. Adam; a batch has one of the captions of every image."""

    def __init__(
        self,
        task: RetrievalTask,
        seed: int,
        config: Config,
        optimizer: Any,
        programs: tuple[Any, ...],
        update: Callable[..., Any],
        methods: dict[str, Callable[..., Any]],
    ) -> None:
        self.options, self.data, self.norms, self.seed = task.options, task.data, task.norms, seed
        self.programs, self.update, self.methods = programs, update, methods
        self.timed: list[Any] = []
        self.weights = {name: jnp.asarray(value) for name, value in initial(config.shapes(), seed).items()}
        self.slots = optimizer.init(self.weights)
        self.parameters = sum(value.size for value in self.weights.values())
        copies = jax.tree.map(jnp.copy, (self.weights, self.slots))
        with self.norms:
            jax.block_until_ready(self.update(*copies, *self._batch(0)))  # XLA compiles before the first step is timed

    def step(self, number: int) -> float:
        with self.norms:  # where another length is compiled
            loss, self.weights, self.slots = jax.block_until_ready(
                self.update(self.weights, self.slots, *self._batch(number))
            )
        return float(loss)

    def seconds(self) -> dict[str, float]:
        arguments = self.weights, self.slots, *self._batch(0)
        if not self.timed:
            with self.norms:
                self.timed = compiled_apart(self.programs, *arguments)
        return of_programs(*(lambda own=own: jax.block_until_ready(own(*arguments)) for own in self.timed))

    def _batch(self, number: int) -> tuple[np.ndarray, ...]:
        count, size = len(self.data.train.images), self.options.batch_size
        rng = generator(self.seed, number)
        rows = batch_of(count, size, self.seed, number)
        chosen = captions.CAPTIONS * rows + rng.integers(captions.CAPTIONS, size=size)
        return *captions.batch([self.data.train.captions[row] for row in chosen]), self.data.train.images[rows]

    def evaluate(self) -> dict[str, float]:
        """Means over five folds of the test images."""
        images, texts = self.data.test
        folds = np.array_split(np.arange(len(images)), FOLDS)
        return over_folds([self._errors(images[rows], texts, rows) for rows in folds])

    def _errors(self, images: np.ndarray, texts: list[np.ndarray], rows: np.ndarray) -> np.ndarray:
        """Errors (captions, images) of a fold."""
        own = [texts[captions.CAPTIONS * row + index] for row in rows for index in range(captions.CAPTIONS)]
        sentences = [
            self.methods["sentences"](self.weights, *captions.batch(own[start : start + EVALUATED]))
            for start in range(0, len(own), EVALUATED)
        ]
        embedded = self.methods["images"](self.weights, images)
        return np.asarray(self.methods["errors"](self.weights, jnp.concatenate(sentences), embedded))

    def state(self) -> State:
        slots = {f"slots/{index}": leaf for index, leaf in enumerate(jax.tree.leaves(self.slots))}
        weights = {f"weights/{name}": value for name, value in self.weights.items()}
        return {name: np.array(value) for name, value in (weights | slots).items()}

    def restore(self, state: State) -> None:
        self.weights = {name: jnp.array(state[f"weights/{name}"]) for name in self.weights}
        leaves = [jnp.array(state[f"slots/{index}"]) for index in range(len(jax.tree.leaves(self.slots)))]
        self.slots = jax.tree.unflatten(jax.tree.structure(self.slots), leaves)
