"""The four frameworks, called with NumPy arrays, so that one test works for all of them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement

from rmsnorm.parity.backends import open_backend
from rmsnorm.parity.cases import Data
from rmsnorm.parity.judge import Implementation, Outcome, named_gradients
from rmsnorm.specification.frameworks import FRAMEWORKS
from rmsnorm.targets.bridges import bridge

# OpenMP reads this when PyTorch loads it: a thread that waits for work sleeps. One that spins takes a core from others
# where there are more such threads than cores, as with pytest -n.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A script's job in the background ignores Ctrl-C, one under nohup the end of its terminal, and so would every program
# that a test starts and then ends so.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

_REQUIRED = [name for name in os.environ.get("RMSNORM_REQUIRE", "").split(",") if name]


@dataclass(frozen=True)
class Framework:
    """The functions of one framework. They take and return NumPy arrays, which are converted on the way."""

    name: str

    @cached_property
    def functional(self) -> Any:
        return importlib.import_module(f"rmsnorm.{self.name}_impl.functional")

    @cached_property
    def implementation(self) -> Implementation:
        """The implementation that ``rmsnorm selftest`` runs, with automatic differentiation beside the formulas."""
        return open_backend(self.name, "cpu")[1]

    def rms_norm(self, *arguments: Any, **options: Any) -> Any:
        return self.call("rms_norm", *arguments, **options)

    def rms_norm_vjp(self, *arguments: Any, **options: Any) -> Any:
        return self.call("rms_norm_vjp", *arguments, **options)

    def rms_norm_jvp(self, primals: Any, tangents: Any, **options: Any) -> Any:
        """By the golden's function, or by the framework's forward mode."""
        if self.name == "numpy":
            return self.call("rms_norm_jvp", primals, tangents, **options)
        names = ("x", "scale", "bias")
        with self.precision(any(array.dtype == np.float64 for array in _arrays((primals, options)))):
            along = {name: self.send(t) for name, t in zip(names, tangents, strict=False) if t is not None}
            sent = {name: self.send(p) for name, p in zip(names, primals, strict=False) if p is not None}
            others = _mapped(self.send, options)

            def function(tensors: Any) -> Any:
                y = self.functional.rms_norm(*map(tensors.get, names), **others)
                return y if isinstance(y, tuple) else (y,)

            return self.fetch(self.bridge.push(function, sent, along))

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        with self.precision(any(array.dtype == np.float64 for array in _arrays((arguments, options)))):
            positional, named = _mapped(self.send, arguments), _mapped(self.send, options)
            result = getattr(self.functional, name)(*positional, **named)
            return tuple(map(self.fetch, result)) if isinstance(result, tuple) else self.fetch(result)

    def direct(self, data: Data) -> Outcome:
        """Calls every public function on a case, with each option of the call as its own argument."""
        own = data.case.gate or data.case.residual_rounding or data.case.fields or not data.case.variants
        options = {
            "variant": data.variant if own else data.variant.name,
            "eps": data.case.options.get("eps"),
            "partial": data.case.options.get("partial"),
            "axis": data.axis,
            "feature_axis": data.feature_axis,
            "out_dtype": data.out_dtype,
            "mask": data.mask,
            "residual": data.residual,
            "gate": data.gate,
        }
        primals = (data.x, data.scale, data.bias)
        before = [None if array is None else array.tobytes() for array in (*primals, *data.arrays.values())]
        y, *_, inverse_rms = self.rms_norm(*primals, return_inverse_rms=True, **options)
        dy = data.dy if data.dh is None else (data.dy, data.dh)
        gradients = self.rms_norm_vjp(dy, *primals, **options)
        named = {"y": y, "inverse_rms": inverse_rms, "jvp": self.rms_norm_jvp(primals, data.tangents, **options)}
        named |= named_gradients(data, gradients)
        after = [None if array is None else array.tobytes() for array in (*primals, *data.arrays.values())]
        results = {name: [value] for name, value in named.items() if value is not None}
        return Outcome(results, () if before == after else ("an input",))

    def precision(self, wide: bool) -> Any:
        """JAX computes in float64 only if x64 is enabled."""
        return self.bridge.precision(wide) if self.name == "flax" else contextlib.nullcontext()

    @cached_property
    def bridge(self) -> Any:
        return bridge(self.name)

    def send(self, array: Any) -> Any:
        return array if self.name == "numpy" else self.bridge.send(array)

    def fetch(self, array: Any) -> Any:
        return None if array is None else self.bridge.fetch(array)


def _mapped(function: Any, value: Any) -> Any:
    """Applies the function to the NumPy arrays in tuples and options; keeps everything else."""
    if isinstance(value, dict):
        return {key: _mapped(function, entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(_mapped(function, entry) for entry in value)
    return function(value) if isinstance(value, np.ndarray) else value


def _arrays(value: Any) -> list[Any]:
    arrays: list[Any] = []
    _mapped(arrays.append, value)
    return arrays


def pytest_configure(config: pytest.Config) -> None:
    """The programs that a test starts can import what the test itself can."""
    folders, own = os.environ.get("PYTHONPATH", "").split(os.pathsep), map(str, config.getini("pythonpath"))
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, folders), *(path for path in own if path not in folders)])


def pytest_report_header() -> str:
    versions = []
    for package in ("numpy", "torch", "tensorflow", "keras", "jax", "flax"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"{package} absent")
    return f"frameworks: {', '.join(versions)}"


def pytest_sessionstart() -> None:
    for name in _REQUIRED:
        if name not in FRAMEWORKS:
            raise pytest.UsageError(f"RMSNORM_REQUIRE names {name!r}, expected some of {', '.join(FRAMEWORKS)}")
        backend = FRAMEWORKS[name]
        if find_spec(backend.package) is None:
            raise pytest.UsageError(
                f"RMSNORM_REQUIRE names {name}, but {backend.package} is not installed; "
                f"pip install '.[{backend.extra}]'"
            )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test with the mark ``needs(requirement, reason)`` where the requirement does not hold."""
    for mark in item.iter_markers("needs"):
        if why := _lacks(*mark.args, **mark.kwargs):
            pytest.skip(why)


