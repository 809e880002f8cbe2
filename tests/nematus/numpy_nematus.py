"""Nematus's models and cells in NumPy, which are the golden, for tests that hold for all frameworks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import nematus_framework
import numpy as np

from rmsnorm.nematus import numpy_models as nematus  # noqa: F401
from rmsnorm.nematus.backends import model_class

KEY = "numpy"
quick = wide = nullcontext
array = numpy = np.asarray


class Model(nematus_framework.Model):
    numpy = staticmethod(np.asarray)

    def __init__(self, config: Any, parameters: Any, *, training: bool = False) -> None:
        self.own = model_class("numpy", config)(config, parameters)
        self.options = {"training": training}
