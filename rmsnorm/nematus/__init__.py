"""Nematus's models: reads and writes their checkpoints, has the models in every framework, converts and runs them.

from rmsnorm import nematus
from rmsnorm.nematus.torch_models import RNNSearch

model = nematus.load("model/")
RNNSearch(model.config, model.parameters)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmsnorm.specification.frameworks import lazy

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config
    from rmsnorm.nematus.forms import save_keras, save_safetensors, save_tensorflow, save_theano
    from rmsnorm.nematus.model import Model, load

__all__ = ["Config", "Model", "load", "save_keras", "save_safetensors", "save_tensorflow", "save_theano"]
_MODULES = {"Config": "config", "Model": "model", "load": "model"}
_MODULES |= dict.fromkeys(("save_keras", "save_safetensors", "save_tensorflow", "save_theano"), "forms")
__getattr__, __dir__ = lazy(__name__, _MODULES)  # models of one framework need no other one, and no checkpoints
