"""Compiled code on disk: what a process runs is whole, and its own user's or root's. Nothing on disk stops a call."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")
from rmsnorm.cpu import cache

CODE = bytes(range(256)) * 40


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    return tmp_path / "rmsnorm"


def _belongs_to_another_user(path: Path, patch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        patch.setattr(os, "geteuid", lambda: 12345)


def _becomes_a_folder(path: Path, patch: pytest.MonkeyPatch) -> None:
    path.unlink()
    path.mkdir()


FAULTS: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "empty": lambda path, _: path.write_bytes(b""),
    "cut off": lambda path, _: path.write_bytes(path.read_bytes()[:-1]),
    "one bit": lambda path, _: path.write_bytes(path.read_bytes()[:-1] + b"\0"),
    "another user": _belongs_to_another_user,
    "writable by everybody": lambda path, _: path.chmod(0o666),
    "folder": _becomes_a_folder,
    "link to nothing": lambda path, _: (path.unlink(), path.symlink_to(path.parent / "nothing")),
}


@pytest.mark.skipif(sys.platform == "win32", reason="owners and modes of files are those of POSIX")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_cannot_be_trusted_is_not_read(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write("f", CODE)
    assert cache.read("f") == CODE
    assert cache.read("g") is None
    (path,) = folder.iterdir()
    FAULTS[fault](path, monkeypatch)
    assert cache.read("f") is None
    cache.write("f", CODE)
    monkeypatch.undo()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder.parent))
    assert cache.read("f") == (None if fault == "folder" else CODE)
    assert list(folder.iterdir()) == [path], "what could not be kept leaves nothing"


def test_every_user_may_read_and_nobody_else_write_whatever_the_umask(folder: Path) -> None:
    former = os.umask(0)
    try:
        cache.write("f", CODE)
    finally:
        os.umask(former)
    assert cache.read("f") == CODE


def test_a_full_disk(folder: Path) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(CODE) // 2, limits[1]))
    try:
        cache.write("f", CODE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert cache.read("f") is None
    assert list(folder.iterdir()) == []


def test_code_whose_dependencies_are_not_known_is_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, forget: Any
) -> None:
    """As in a bundle without the sources, or without the description of numba."""
    for name, value in (("__file__", str(folder / "bundle" / "cache.py")), ("version", _unknown)):
        with monkeypatch.context() as patch:
            patch.setattr(cache, name, value)
            forget(cache._state)
            forget(cache.sources)
            cache.write("f", CODE)
            assert cache.read("f") is None
    assert list(folder.iterdir()) == []


def _unknown(name: str) -> str:
    raise cache.PackageNotFoundError(name)


def test_many_write_and_read_at_once(folder: Path) -> None:
    codes, seen = [bytes([i]) * 300_000 for i in range(4)], set()
    cache.write("f", codes[0])

    def work(code: bytes) -> None:
        for _ in range(20):
            cache.write("f", code)
            seen.add(cache.read("f"))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, codes))
    assert seen <= set(codes)
    assert len(list(folder.iterdir())) == 1


@pytest.mark.slow
def test_what_the_first_calls_cost_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "cold_start.py"))
    script["main"](["--backend", "numpy", "--dtype", "float32"])
    line = capsys.readouterr().out.splitlines()[-1].split()
    assert [word for word in line if word.isidentifier()] == ["numpy", "float32", *script["PARTS"]]
    assert len([float(word) for word in line if not word.isidentifier()]) == 2 * len(script["PARTS"])
