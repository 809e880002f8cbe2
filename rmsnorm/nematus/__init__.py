"""Nematus's models: reads and writes their checkpoints, has the models in every framework, converts and runs them.

from rmsnorm import nematus
from rmsnorm.nematus.torch import RNNSearch

model = nematus.load("model/")
RNNSearch(model.config, model.parameters)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rmsnorm.nematus.checkpoints.keras import save_keras
    from rmsnorm.nematus.checkpoints.orbax import save_flax
    from rmsnorm.nematus.checkpoints.safetensors import save_safetensors
    from rmsnorm.nematus.checkpoints.tensorflow import save_tensorflow
    from rmsnorm.nematus.checkpoints.theano import save_theano
    from rmsnorm.nematus.config import Config
    from rmsnorm.nematus.model import Model, load

__all__ = [
    "Config",
    "Model",
    "load",
    "save_flax",
    "save_keras",
    "save_safetensors",
    "save_tensorflow",
    "save_theano",
]
_MODULES = {
    "Config": "config",
    "Model": "model",
    "load": "model",
    "save_flax": "checkpoints.orbax",
    "save_keras": "checkpoints.keras",
    "save_safetensors": "checkpoints.safetensors",
    "save_tensorflow": "checkpoints.tensorflow",
    "save_theano": "checkpoints.theano",
}


def __getattr__(name: str) -> Any:
    """Import on use, because the models of one framework need no other framework and no reader of checkpoints."""
    if name in _MODULES:
        return getattr(import_module(f"rmsnorm.nematus.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
