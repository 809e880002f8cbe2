"""What every test shares: settings of the frameworks before any import, compiled code on disk, and which tests run.

``make test`` runs as many tests as take about seven minutes on two cores (`tests/selection.py`): first those of what
changed since the branch main (`tests/changes.py`), then of what stands on it, then of all else; without git all are
equal. It leaves out the tests with the mark ``slow``, and runs those with the mark ``costly`` where their part changed
and there is time for all its cases. ``--minutes`` says another time, and ``make test-all`` (``pytest --all``) runs
everything. Which cases are drawn depends on RMSNORM_TEST_SEED alone, by default the commit, without git the date; the
first lines of a run say it, and the last ones how many cases ran.
"""

from __future__ import annotations

import os
import sys
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import changes
import pytest
import selection

from rmsnorm.parity.run import keep_what_jax_compiles
from rmsnorm.targets.processes import import_triton_before_tensorflow

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
# What the frameworks compile is kept from one file, process and run to the next. Each of them checks what it reads.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rmsnorm"
keep_what_jax_compiles()
import_triton_before_tensorflow()
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_CACHE / "inductor"))
# So is bytecode: the tests start a hundred processes, and each would compile this package again.
if os.environ.get("RMSNORM_TEST_BYTECODE") != "0" and os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False
_TESTS = Path(__file__).with_name("tests")
# Workers and other processes inherit it.
SEED = os.environ.setdefault("RMSNORM_TEST_SEED", (changes.commit() or f"{date.today()}")[:12])
_HAS_KERNELS = bool(find_spec("rmsnorm.cpu._native"))
if not _HAS_KERNELS:
    os.environ.setdefault("RMSNORM_CPU_KERNELS", "0")  # the warning that they are missing would be an error

_NEEDS = {
    "triton": ["gpu/triton_*"],
    "torch": ["torch_impl/*", "nematus/torch/*", "*/torch.py", "*/torch_*.py"],
    "tensorflow": ["tf_impl/*", "nematus/tf/*", "*/tf.py"],
    "keras": ["tf_impl/layers.py", "nematus/tf/*", "*/keras.py"],
    "jax": ["flax_impl/*", "nematus/flax/*", "*/flax.py"],
    "flax": ["flax_impl/layers.py", "flax_impl/linen.py", "nematus/flax/*", "*/flax.py"],
}
_NEEDS["torch"] += ["conversion/layer_norm/__init__.py", "conversion/replacement/__init__.py"]  # whose examples use it
if find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("nightly", max_examples=2000, print_blob=True)  # make fuzz

collect_ignore_glob = [
    f"rmsnorm/{pattern}" for package, patterns in _NEEDS.items() if not find_spec(package) for pattern in patterns
]
if not _HAS_KERNELS:
    collect_ignore_glob.append("rmsnorm/cpu/*")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Of the files in tests/ only those with tests: --doctest-modules would import helpers and programs, too."""
    is_test = collection_path.name.startswith("test_") or collection_path.suffix != ".py"
    return None if is_test or not collection_path.is_relative_to(_TESTS) else True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the slow tests, and every case of those that are sampled")
    parser.addoption(
        "--minutes", type=float, default=selection.MINUTES, help="how long the tests may take on two cores"
    )
    parser.addoption(
        "--changed",
        action="append",
        metavar="PATHS",
        help="which files or folders count as changed, as rmsnorm/cpu,docs; by default what git shows since main",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--all"):
        os.environ["RMSNORM_TEST_ALL"] = "1"  # for tests that run pytest, and workers
    paths = config.getoption("--changed")
    try:
        config._rmsnorm_change = changes.since_main() if paths is None else changes.of(paths)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_report_header(config: pytest.Config) -> str:
    if "RMSNORM_TEST_ALL" in os.environ:
        return "every test and every case"
    change = config._rmsnorm_change
    which = "of every part"
    if change is not None:
        names = [", ".join(parts) or "no part" for parts in (change.touched, change.above)]
        which = f"first of what changed ({names[0]}), then of what stands on it ({names[1]}), then of the others"
    minutes = f"{config.getoption('--minutes'):g} minutes"
    return f"tests for {minutes} on two cores, {which}; RMSNORM_TEST_SEED={SEED}; --all runs everything"


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps what fits into the time. A test that is named by its id runs whole."""
    if "RMSNORM_TEST_ALL" in os.environ or any("::" in argument for argument in config.args):
        return
    kept, config._rmsnorm_levels = selection.chosen(
        [_case(config._rmsnorm_change, item) for item in items], SEED, config.getoption("--minutes")
    )
    left = [item for item in items if item not in kept]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item in kept]


def _case(change: changes.Change | None, item: pytest.Item) -> selection.Case:
    callspec, sample = getattr(item, "callspec", None), item.get_closest_marker("sample")
    framework = callspec.params.get("framework") if callspec else None
    framework = framework if isinstance(framework, str) else ""
    path = item.path.relative_to(_TESTS.parent).as_posix()
    relation = change.relation(path, framework) if change else "changed"
    mark = next((name for name in ("slow", "costly") if item.get_closest_marker(name)), "")
    test, of_sample = item.nodeid.partition("[")[0], sample.args[0] if sample else None
    return selection.Case(item, path, test, relation, framework, of_sample, mark)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What a worker chose, all of them chose."""
    node.config._rmsnorm_levels = node.workeroutput.get("rmsnorm_levels", {})


def pytest_sessionfinish(session: pytest.Session) -> None:
    if output := getattr(session.config, "workeroutput", None):
        output["rmsnorm_levels"] = getattr(session.config, "_rmsnorm_levels", {})


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How many cases ran of the tests of what changed, of what stands on it, and of the others."""
    words = {"changed": "what changed", "above": "what stands on it", "other": "the others"}
    levels = [f"{name} of {words[relation]}" for relation, name in getattr(config, "_rmsnorm_levels", {}).items()]
    if levels:
        terminalreporter.write_line(f"of the tests there ran: {', '.join(levels)}")
