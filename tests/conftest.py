"""The frameworks, their ways to call and their layers as fixtures; which tests run; what a test leaves behind."""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import frameworks
import pytest
from packaging.requirements import Requirement

from rmsnorm import cpu, engines
from rmsnorm.parity import asking
from rmsnorm.parity.design import lead_of
from rmsnorm.specification.frameworks import FRAMEWORKS

# OpenMP reads this when PyTorch loads it: a thread that waits for work sleeps. One that spins takes a core from others
# where there are more such threads than cores, as with pytest -n.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A script's job in the background ignores Ctrl-C, one under nohup the end of its terminal, and so would every program
# that a test starts and then ends so.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

_MOST: Final = 2**19  # elements of x


def pytest_configure(config: pytest.Config) -> None:
    """The programs that a test starts can import what the test itself can."""
    folders, own = os.environ.get("PYTHONPATH", "").split(os.pathsep), map(str, config.getini("pythonpath"))
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, folders), *(path for path in own if path not in folders)])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def pytest_report_header() -> str:
    packages = ("numpy", "torch", "tensorflow", "keras", "jax", "flax")
    return f"frameworks: {', '.join(f'{package} {_version(package)}' for package in packages)}"


def pytest_sessionstart() -> None:
    for name in filter(None, os.environ.get("RMSNORM_REQUIRE", "").split(",")):
        if name not in FRAMEWORKS:
            raise pytest.UsageError(f"RMSNORM_REQUIRE names {name!r}, expected some of {', '.join(FRAMEWORKS)}")
        if why := frameworks.missing(name):
            raise pytest.UsageError(f"RMSNORM_REQUIRE names {name}, but {why}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test with the mark ``needs("torch>=2.12", reason)`` where another version is installed, or none."""
    for requirement, reason in (mark.args for mark in item.iter_markers("needs")):
        wanted = Requirement(requirement)
        here = _version(wanted.name)
        if here == "absent" or not wanted.specifier.contains(here, prereleases=True):  # as those built nightly
            pytest.skip(f"needs {requirement}, {wanted.name} is {here}: {reason}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``layers`` has a case for each kind of layer."""
    if "layers" in metafunc.fixturenames:
        metafunc.parametrize("layers", frameworks.LAYERS, indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of a framework with its name, for ``pytest -m``."""
    for item in items:
        if " at 0x" in item.nodeid:  # the name of a test must be the same in every process
            raise pytest.UsageError(f"{item.nodeid} is named by an address in memory; give its parameters ids")
        given = getattr(getattr(item, "callspec", None), "params", {})
        for name in ("framework", "way", "layers"):
            if isinstance(item, pytest.Function) and given.get(name) in (*frameworks.KEYS, *FRAMEWORKS):
                item.add_marker(frameworks.KEYS.get(given[name], given[name]))
    items.sort(key=lambda item: "tools" not in item.path.parts)  # the longest files first: two workers end together


def _here(key: str) -> None:
    if why := frameworks.missing(key):
        pytest.skip(why)


@pytest.fixture(scope="session", params=list(frameworks.EAGER))
def framework(request: pytest.FixtureRequest) -> frameworks.Way:
    """Each framework, called eagerly."""
    _here(request.param)
    return frameworks.way(request.param)


@pytest.fixture(scope="session")
def way(request: pytest.FixtureRequest) -> frameworks.Way:
    """One of ``frameworks.WAYS``, for tests with this parameter."""
    _here(frameworks.WAYS[request.param])
    return frameworks.way(request.param)


LAYERS: Final = {  # the module and the class of each kind
    "torch layer": ("torch", "Layer"), "keras layer": ("keras", "Layer"), "nnx layer": ("flax", "Nnx"),
    "linen layer": ("flax", "Linen"),
}  # fmt: skip


@pytest.fixture
def layers(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A class of layers; ``layer_kinds`` says what it has."""
    _here(frameworks.LAYERS[request.param])
    package, name = LAYERS[request.param]
    pytest.importorskip(package)
    module = importlib.import_module(f"layer_{package}")
    standard = sys.modules["jax"].numpy_dtype_promotion("standard") if package == "flax" else contextlib.nullcontext()
    with standard:
        yield getattr(module, name)


@pytest.fixture
def forget() -> Iterator[Callable[..., None]]:
    """Empties the caches of functions, now and at the end of the test: what they keep depends on what it replaces."""
    emptied: list[Any] = []

    def empty(*functions: Any) -> None:
        emptied.extend(functions)
        for function in functions:
            function.cache_clear()

    yield empty
    empty(*emptied)


@pytest.fixture(params=["kernels", "recipe"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, forget: Callable[..., None]) -> str:
    """What computes ordinary rows: the kernels, where there are any; or in each framework its operations."""
    if request.param == "recipe":
        monkeypatch.setattr(cpu, "missing", lambda *_: "there are none")
        forget(engines._prepared)
        if "jax" in sys.modules:
            sys.modules["jax"].clear_caches()
    elif not cpu.is_available():
        pytest.skip("there are no kernels")
    return str(request.param)


def _fewer(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    every = asking.circumstances

    def small(levels: Mapping[str, Sequence[str]], *, strength: int) -> list[asking.Circumstance]:
        asked = every(levels, strength=strength)
        if strength == 1:  # identify asks but few
            return asked
        return [each for each in asked if math.prod(lead_of(each.levels)) * int(each["width"]) <= _MOST][::step]

    monkeypatch.setattr(asking, "circumstances", small)


@pytest.fixture
def small_circumstances(monkeypatch: pytest.MonkeyPatch) -> None:
    """``check`` and ``replace`` ask no circumstances of large arrays, which take seconds."""
    _fewer(monkeypatch, 1)


@pytest.fixture
def few_circumstances(monkeypatch: pytest.MonkeyPatch) -> None:
    """They ask an eighth of these: for tests of what else they do."""
    _fewer(monkeypatch, 8)


@pytest.fixture(autouse=True, scope="module")
def _without_compiled_code() -> Iterator[None]:
    """Drops what JAX compiled for a test file. No other file needs it, and it would grow to gigabytes."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()