def _lacks(requirement: str, reason: str) -> str | None:
    """Why a test is skipped that needs a package, such as ``torch>=2.12``; None where it is here."""
    wanted = Requirement(requirement)
    try:
        here = version(wanted.name)
    except PackageNotFoundError:
        here = "absent"
    is_here = here != "absent" and wanted.specifier.contains(here, prereleases=True)  # as those that are built nightly
    return None if is_here else f"needs {requirement}, {wanted.name} is {here}: {reason}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of a framework with its name, for ``pytest -m``, and starts with the file that takes minutes.

    Otherwise one worker would run that file alone at the end. The name of a test must be the same in every process.
    """
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid} is named by an address in memory; give its parameters ids")
        framework = getattr(getattr(item, "callspec", None), "params", {}).get("framework")
        if isinstance(item, pytest.Function) and isinstance(framework, str) and framework in FRAMEWORKS:
            item.add_marker(framework)
    items.sort(key=lambda item: item.path.name != "test_fuzz.py")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many results the tests compared that count them."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "comparisons":
                terminalreporter.write_line(f"{report.nodeid}: {value} comparisons")


@pytest.fixture(scope="session", params=list(FRAMEWORKS))
def framework(request: pytest.FixtureRequest) -> Framework:
    backend = FRAMEWORKS[request.param]
    if find_spec(backend.package) is None:
        pytest.skip(f"{backend.package} is not installed; pip install '.[{backend.extra}]'")
    return Framework(request.param)


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


@pytest.fixture(autouse=True, scope="module")
def _without_compiled_code() -> Iterator[None]:
    """Drops what JAX compiled for a test file. No other file needs it, and it would grow to gigabytes."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()


@pytest.fixture
def few_circumstances(monkeypatch: pytest.MonkeyPatch) -> None:
    """``check`` asks a quarter of the circumstances: for tests of what else it does, as all of them take seconds."""
    from rmsnorm.parity import asking

    every = asking.circumstances

    def some(levels: Mapping[str, Sequence[str]], *, strength: int) -> list[asking.Circumstance]:
        return every(levels, strength=strength)[:: 4 if strength > 1 else 1]  # identify asks but few

    monkeypatch.setattr(asking, "circumstances", some)
