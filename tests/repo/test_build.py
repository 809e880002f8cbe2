"""The build: what it prints, what it does without a compiler, and that the metadata alone compile nothing."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from programs import finished, printed

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PROJECT = tomllib.loads(TEXT)["project"]
SCIKIT = """
import pathlib

def build_wheel(folder, settings=None, metadata=None):
    settings = settings or {}
    if settings.get("broken") and settings.get("wheel.cmake") != "false":
        raise SystemExit("CMake failed")
    print("scikit: wheel", settings.get("wheel.cmake", "true"), settings.get("wheel.py-api", ""))
    return "rmsnorm.whl"

def get_requires_for_build_wheel(settings=None):
    return []

def prepare_metadata_for_build_wheel(folder, settings=None):
    print("scikit: metadata", (settings or {}).get("wheel.py-api", ""))
    return "rmsnorm.dist-info"

prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel
"""


COMPILES = ".*compiles the kernels.*"
NO_KERNELS = "{'wheel.cmake': 'false'}"


@pytest.mark.parametrize(("call", "lines"), [
    ("build_wheel('d')", [COMPILES, "scikit: wheel true cp312", r".*has the kernels, compiled in \d+ s"]),
    (f"build_wheel('d', {NO_KERNELS})", [r".*without its kernels, as wheel.cmake is false", r"scikit: wheel false\s*"]),
    ("build_wheel('d', {'broken': True})",  # where there is no compiler
     [COMPILES, "CMake failed", r".*works without them, by slower operations.*", r"scikit: wheel false\s*"]),
    # pip asks for the metadata alone in `pip install --dry-run`; others than those of the wheel would be refused
    ("prepare_metadata_for_build_wheel('d')", ["scikit: metadata cp312"]),
    ("prepare_metadata_for_build_editable('d')", [r"scikit: metadata.*"]),
    (f"prepare_metadata_for_build_wheel('d', {NO_KERNELS})", [r"scikit: metadata\s*"]),
])  # fmt: skip
def test_what_a_build_does_and_says(call, lines, tmp_path):
    """With a package in the place of scikit-build-core that compiles nothing."""
    package = tmp_path / "scikit_build_core"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "build.py").write_text(SCIKIT)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import build_backend; build_backend.{call}"
    printed_lines = printed("-c", code, path=tmp_path, cwd=tmp_path).splitlines()
    assert len(printed_lines) == len(lines)
    assert all(map(re.fullmatch, lines, printed_lines)), printed_lines


def test_the_module_is_the_command():
    assert printed("-m", "rmsnorm", "--version", path=ROOT).strip() == version("rmsnorm")
    wrong = finished("-m", "rmsnorm", "nothing", path=ROOT)
    assert wrong.returncode == 2
    assert "No such command" in wrong.stderr


def test_what_the_metadata_say_is_so():
    """Of the citation, the types, and the extra for Keras, which has no TensorFlow."""
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {PROJECT['version']}\nlicense: {PROJECT['license']}\n" in citation
    assert "arXiv:1910.07467" in citation
    assert (ROOT / "rmsnorm" / "py.typed").is_file()
    assert "Typing :: Typed" in TEXT
    extras = PROJECT["optional-dependencies"]
    assert extras["keras"] == [line for line in extras["tf"] if not line.startswith("tensorflow")]
