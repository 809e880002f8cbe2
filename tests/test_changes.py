"""Which cases run after a change: the table of tests, what git says, and a run of pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import changes
import pytest


def test_every_part_has_tests_and_every_folder_of_tests_a_part():
    assert set(changes.ALLOWED) == {part for part in changes.TESTS if part not in ("benchmarks", "experiments", "docs")}
    paths = [path for tests in changes.TESTS.values() for path in tests]
    assert [path for path in paths if not list(changes.ROOT.glob(f"{path}*"))] == []
    folders = {path.parent.relative_to(changes.ROOT).as_posix() for path in (changes.ROOT / "tests").rglob("test_*.py")}
    assert folders - {"tests"} <= set(paths)


@pytest.mark.parametrize(
    ("changed", "test", "framework", "wanted"),
    [
        ("rmsnorm/torch_impl/layers.py", "tests/torch_impl/test_torch.py", "", "all"),
        ("rmsnorm/torch_impl/layers.py", "tests/test_interface.py", "torch", "all"),
        ("rmsnorm/torch_impl/layers.py", "tests/test_interface.py", "flax", "one"),
        ("rmsnorm/torch_impl/layers.py", "tests/conversion/test_replace_torch.py", "", "some"),
        ("rmsnorm/torch_impl/layers.py", "tests/cli/test_cli.py", "", "one"),
        ("rmsnorm/torch_impl/layers.py", "tests/test_docs.py", "", "some"),
        ("benchmarks/compare.py", "tests/test_docs.py", "", "one"),
        ("rmsnorm/cpu/native/general.h", "tests/cpu/test_cpu.py", "", "all"),
        ("rmsnorm/cpu", "tests/cpu/test_cpu.py", "", "all"),
        ("rmsnorm/cpu/native/general.h", "tests/flax_impl/test_jax.py", "", "some"),
        ("rmsnorm/__main__.py", "tests/cli/test_cli.py", "", "all"),
        ("rmsnorm/__init__.py", "tests/test_imports.py", "", "all"),
        ("benchmarks/compare.py", "tests/bench/test_compare.py", "", "all"),
        ("docs/ci.md", "tests/cpu/test_cpu.py", "", "one"),
        ("docs/ci.md", "tests/parity/test_ci_page.py", "", "all"),
        ("tests/cpu/test_cpu.py", "tests/cpu/test_cpu.py", "", "all"),
        ("tests/torch_zoo.py", "tests/parity/test_zoo.py", "", "all"),  # which imports it
        ("tests/gpu/torch_calls.py", "tests/gpu/test_triton.py", "", "all"),  # which runs it
        ("tests/nematus/conftest.py", "tests/nematus/test_cells.py", "", "all"),
        ("tests/nematus/conftest.py", "tests/cpu/test_cpu.py", "", "one"),
    ],
)
def test_a_change_runs_all_of_its_part_and_some_of_what_stands_on_it(changed, test, framework, wanted):
    assert changes.of([changed]).cases(test, framework) == wanted


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True)


def commit(folder: Path, name: str) -> None:
    (folder / name).write_text(name)
    git(folder, "add", name)
    git(folder, "commit", "-q", "-m", name)


def test_git_says_what_changed_since_main(tmp_path):
    assert changes.since_main(tmp_path) is changes.commit(tmp_path) is None  # as in an sdist
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path, "first")
    assert changes.since_main(tmp_path) is None  # nothing is before it, as in a clone of depth 1
    commit(tmp_path, "second")
    assert changes.since_main(tmp_path) == changes.Change(frozenset(["second"]))
    git(tmp_path, "checkout", "-q", "-b", "work")
    commit(tmp_path, "third")
    commit(tmp_path, "fourth")
    (tmp_path / "first").write_text("not committed")
    (tmp_path / "new").write_text("not added")
    assert changes.since_main(tmp_path) == changes.Change(frozenset(["third", "fourth", "first", "new"]))
    (tmp_path / "inner").mkdir()
    assert (
        changes.since_main(tmp_path / "inner") is changes.commit(tmp_path / "inner") is None
    )  # an sdist unpacked there


def test_a_run_takes_the_cases_that_the_change_asks_for(tmp_path):
    """In a small package with this conftest.py: a part, one that stands on it, another one, and a test of each."""
    for name in ("conftest.py", "tests/changes.py", "CONTRIBUTING.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((changes.ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    test = "import pytest\n@pytest.mark.parametrize('case', range(9))\ndef test(case): pass\n"
    test += "@pytest.mark.costly\ndef test_long(): pass\n@pytest.mark.slow\ndef test_longer(): pass\n"
    for folder in ("gpu", "cpu", "cli"):
        (tmp_path / "tests" / folder).mkdir()
        (tmp_path / "tests" / folder / f"test_{folder}.py").write_text(test)
    marks = "markers = ['slow:', 'costly:', 'sample(n):']"
    (tmp_path / "pyproject.toml").write_text(f"[tool.pytest.ini_options]\npythonpath = ['tests']\n{marks}\n")
    (tmp_path / "rmsnorm" / "gpu").mkdir(parents=True)  # --changed names what there is
    for options, wanted in [
        (["--changed", "rmsnorm/gpu"], {"gpu": 10, "cpu": 3, "cli": 1}),
        (["--changed", "tests/gpu/test_gpu.py,tests/cpu/test_cpu.py"], {"gpu": 10, "cpu": 10, "cli": 1}),
        ([], {"gpu": 3, "cpu": 3, "cli": 3}),  # no repository
        (["--all"], {"gpu": 11, "cpu": 11, "cli": 11}),
    ]:
        assert collected(tmp_path, *options) == wanted


def collected(folder: Path, *options: str) -> dict[str, int]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options]
    own = {name: value for name, value in os.environ.items() if name != "RMSNORM_TEST_ALL"}
    lines = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name: sum(line.startswith(f"tests/{name}/") for line in lines) for name in ("gpu", "cpu", "cli")}


def test_a_change_of_many_parts_gets_some_cases_of_each():
    paths = ["rmsnorm/cpu", "rmsnorm/gpu", "rmsnorm/files", "rmsnorm/parity"]
    assert changes.of(paths).cases("tests/parity/test_vectors.py", "") == "all"
    assert changes.of([*paths, "rmsnorm/identify"]).cases("tests/parity/test_vectors.py", "") == "some"
