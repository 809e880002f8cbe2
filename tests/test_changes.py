"""Which cases run after a change: the table of tests, what git says, and a run of pytest."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import changes
import pytest
import selection


def test_every_part_has_tests_and_every_folder_of_tests_a_part():
    assert set(changes.ALLOWED) == {part for part in changes.TESTS if part not in ("benchmarks", "experiments", "docs")}
    paths = [path for tests in changes.TESTS.values() for path in tests]
    assert [path for path in paths if not list(changes.ROOT.glob(f"{path}*"))] == []
    folders = {path.parent.relative_to(changes.ROOT).as_posix() for path in (changes.ROOT / "tests").rglob("test_*.py")}
    assert folders - {"tests"} <= set(paths)


@pytest.mark.parametrize(
    ("changed", "test", "framework", "wanted"),
    [
        ("rmsnorm/torch_impl/layers.py", "tests/torch_impl/test_torch.py", "", "changed"),
        ("rmsnorm/torch_impl/layers.py", "tests/test_interface.py", "torch", "changed"),
        ("rmsnorm/torch_impl/layers.py", "tests/test_interface.py", "flax", "other"),
        ("rmsnorm/torch_impl/layers.py", "tests/conversion/test_replace_torch.py", "", "above"),
        ("rmsnorm/torch_impl/layers.py", "tests/cli/test_cli.py", "", "other"),
        ("rmsnorm/torch_impl/layers.py", "tests/test_docs.py", "", "above"),
        ("benchmarks/compare.py", "tests/test_docs.py", "", "other"),
        ("rmsnorm/cpu/native/general.h", "tests/cpu/test_cpu.py", "", "changed"),
        ("rmsnorm/cpu", "tests/cpu/test_cpu.py", "", "changed"),
        ("rmsnorm/cpu/native/general.h", "tests/flax_impl/test_jax.py", "", "above"),
        ("rmsnorm/__main__.py", "tests/cli/test_cli.py", "", "changed"),
        ("rmsnorm/__init__.py", "tests/test_imports.py", "", "changed"),
        ("benchmarks/compare.py", "tests/bench/test_compare.py", "", "changed"),
        ("docs/ci.md", "tests/cpu/test_cpu.py", "", "other"),
        ("docs/ci.md", "tests/parity/test_ci_page.py", "", "changed"),
        ("tests/cpu/test_cpu.py", "tests/cpu/test_cpu.py", "", "changed"),
        ("tests/torch_zoo.py", "tests/parity/test_zoo.py", "", "changed"),  # which imports it
        ("tests/gpu/torch_calls.py", "tests/gpu/test_triton.py", "", "changed"),  # which runs it
        ("tests/nematus/conftest.py", "tests/nematus/test_cells.py", "", "changed"),
        ("tests/nematus/conftest.py", "tests/cpu/test_cpu.py", "", "other"),
    ],
)
def test_a_change_touches_its_part_and_what_stands_on_it(changed, test, framework, wanted):
    assert changes.of([changed]).relation(test, framework) == wanted


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


def cases(relation: str, tests: int, each: int, mark: str = "") -> list[selection.Case]:
    """So many tests with so many cases in one file."""
    file = f"{relation}.py"
    return [
        selection.Case((relation, test, number, mark), file, f"{file}::{test}{mark}", relation, mark=mark)
        for test, number in itertools.product(range(tests), range(each))
    ]  # fmt: skip


# Each case takes a second.
TABLE = {"changed.py": 1.0, "above.py": 1.0, "other.py": 1.0}
EVERY = [*cases("changed", 10, 40), *cases("changed", 1, 1, "costly"), *cases("changed", 1, 1, "slow"),
         *cases("above", 40, 20), *cases("other", 100, 5)]  # fmt: skip


@pytest.mark.parametrize(
    ("minutes", "levels"),
    [
        (100, ("every case", "3 cases", "one case")),  # more is not run of what a change does not touch
        (7, ("every case", "3 cases", "one case")),  # 415, 120 and 100 of 840 seconds
        (4, ("18 cases", "3 cases", "one case")),  # 180, 120 and 100 of 480
        (2, ("9 cases", "one case", "one case")),
        (0.5, ("3 cases", "one case of one test in 3", "one case of one test in 8")),
    ],
)
def test_as_much_runs_as_fits_into_the_time(minutes, levels):
    items, names = selection.chosen(EVERY, "a seed", minutes / selection._SHARE, TABLE)
    assert tuple(names.values()) == levels
    costs = sum(selection._COSTLY if item[3] == "costly" else 1 for item in items)
    assert costs <= 60 * minutes * selection.CORES
    assert not any(item[3] == "slow" for item in items)
    assert any(item[3] == "costly" for item in items) == (levels[0] == "every case")


def test_the_seed_alone_draws_and_all_seeds_together_draw_every_test():
    drawn = [selection.chosen(EVERY, f"{seed}", 0.5, TABLE)[0] for seed in range(60)]
    assert drawn[0] == selection.chosen(EVERY, "0", 0.5, TABLE)[0] != drawn[1]
    assert {item[:2] for items in drawn for item in items if item[0] == "other"} == {("other", n) for n in range(100)}


def test_where_nothing_is_known_of_what_changed_every_test_is_equal():
    every = [dataclasses.replace(case, relation="changed") for case in EVERY]
    assert list(selection.chosen(every, "a seed", 7 / selection._SHARE, TABLE)[1].values()) == ["6 cases"]


def test_each_framework_has_its_sample_and_a_mark_says_how_many():
    of_frameworks = [
        selection.Case((framework, number), "a.py", "a.py::test", "above", framework, sample)
        for framework, sample in (("torch", None), ("tf", 2))
        for number in range(9)
    ]
    items, _ = selection.chosen(of_frameworks, "a seed", 7, {"a.py": 1.0})
    assert [sum(name == framework for name, _ in items) for framework in ("torch", "tf")] == [3, 2]


def test_the_table_has_the_files_of_tests():
    """A file that it lacks counts as the mean of the others: a few may be missing until ``make times`` runs again."""
    files = {path.relative_to(changes.ROOT).as_posix() for path in (changes.ROOT / "tests").rglob("test_*.py")}
    missing = files - set(json.loads(selection.TABLE.read_text()))
    assert len(missing) < len(files) / 10, f"make times writes the times of {sorted(missing)}"


def test_a_run_takes_what_the_change_asks_for(tmp_path):
    """In a small package with this conftest.py: a part, one that stands on it, another one, and a test of each."""
    for name in ("conftest.py", "tests/changes.py", "tests/selection.py", "tests/seconds.json", "CONTRIBUTING.md"):
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
        ([], {"gpu": 10, "cpu": 10, "cli": 10}),  # no repository
        (["--all"], {"gpu": 11, "cpu": 11, "cli": 11}),
    ]:
        assert collected(tmp_path, *options) == wanted


def collected(folder: Path, *options: str) -> dict[str, int]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options]
    own = {name: value for name, value in os.environ.items() if name != "RMSNORM_TEST_ALL"}
    run = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True)
    assert run.returncode in (0, 5), run.stdout + run.stderr  # 5: no test is left
    return {
        name: sum(line.startswith(f"tests/{name}/") for line in run.stdout.splitlines())
        for name in ("gpu", "cpu", "cli")
    }
