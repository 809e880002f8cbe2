"""The checks of keras_layer and keras_parity on TensorFlow; keras_backend runs them on JAX and PyTorch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
if keras.backend.backend() != "tensorflow":
    pytest.skip("the other backends have a process each", allow_module_level=True)

import keras_layer  # noqa: E402
import keras_parity  # noqa: E402

CHECKS = keras_layer.CHECKS | keras_parity.CHECKS


@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning")
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
@pytest.mark.parametrize("name", CHECKS)
def test_on_tensorflow(name: str, tmp_path: Path) -> None:
    CHECKS[name](tmp_path)
