"""The layers of the frameworks, as a fixture for the tests that hold for all of them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from rmsnorm.specification.frameworks import FRAMEWORKS

KINDS = {"torch": ("torch", "Layer"), "keras": ("tf", "Layer"), "nnx": ("flax", "Nnx"), "linen": ("flax", "Linen")}

MODULES = {"torch": "torch", "tf": "keras", "flax": "flax"}  # layer_<name>, where the package of this name is


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test has a case for each kind of layer, which is one of its framework for tests/changes.py."""
    if "layers" in metafunc.fixturenames:
        metafunc.parametrize(
            ("framework", "layers"), [(key, kind) for kind, (key, _) in KINDS.items()], indirect=True, ids=list(KINDS)
        )


@pytest.fixture
def framework(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def layers(request: pytest.FixtureRequest, framework: str) -> Iterator[Any]:
    """A class of layers; ``layer_kinds`` says what it has."""
    row = FRAMEWORKS[framework]
    for package in (row.package, {"tf": "keras", "flax": "flax"}.get(framework, row.package)):
        pytest.importorskip(package)
    kind = getattr(
        importlib.import_module(f"layer_{'keras' if framework == 'tf' else framework}"), KINDS[request.param][1]
    )
    if framework != "flax":
        yield kind
        return
    import jax

    with jax.numpy_dtype_promotion("standard"):
        yield kind


@pytest.fixture
def beside(layers: Any) -> None:
    """For tests that compare with the built-in layer."""
    if layers.CLASSES[1] is None:
        pytest.skip("Keras has keras.layers.RMSNormalization from 3.9 on")
