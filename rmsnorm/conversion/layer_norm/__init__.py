"""LayerNorm into RMSNorm, exactly, in any model of PyTorch, Keras or Flax whose graph shows that it can be.

Of W' = W - mean(W) and b' = b - mean(b), means over the output features, x W' + b' has mean zero, and there

    LayerNorm(x W + b) = LayerNorm(x W' + b') = RMSNorm(x W' + b')

with the same gain, offset and eps. Which weights these are, and who else would see the difference: ``streams``.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from rmsnorm import errors
from rmsnorm.conversion.layer_norm.conversion import Conversion, Layer

__all__ = ["Conversion", "Layer", "to_rms_norm"]

_CLASSES = (("keras", "keras", "Model"), ("torch", "torch.nn", "Module"), ("flax", "flax.nnx", "Module"))


def to_rms_norm(model: Any, *inputs: Any, **options: Any) -> Conversion:
    """A copy of a model with RMSNorm in place of every LayerNorm for which that is exact.

    It is exact where what the LayerNorm reads is a sum of results of linear, dense and convolution layers, embeddings
    and parameters, also as the residual stream of a pre-norm Transformer, and nobody else but LayerNorms reads it. The
    others are left, each with the reason. A tied embedding that is centred is tied no longer, which a note says.

    What the graph is, a run in evaluation on the sample inputs shows: what that does not reach is not seen. The result
    is run on them in float64, and given out only if its outputs are the same up to rounding.

    Args:
        model: torch.nn.Module, functional or Sequential keras.Model, or flax.nnx.Module; it is left as it is.
        inputs, options: a sample of what it is called with, such as a batch of two.

    Returns:
        The new model, its layers with what became of each, and the differences; ``print`` shows all.

    Raises:
        TypeError: the model is of none of these kinds.
        ValueError: the outputs differ by more than rounding.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.LayerNorm(4))
        >>> found = to_rms_norm(model, torch.ones(2, 3))
        >>> [layer.converted for layer in found.layers], found.exact < 1e-12
        ([True, False], True)
    """
    for name, module, kind in _CLASSES:
        if module in sys.modules and isinstance(model, getattr(sys.modules[module], kind)):
            wing = importlib.import_module(f"rmsnorm.conversion.layer_norm.{name}")
            found: Conversion = wing.to_rms_norm(model, *inputs, **options)
            return found
    want = "torch.nn.Module, keras.Model or flax.nnx.Module"
    raise errors.wrong_type("to_rms_norm", "model", model, want, "pass the model first, then sample inputs")
