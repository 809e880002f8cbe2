"""The multilayer perceptron in PyTorch."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.nn import functional

from experiments.batches import batch_of, check_batch
from experiments.images import CLASSES, Images
from experiments.torch_training import TorchTrainer, norm_layer, seeded, weighted

if TYPE_CHECKING:
    from experiments.mlp import MLPOptions

HIDDEN: Final = 3


class MLPTask:
    """See experiments.experiment.Task.

    Raises:
        ValueError: the batch is larger than the training set.
    """

    def __init__(self, options: MLPOptions, images: Images) -> None:
        self.options, self.images = options, Images(*map(torch.from_numpy, images))
        check_batch(options.batch_size, len(images.train))
        sizes = {"training images": len(images.train), "test images": len(images.test)}
        self.facts = {**sizes, "elements of a norm": str(options.width)}

    def trainer(self, norm: str, seed: int) -> MLPTrainer:
        seeded(seed)
        return MLPTrainer(self.options, self.images, norm, seed)


class MLPTrainer(TorchTrainer):
    """sigmoid(norm(x W + b)) three times, then an output layer. Biases begin as 0.

    Weights are drawn from N(0, 16 / (rows + columns)), which suits sigmoids (Glorot & Bengio 2010).
    """

    def __init__(self, options: MLPOptions, images: Images, norm: str, seed: int) -> None:
        self.options, self.images = options, images
        sizes = [images.train.shape[1], *[options.width] * HIDDEN]
        layers: list[torch.nn.Module] = []
        for size, width in pairwise(sizes):
            dense = weighted(norm, _linear(size, width))
            layers += [dense, norm_layer(norm, width, options.operations), torch.nn.Sigmoid()]
        layers += [weighted(norm, _linear(options.width, CLASSES))]
        model = torch.nn.Sequential(*layers)
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=options.rate), seed)

    def loss(self, number: int) -> Tensor:
        rows = torch.from_numpy(batch_of(len(self.images.train), self.options.batch_size, self.seed, number))
        return functional.cross_entropy(self.model(self.images.train[rows]), self.images.train_classes[rows])

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        self.model.eval()
        right = self.model(self.images.test).argmax(1) == self.images.test_classes
        self.model.train()
        return {"accuracy": right.float().mean().item()}


def _linear(size: int, width: int) -> torch.nn.Linear:
    layer = torch.nn.Linear(size, width)
    torch.nn.init.normal_(layer.weight, std=4 / (size + width) ** 0.5)
    torch.nn.init.zeros_(layer.bias)
    return layer
