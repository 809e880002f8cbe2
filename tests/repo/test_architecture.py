"""The parts of the package and what each may import: the table in CONTRIBUTING.md, over every import there is.

Imports count at the top, inside functions, for types only, and by name: ``import_module("rmsnorm.x")`` and
``[..., "-m", "rmsnorm.x"]``. An f-string imports all modules of that form, unless ``BY_NAME`` says which ones.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
Graph = dict[str, set[str]]


def _text(node: ast.expr) -> str:
    """A text of the source; ``*`` stands for what is put in at run time."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "*" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def written(path: Path, package: tuple[str, ...]) -> Iterator[str]:
    """The names of modules, or of objects in modules, that a file in a package imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*start, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield _text(node.args[0])
        elif isinstance(node, ast.List):
            yield from (text for flag, text in pairwise(map(_text, node.elts)) if flag == "-m")


def meant(name: str, modules: dict[str, Path]) -> Iterator[str]:
    """The modules that a name stands for: the module itself, or the module that contains the object."""
    if "*" in name:
        pattern = re.escape(name).replace(r"\*", r"[\w.]+")
        yield from (module for module in modules if re.fullmatch(pattern, module))
        return
    while name and name not in modules:
        name = name.rpartition(".")[0]
    yield from [name] * bool(name)


def imports_of(folder: Path) -> Graph:
    """The modules of a package that each of its modules imports."""
    modules, graph = dict[str, Path](), Graph()
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    for module, path in modules.items():
        names = set(written(path, path.relative_to(folder.parent).parts[:-1]))
        named = set[str]()
        if any("*" in name for name in names) and module in BY_NAME:
            names = {name for name in names if "*" not in name}
            named = {target for target in modules if re.fullmatch(BY_NAME[module], target)}
        graph[module] = named.union(*(meant(name, modules) for name in names)) - {module}
    return graph


def part_of(module: str) -> str:
    return PART[(module.split(".")[1:] or ["rmsnorm"])[0]]


def violations(graph: Graph) -> list[str]:
    pairs = [(module, target) for module, targets in graph.items() for target in sorted(targets)]
    return [f"{module} imports {target}" for module, target in pairs
            if part_of(target) not in {part_of(module), *ALLOWED[part_of(module)]}]  # fmt: skip


@cache
def package() -> Graph:
    return imports_of(ROOT / "rmsnorm")


def test_parts_import_what_the_table_allows():
    """All of it, and no files import each other."""
    assert not violations(package())
    used = {(part_of(module), part_of(target)) for module, targets in package().items() for target in targets}
    assert {(part, other) for part, others in ALLOWED.items() for other in others} <= used, "no permission is unused"
    TopologicalSorter(package()).prepare()  # it raises an error for files that import each other


def test_the_table_has_every_part_and_points_down():
    order = list(ALLOWED)
    for part, allowed in ALLOWED.items():
        assert allowed <= {*order[: order.index(part)]}, f"{part} may import what stands below it in the table"
    paths = (ROOT / "rmsnorm").iterdir()
    modules = {path.stem for path in paths if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert set(PART) - {"rmsnorm"} == modules - {"__init__"}


@pytest.mark.parametrize(
    "line",
    [
        "import rmsnorm.parity.run",
        "from ..parity import run",
        "def f():\n    from rmsnorm.parity.run import run",
        "import importlib\nname = 'run'\nimportlib.import_module(f'rmsnorm.parity.{name}')",
        "import sys\ncommand = [sys.executable, '-m', 'rmsnorm.parity.run']",
    ],
)
def test_an_import_up_is_seen_however_it_is_written(tmp_path, line):
    files = {"__init__": "", "targets/__init__": "", "parity/__init__": "", "parity/run": "", "targets/planted": line}
    for name, text in files.items():
        path = tmp_path / "rmsnorm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    graph = imports_of(tmp_path / "rmsnorm")
    assert any("rmsnorm.parity" in entry for entry in violations(graph)), graph
