"""What is timed in each framework: ours, its own layer and its LayerNorm, in every way to run them, and copies."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Final, NamedTuple

from rmsnorm.specification import errors
from rmsnorm.specification.frameworks import FRAMEWORKS
from rmsnorm.specification.variants import PRESETS, Variant
from timing.candidates import Workbench


class Backend(NamedTuple):
    """A framework, or Keras on one.

    Attributes:
        title: its name in tables.
        packages: what it needs.
        extra: the extra that installs them, as in pip install '.[torch]'.
        variant: the variant of the built-in layer.
        load: makes the candidates on a device.
    """

    title: str
    packages: tuple[str, ...]
    extra: str
    variant: Variant
    load: Callable[[str], Workbench]


def _numpy(device: str) -> Workbench:
    from timing.backends import numpy

    return numpy.load(device)


def _torch(device: str) -> Workbench:
    _quiet_compiler()
    from timing.backends import torch

    return torch.load(device)


def _tf(device: str) -> Workbench:
    from timing.backends import tf

    return tf.load(device)


def _flax(device: str) -> Workbench:
    from timing.backends import flax

    return flax.load(device)


def _keras_torch(device: str) -> Workbench:
    _quiet_compiler()
    from timing.backends import torch

    return torch.load_keras(device)


def _keras_jax(device: str) -> Workbench:
    from timing.backends import flax

    return flax.load_keras(device)


def _quiet_compiler() -> None:
    """Settings that Inductor reads when PyTorch is imported."""
    os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")  # the compile time is one of the numbers
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of compilers would run beside the timing


def _framework(key: str, variant: str, load: Callable[[str], Workbench]) -> Backend:
    row = FRAMEWORKS[key]
    packages = (row.package,) if row.functions_alone else (row.package, row.layers)
    return Backend(row.title, packages, row.extra, PRESETS[variant], load)


BACKENDS: Final[Mapping[str, Backend]] = {
    "numpy": _framework("numpy", "standard", _numpy),
    "torch": _framework("torch", "torch", _torch),
    "tf": _framework("tf", "keras", _tf),
    "flax": _framework("flax", "flax", _flax),
    "keras-torch": Backend("Keras on PyTorch", ("torch", "keras"), "torch,tf", PRESETS["keras"], _keras_torch),
    "keras-jax": Backend("Keras on JAX", ("jax", "keras"), "flax,tf", PRESETS["keras"], _keras_jax),
}


def open_backend(key: str, device: str) -> Workbench:
    """Load a backend, by its key in BACKENDS.

    Raises:
        ModuleNotFoundError: it is not installed.
        ValueError: it has no such device.
    """
    backend = BACKENDS[key]
    for package in backend.packages:
        if find_spec(package) is None:
            raise errors.missing_framework(package, backend.extra)
    try:
        return backend.load(device)
    except ModuleNotFoundError as error:
        if error.name not in backend.packages:
            raise
        raise errors.missing_framework(error.name, backend.extra) from None
