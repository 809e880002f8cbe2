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

IN_TEST_KERAS = {"the_harness_of_keras", "the_tests_of_keras", "in_the_place_of_the_built_in", "training"}
EVERY = keras_layer.CHECKS | keras_parity.CHECKS
CHECKS = {name: check for name, check in EVERY.items() if name not in IN_TEST_KERAS}


@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning")
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
@pytest.mark.parametrize("name", CHECKS)
def test_on_tensorflow(name: str, tmp_path: Path) -> None:
    CHECKS[name](tmp_path)
