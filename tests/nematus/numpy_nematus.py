"""Nematus's models and cells in NumPy, which are the golden, for tests that hold for all frameworks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import nematus_framework
import numpy as np

from rmsnorm.nematus.backends import model_class

quick = wide = nullcontext


class Model(nematus_framework.Model):
    def __init__(self, config: Any, parameters: Any, *, training: bool = False, seed: int = 0) -> None:
        self.own: Any = model_class("numpy", config)(config, parameters)
        self.training = training

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self.own, name)(*arguments, training=self.training, **options)


def array(value: Any, dtype: Any = None) -> Any:
    return np.asarray(value, dtype)


def numpy(value: Any) -> Any:
    return value
