"""ConvPool-CNN-C in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from experiments.batches import batch_of, check_batch
from experiments.cifar.data import whitened
from experiments.images import CLASSES, Images
from experiments.torch_training import TorchTrainer, norm_layer, seeded, weighted
from rmsnorm.torch_impl import rms_norm

if TYPE_CHECKING:
    from experiments.cifar import CIFAROptions

SLOPE: Final = 0.1  # of the leaky ReLU
_AT_ONCE: Final = 200  # test images
_EPS: Final = 1e-5


class CIFARTask:
    """See experiments.experiment.Task.

    Raises:
        ValueError: the batch is larger than the training set.
    """

    def __init__(self, options: CIFAROptions, images: Images) -> None:
        check_batch(options.batch_size, len(images.train))
        self.options = options
        self.images = Images(*map(torch.from_numpy, whitened(images, options.whitening)))
        sizes = {"training images": len(images.train), "test images": len(images.test)}
        self.facts = {**sizes, "elements of a norm": "those of a channel, of LayerNorm all of an image"}

    def trainer(self, norm: str, seed: int) -> CIFARTrainer:
        seeded(seed)
        return CIFARTrainer(self.options, self.images, norm, seed)


class CIFARTrainer(TorchTrainer):
    """Adam; the learning rate falls linearly in the second half, when the decay of its mean is 0.5, not 0.9."""

    def __init__(self, options: CIFAROptions, images: Images, norm: str, seed: int) -> None:
        self.options, self.images = options, images
        model = conv_pool_cnn_c(norm, options.width, options.drop, options.operations)
        if norm == "weight":
            begin_by_data(model, images.train[: 5 * options.batch_size])
        super().__init__(model, torch.optim.Adam(model.parameters(), lr=options.rate), seed)

    def loss(self, number: int) -> Tensor:
        left = 2 - 2 * number / self.options.steps  # over the second half, from 1 to 0
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.rate * min(1.0, left)
            group["betas"] = (0.9 if left > 1 else 0.5, 0.999)
        rows = torch.from_numpy(batch_of(len(self.images.train), self.options.batch_size, self.seed, number))
        seeded(self.seed, number)  # noise and dropout
        x = self.images.train[rows]
        x = x + self.options.noise * torch.randn_like(x)
        return functional.cross_entropy(self.model(x), self.images.train_classes[rows])

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        self.model.eval()
        classes = torch.cat([self.model(x).argmax(1) for x in torch.split(self.images.test, _AT_ONCE)])
        self.model.train()
        return {"accuracy": (classes == self.images.test_classes).float().mean().item()}


class ChannelNorm(torch.nn.Module):
    """RMSNorm of images, (batch, channels, height, width), over the pixels of a channel, as in the authors' layer."""

    def __init__(self, channels: int, operations: str) -> None:
        super().__init__()
        self.operations = operations
        self.weight = torch.nn.Parameter(torch.ones(channels))
        self.bias = torch.nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.operations == "ours":
            y: Tensor = rms_norm(x, self.weight, self.bias, variant="lasagne", axis=(2, 3), feature_axis=1)
            return y
        weight, bias = self.weight[:, None, None], self.bias[:, None, None]
        if self.operations == "framework":  # which has no gain along other axes than the last ones
            return functional.rms_norm(x, x.shape[2:], eps=_EPS) * weight + bias
        return x * (x * x).mean((2, 3), keepdim=True).add(_EPS).rsqrt() * weight + bias


class GroupNorm(torch.nn.Module):
    """LayerNorm of images over channels and pixels, as Ba et al. 2016 have it, as separate operations."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(channels))
        self.bias = torch.nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        axes = 1, 2, 3
        centred = x - x.mean(axes, keepdim=True)
        y = centred * (centred * centred).mean(axes, keepdim=True).add(_EPS).rsqrt()
        return y * self.weight[:, None, None] + self.bias[:, None, None]


def conv_pool_cnn_c(norm: str, width: int, drop: float, operations: str = "ours") -> torch.nn.Sequential:
    """Three convolutions of 3×3 with ``width`` channels, pool, dropout; three of twice the width, pool, dropout; one
    without padding, two of 1×1, the mean over the image, and a dense layer, which is normalised, too."""
    wide = 2 * width
    layers: list[torch.nn.Module] = []
    channels = 3
    for block in (width, wide):
        for _ in range(3):
            layers += _convolution(norm, channels, block, 3, "same", operations)
            channels = block
        layers += [torch.nn.MaxPool2d(2), torch.nn.Dropout(drop)]
    for size in (3, 1, 1):
        layers += _convolution(norm, wide, wide, size, "valid", operations)
    layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
    dense = _begun(torch.nn.Linear(wide, CLASSES), 0.1)
    last = norm_layer(norm, CLASSES, operations)
    return torch.nn.Sequential(*layers, weighted(norm, dense), last)


def _convolution(
    norm: str, channels: int, width: int, size: int, padding: str, operations: str
) -> list[torch.nn.Module]:
    convolution = _begun(torch.nn.Conv2d(channels, width, size, padding=padding), 0.05)
    norms: dict[str, Any] = {
        "batch": lambda: torch.nn.BatchNorm2d(width),
        "layer": lambda: GroupNorm(width) if operations == "separate" else torch.nn.GroupNorm(1, width),
        "rms": lambda: ChannelNorm(width, operations),
    }
    return [weighted(norm, convolution), norms.get(norm, torch.nn.Identity)(), torch.nn.LeakyReLU(SLOPE)]


def _begun(layer: Any, deviation: float) -> torch.nn.Module:
    torch.nn.init.normal_(layer.weight, std=deviation)
    torch.nn.init.zeros_(layer.bias)
    return layer


@torch.no_grad()
def begin_by_data(model: torch.nn.Sequential, x: Tensor) -> None:
    """Gains and biases of weight normalisation so that on x every layer's sums have mean 0 and variance 1."""
    for layer in model:
        if torch.nn.utils.parametrize.is_parametrized(layer):
            axes = [axis for axis in range(x.ndim) if axis != 1]
            sums: Any = layer(x)
            deviation = sums.std(axes, correction=0) + 1e-8
            gain: Any = layer.parametrizations.weight.original0
            gain /= deviation.reshape(gain.shape)
            layer.bias.copy_(-sums.mean(axes) / deviation)
        x = x if isinstance(layer, torch.nn.Dropout) else layer(x)
