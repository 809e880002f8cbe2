"""The library of kernels: made of some functions, it serves a process without numba; others are plain operations."""

from __future__ import annotations

import json
import shutil

import pytest
from programs import finished

from rmsnorm.cpu import build, target

pytest.importorskip("numba")

LEVEL = next(iter(target.levels()), None)
needs_level = pytest.mark.skipif(LEVEL is None or not shutil.which("cc"), reason="no level, or no linker")

CALLS = """
import importlib.util, json, sys, warnings

class Missing:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("numba", "llvmlite"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

find_spec = importlib.util.find_spec
sys.meta_path.insert(0, Missing)
importlib.util.find_spec = lambda name, *package: None if name == "numba" else find_spec(name, *package)
import numpy as np
from rmsnorm import cpu
from rmsnorm.numpy_impl import fast, rms_norm, rms_norm_vjp
random = np.random.default_rng(0)
said, results = [], {}
for dtype in ("float32", "float16"):
    x, dy, gain = (random.normal(size=shape).astype(dtype) for shape in ((6, 33), (6, 33), 33))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = fast.rms_norm(x, gain), *fast.rms_norm_vjp(dy, x, gain)[:2]
        fast.rms_norm(x, gain)
    want = rms_norm(x, gain), *rms_norm_vjp(dy, x, gain)[:2]
    said.append([str(warning.message) for warning in caught])
    results[dtype] = all(map(np.array_equal, got, want)), cpu.has_formats(dtype, dtype, None, None)
print(json.dumps([said, results, sorted(name for name in sys.modules if name in ("numba", "llvmlite"))]))
"""

ONLY = (
    "tasks-run", "tasks-compute", "tasks-work", "parameters-float32", "parameters-float16",
    "forward-float32-float32--", "backward-float32-float32--", "cancelled-float32-float32",
)  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    build.build(LEVEL, folder, ONLY)
    return folder


def called(folder):
    done = finished("-c", CALLS, timeout=120, RMSNORM_CPU_LIBRARY=str(folder))
    assert done.returncode == 0, done.stderr
    return *json.loads(done.stdout), done.stderr


@needs_level
def test_a_library_serves_without_numba_and_what_it_lacks_is_said_once(library):
    said, results, loaded, _ = called(library)
    assert said[0] == []
    (sentence,) = said[1]
    assert "slower code with the same results from float16 to float16, as the wheel has no such kernel" in sentence
    assert "pip install '.[jit]'" in sentence
    assert results == {"float32": [True, True], "float16": [True, False]}
    assert loaded == []


@needs_level
def test_a_library_of_other_sources_is_not_used(library, tmp_path):
    """Its kernels could differ from what the sources say. Likewise a file that is no library."""
    (file,) = library.iterdir()
    content = file.read_bytes()
    assert content.count(b"rmsnorm_of_") == 1
    for name, other in (("other", content.replace(b"rmsnorm_of_", b"rmsnorm_no_")), ("text", b"no library")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / file.name).write_bytes(other)
        _, results, _, said = called(folder)
        reason = (
            f"this processor (only for {LEVEL}, of another machine or of other sources), and numba is not installed"
        )
        assert f"there is no library of kernels for {reason}" in said
        assert results == {"float32": [True, False], "float16": [True, False]}


def test_names_of_functions_are_checked(tmp_path):
    with pytest.raises(ValueError, match="build: only is 'forward-float8', expected"):
        build.build("x86-64-v3", tmp_path, ["forward-float8"])
    assert not list(tmp_path.iterdir())


def test_every_function_has_one_name_and_all_options():
    names = [build.name_of(*row) for row in build.functions()]
    assert len(set(names)) == len(names)
    options = {name.split("-", 5)[-1] for name in names if name.startswith("forward-bfloat16-bfloat16-bfloat16")}
    assert len(options) >= 6
