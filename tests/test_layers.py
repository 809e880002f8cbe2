"""The parts of the package and what each may import: the table in CONTRIBUTING.md, over every import there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from imports import circles, imports_of

ROOT = Path(__file__).parents[1]
_ROW = re.compile(r"^\| (?P<names>`[^|]+`) \|[^|]+\|(?P<allowed>[^|]*)\|$", re.MULTILINE)
_ROWS = [
    (re.findall(r"`(\w+)`", row["names"]), set(re.findall(r"`(\w+)`", row["allowed"])))
    for row in _ROW.finditer((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
]
ALLOWED = {names[0]: allowed for names, allowed in _ROWS}  # what each part may import, the lowest part first
PART = {name: names[0] for names, _ in _ROWS for name in names}  # by file or folder of the package
# Modules that load others by a name put together at run time: what the name can be. Packages load what users ask
# for, which is no import of theirs.
BY_NAME = {
    "rmsnorm": "",
    "rmsnorm.nematus": "",
    "rmsnorm.nematus.backends": r"rmsnorm\.nematus\.(numpy|torch|tf|flax)",
    "rmsnorm.tf_impl.layers": r"rmsnorm\.(tf|torch|flax)_impl\.functional",
    "rmsnorm.parity.backends": r"rmsnorm\.(torch|tf|flax)_impl",
    "rmsnorm.explaining": r"rmsnorm\.(numpy_impl\.fast|(torch|tf|flax)_impl\.(functional|kernels))",
    "rmsnorm.conversion.layer_norm": r"rmsnorm\.conversion\.layer_norm\.(torch|keras|flax)",
}


def part_of(module: str) -> str:
    return PART[(module.split(".")[1:] or ["rmsnorm"])[0]]


def violations(graph: dict[str, set[str]]) -> Iterator[str]:
    for module, targets in graph.items():
        for target in sorted(targets):
            part, other = part_of(module), part_of(target)
            if part != other and other not in ALLOWED[part]:
                yield f"{module} imports {target}, and {part} may not import {other}"


@cache
def package() -> dict[str, set[str]]:
    return imports_of(ROOT / "rmsnorm", BY_NAME)


def test_parts_import_what_the_table_allows():
    assert not list(violations(package()))


def test_the_table_has_every_part_and_points_down():
    lower = set()
    for part, allowed in ALLOWED.items():
        assert allowed <= lower, f"{part} may import {allowed - lower}, which stands below it in the table"
        lower.add(part)
    paths = (ROOT / "rmsnorm").iterdir()
    modules = {path.stem for path in paths if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert set(PART) - {"rmsnorm"} == modules - {"__init__"}


def test_the_picture_has_every_part_above_those_that_it_imports():
    picture = (ROOT / "docs" / "images" / "architecture.svg").read_text(encoding="utf-8")
    labels = re.findall(r'<text style="font-weight: 700[^>]* y="([\d.]+)"[^>]*>(\w+)</text>', picture)
    depth = {part: float(y) for y, part in labels}
    assert set(depth) == set(ALLOWED)
    for part, allowed in ALLOWED.items():
        assert [other for other in allowed if depth[other] <= depth[part]] == [], part


def test_no_framework_imports_another_but_for_the_layer_of_keras():
    frameworks = {"numpy_impl", "torch_impl", "flax_impl", "tf_impl"}
    found = {
        module
        for module, targets in package().items()
        if part_of(module) in frameworks and {part_of(target) for target in targets} & (frameworks - {part_of(module)})
    }
    assert found == {"rmsnorm.tf_impl.layers"}


def test_no_permission_is_unused():
    used = {(part_of(module), part_of(target)) for module, targets in package().items() for target in targets}
    assert {(part, other) for part, others in ALLOWED.items() for other in others} <= used


def test_no_files_import_each_other():
    assert circles(package()) == []


def test_models_of_one_framework_import_no_other():
    frameworks = ("numpy", "torch", "tf", "flax")
    for module, targets in package().items():
        own = module.split(".")[2:3] if module.startswith("rmsnorm.nematus.") else []
        if own and own[0] in frameworks:
            others = {t for t in targets if t.split(".")[2:3] and t.split(".")[2] in set(frameworks) - set(own)}
            assert not {t for t in others if t.startswith("rmsnorm.nematus.")}, module


@pytest.mark.parametrize(
    "line",
    [
        "import rmsnorm.parity.run",
        "from rmsnorm.parity import run",
        "from ..parity import run",
        "def f():\n    from rmsnorm.parity.run import run",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rmsnorm.parity.run import run",
        "from importlib import import_module\nimport_module('rmsnorm.parity.run')",
        "import importlib\nname = 'run'\nimportlib.import_module(f'rmsnorm.parity.{name}')",
        "import sys\ncommand = [sys.executable, '-m', 'rmsnorm.parity.run']",
    ],
)
def test_an_import_up_is_seen_however_it_is_written(tmp_path, line):
    for name in ("rmsnorm/targets/planted.py", "rmsnorm/parity/run.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
        (tmp_path / name).with_name("__init__.py").write_text("")
    (tmp_path / "rmsnorm" / "__init__.py").write_text("")
    (tmp_path / "rmsnorm" / "targets" / "planted.py").write_text(line)
    graph = imports_of(tmp_path / "rmsnorm")
    assert any("rmsnorm.parity" in entry for entry in violations(graph)), graph
    (tmp_path / "rmsnorm" / "parity" / "run.py").write_text("import rmsnorm.targets.planted")
    assert len(circles(imports_of(tmp_path / "rmsnorm"))) == 1
