"""Replaces LayerNorm by RMSNorm, exactly, in models of PyTorch, Keras or Flax whose graph allows it.

With W' = W - mean(W) and b' = b - mean(b), means over the output features, x W' + b' has mean zero. Therefore

    LayerNorm(x W + b) = LayerNorm(x W' + b') = RMSNorm(x W' + b')

with the same gain, bias and eps. ``search`` says which weights these are and what else would see the difference.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from rmsnorm.conversion.layer_norm.search import Conversion, convert
from rmsnorm.specification import errors

__all__ = ["Conversion", "to_rms_norm"]

_CLASSES = (("keras", "keras", "Model"), ("torch", "torch.nn", "Module"), ("flax", "flax.nnx", "Module"))


def to_rms_norm(model: Any, *inputs: Any, **options: Any) -> Conversion:
    """Copies a model and replaces every LayerNorm by RMSNorm where that is exact.

    A LayerNorm is a layer of the framework's class, or of any class that computes one over the last axis; one of
    another class keeps it, and its call with x alone is computed anew.

    It is exact under two conditions. What the LayerNorm reads is a sum of results of linear, dense and convolution
    layers, embeddings and parameters; the residual stream of a pre-norm Transformer is such a sum. And only LayerNorms
    read it. All other LayerNorms stay, and the result gives the reason for each. If a tied embedding must be centred,
    the copy's embedding is no longer tied, and a note says so.

    No graph is read: a backward pass in float64, in evaluation mode, at random weights and for inputs like the sample,
    shows which weights have a mean that no output depends on. Without these means, a LayerNorm that can be RMSNorm
    while no output changes is one. So layers that the sample does not reach are not converted. Parameters that it does
    not reach stay as they are and are listed as ``unreached``: the new model may differ for inputs that reach them. The
    outputs are compared at the random weights and at the model's own, and the new model is returned only if they agree
    up to rounding. All this takes the memory of some six copies of the model in float64.

    Args:
        model: torch.nn.Module, functional or Sequential keras.Model, or flax.nnx.Module; it is not changed.
        inputs, options: a sample of the model's arguments, for example a batch of two.

    Returns:
        The new model, what happened to each of its layers, and the differences; ``print`` shows all of it.

    Raises:
        TypeError: the model has none of these classes.
        ValueError: the model cannot be copied, its outputs are random, or the outputs differ by more than rounding.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.LayerNorm(4))
        >>> conversion = to_rms_norm(model, torch.ones(2, 3))
        >>> [layer.variant is not None for layer in conversion.layers], conversion.exact < 1e-12
        ([True, False], True)
    """
    for name, module, kind in _CLASSES:
        if module in sys.modules and isinstance(model, getattr(sys.modules[module], kind)):
            framework = importlib.import_module(f"rmsnorm.conversion.layer_norm.{name}")
            return convert(framework.SampledModel(model, inputs, options))
    want = "torch.nn.Module, keras.Model or flax.nnx.Module"
    raise errors.wrong_type("to_rms_norm", "model", model, want, "pass the model first, then sample inputs")
