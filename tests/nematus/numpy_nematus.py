"""Nematus's models and cells in NumPy, which are the golden, for tests that hold for all frameworks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import nematus_framework
import numpy as np
import pytest

from rmsnorm.nematus import numpy as nematus
from rmsnorm.nematus.numpy.parameters import Dropout

quick = wide = nullcontext


class Model(nematus_framework.Model):
    def __init__(self, config: Any, parameters: Any, *, training: bool = False, seed: int = 0) -> None:
        transformer = config.model_type == "transformer"
        self.own: Any = (nematus.Transformer if transformer else nematus.RNNSearch)(config, parameters)
        self.mode: dict[str, Any] = {}
        if training:
            self.mode = {"training": True} if transformer else {"rng": np.random.default_rng(seed)}

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self.own, name)(*arguments, **options, **(self.mode if name == "loss" else {}))


def array(value: Any, dtype: Any = None) -> Any:
    return np.asarray(value, dtype)


def numpy(value: Any) -> Any:
    return value


def masks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The masks of dropout by name, as RNNSearch makes them; filled where it drops."""
    made: dict[str, Any] = {}
    mask = Dropout.mask

    def record(self: Any, name: str, x: Any, *, whole: bool) -> Any:
        made[name] = mask(self, name, x, whole=whole)
        return made[name]

    monkeypatch.setattr(Dropout, "mask", record)
    return made
