"""What every test shares: settings of the frameworks before any import, compiled code on disk, and which tests run.

``make test`` leaves out the tests with the mark ``slow``. Which cases of the others run depends on what changed since
the branch main (`tests/changes.py`): of a part that changed all of them, and the tests with the mark ``costly``; of a
part that stands on it three for each framework, or as many as the mark ``sample(n)`` says; of any other test one.
Where git does not know what changed, every part gets the three. ``make test-all`` (``pytest --all``) runs everything.
The sample depends on RMSNORM_TEST_SEED alone, by default the commit, without git the date; the first lines of a run
say it.
"""

from __future__ import annotations

import os
import random
import sys
from collections import defaultdict
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import changes
import pytest

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
CASES = 3
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
    if change is None:
        which = f"{CASES} cases of each test"
    else:
        names = [", ".join(parts) or "no part" for parts in (change.touched, change.above)]
        most = CASES if change.is_large else "all"
        which = f"{most} cases for what changed ({names[0]}), {CASES} for what stands on it ({names[1]}), 1 else"
    return f"{which}; no slow test; RMSNORM_TEST_SEED={SEED}; --all runs everything"


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out slow tests, and all but some cases of a test. One that is named by its id runs whole."""
    if "RMSNORM_TEST_ALL" in os.environ or any("::" in argument for argument in config.args):
        return
    groups: defaultdict[tuple[str, str, int], list[pytest.Item]] = defaultdict(list)
    left = []
    for item in items:
        callspec, mark = getattr(item, "callspec", None), item.get_closest_marker("sample")
        framework = callspec.params.get("framework") if callspec else None
        framework = framework if isinstance(framework, str) else ""
        path = item.path.relative_to(_TESTS.parent).as_posix()
        cases = config._rmsnorm_change.cases(path, framework) if config._rmsnorm_change else "some"
        if item.get_closest_marker("slow") or (cases != "all" and item.get_closest_marker("costly")):
            left.append(item)
        elif callspec and cases != "all":
            count = 1 if cases == "one" else mark.args[0] if mark else CASES
            groups[item.nodeid.partition("[")[0], "" if cases == "one" else framework, count].append(item)
    for (name, framework, count), group in groups.items():
        kept = random.Random(f"{SEED} {name} {framework}").sample(range(len(group)), min(count, len(group)))
        left += [item for number, item in enumerate(group) if number not in kept]
    if left:
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [item for item in items if item not in gone]
