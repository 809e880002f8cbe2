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


@pytest.fixture
def built(tmp_path):
    """What a call of the build prints, with a package in the place of scikit-build-core that compiles nothing."""
    package = tmp_path / "scikit_build_core"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "build.py").write_text(SCIKIT)

    def lines(call):
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import build_backend; build_backend.{call}"
        return printed("-c", code, path=tmp_path, cwd=tmp_path).splitlines()

    return lines


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_metadata_compile_nothing(built, kind):
    """pip asks for them alone in `pip install --dry-run`; without this function it would build the wheel."""
    (line,) = built(f"prepare_metadata_for_build_{kind}('folder')")
    assert line.startswith("scikit: metadata")


def test_a_build_says_what_it_does(built):
    first, scikit, last = built("build_wheel('folder')")
    assert "compiles the kernels" in first
    assert scikit == "scikit: wheel true cp312"
    assert re.fullmatch(r"rmsnorm: rmsnorm\.whl has the kernels, compiled in \d+ s", last)
    first, scikit = built("build_wheel('folder', {'wheel.cmake': 'false'})")
    assert "without its kernels, as wheel.cmake is false" in first
    assert scikit.strip() == "scikit: wheel false"


def test_the_metadata_are_those_of_the_wheel(built):
    """scikit-build-core refuses others, and the package would be built without its kernels."""
    assert built("prepare_metadata_for_build_wheel('folder')") == ["scikit: metadata cp312"]
    (line,) = built("prepare_metadata_for_build_wheel('folder', {'wheel.cmake': 'false'})")
    assert line.strip() == "scikit: metadata"


def test_without_a_compiler_it_is_built_without_kernels(built):
    lines = built("build_wheel('folder', {'broken': True})")
    assert lines[1] == "CMake failed"
    assert "works without them, by slower operations" in lines[2]
    assert lines[3].strip() == "scikit: wheel false"


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
