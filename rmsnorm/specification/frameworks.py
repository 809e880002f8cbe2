"""The one table of the frameworks that this package supports, one row for each. Imports none of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

from rmsnorm.specification import errors


class Framework(NamedTuple):
    """A framework.

    Attributes:
        key: its name in commands, reports and environment variables.
        title: its name in sentences, which goes with the version of ``package``.
        package: the package of its arrays, which the functions need.
        layers: the package of its layers.
        extra: the extra that installs both, as in pip install '.[torch]'; for NumPy the one for its checks.
        folder: its folder in rmsnorm.
        aliases: other names that users write for it.
        functions_alone: whether commands use the functions where the package of the layers is absent.
    """

    key: str
    title: str
    package: str
    layers: str
    extra: str
    folder: str
    aliases: tuple[str, ...]
    functions_alone: bool = False

    @property
    def missing(self) -> str | None:
        """The first package of the two that is not installed.

        >>> FRAMEWORKS["numpy"].missing is None
        True
        """
        return next((name for name in (self.package, self.layers) if find_spec(name) is None), None)


FRAMEWORKS: Final = {
    row.key: row
    for row in (
        Framework("numpy", "NumPy", "numpy", "numpy", "dev", "numpy_impl", ("np",)),
        Framework("torch", "PyTorch", "torch", "torch", "torch", "torch_impl", ("pytorch",)),
        Framework("tf", "TensorFlow", "tensorflow", "keras", "tf", "tf_impl", ("tensorflow", "keras")),
        Framework("flax", "JAX", "jax", "flax", "flax", "flax_impl", ("jax", "nnx", "linen"), functions_alone=True),
    )
}


NAMES: Final = ("torch", "tf", "keras", "jax", "flax", "numpy")  # that every option takes, and the aliases above


def framework(op: str, name: str, option: str = "framework") -> Framework:
    """The row with that key or alias.

    Raises:
        ValueError: no row has it.

    >>> framework("check", "keras").key
    'tf'
    """
    for row in FRAMEWORKS.values():
        if name in (row.key, *row.aliases):
            return row
    raise errors.not_a_choice(op, option, name, NAMES)


def framework_of(x: Any) -> str | None:
    """The key of the framework whose array x is, None for anything else. Imports none.

    >>> import numpy as np
    >>> framework_of(np.ones(2)), framework_of([1.0, 1.0])
    ('numpy', None)
    """
    if not (hasattr(x, "dtype") and hasattr(x, "shape")):
        return None
    packages = {base.__module__.partition(".")[0] for base in type(x).__mro__}
    for key in ("torch", "tf", "flax", "numpy"):  # a tensor of PyTorch may be one of NumPy's classes, too
        if packages & {FRAMEWORKS[key].package, *(("jaxlib",) if key == "flax" else ())}:
            return key
    return None


@contextmanager
def imported(key: str) -> Iterator[None]:
    """Import what a folder needs: where a package of the framework is absent, the error says what installs it."""
    row = FRAMEWORKS[key]
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in (row.package, row.layers):
            raise
        raise errors.missing_framework(error.name, row.extra, _instead_of(error.name)) from None


def _instead_of(package: str) -> str:
    """Without TensorFlow, which Keras takes by default, its layers run on another backend that is installed."""
    if package != "tensorflow" or find_spec("keras") is None:
        return ""
    others = [name for name in ("jax", "torch") if find_spec(name) is not None]
    if not others:
        return ""
    return f"; layers of Keras also run without it, if KERAS_BACKEND={' or '.join(others)} is set before Python starts"


def lazy(
    package: str, modules: Mapping[str, str], key: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package whose names are imported on use.

    Args:
        package: its ``__name__``.
        modules: the module inside of it that has each name.
        key: of the framework that these modules need.
    """

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with imported(key) if key else nullcontext():
            return getattr(import_module("." + modules[name], package), name)  # inside of the package, never elsewhere

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return __getattr__, __dir__
