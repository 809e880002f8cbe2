"""However a command ends: no process of it stays, and nothing unfinished is left."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import rmsnorm

from rmsnorm.files import replacing, write_text

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
COMMAND = [sys.executable, "-m", "rmsnorm"]
HANGS = (
    "import os, time\n\ndef norm(x):\n    open('pid', 'w').write(str(os.getpid()))\n    time.sleep(100)\n    return x\n"
)


def started(folder: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, **options,
    )  # fmt: skip


def waited(condition: Any, seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"not in {seconds} s")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # ended, and nobody has asked for its status


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_identify(tmp_path: Path, number: int) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    process = started(tmp_path, "identify", "hangs.py:norm", "--framework", "numpy", "--time-limit", "90")
    pid = tmp_path / "pid"
    worker = int(waited(lambda: pid.exists() and pid.read_text()))
    assert worker != process.pid
    assert is_alive(worker)
    process.send_signal(number)
    out, errors = process.communicate(timeout=30)
    waited(lambda: not is_alive(worker), 10)
    assert (out, errors) == ("", "")


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "missing" / "a.json")
    for name, reason in (("link.json", "No such file or directory"), ("x" * 250 + ".json", "File name too long")):
        done = rmsnorm("selftest", "--backend", "numpy", "--json", tmp_path / name)
        assert done.exit_code == 2
        assert f"cannot be used, as the system says: {reason}" in " ".join(done.stderr.split())
        assert not done.stdout


def test_a_full_disk(tmp_path: Path) -> None:
    """A sentence and status 2, whichever output it is."""
    with open("/dev/full", "w") as full:
        run = subprocess.run([*COMMAND, "variants"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert run.returncode == 2
    assert run.stderr == ("rmsnorm: standard output cannot be used, as the system says: No space left on device\n")
    arguments = ["selftest", "--backend", "numpy", "--variant", "mlx", "--dtype", "float32", "--json", "/dev/full"]
    run = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert "/dev/full cannot be used, as the system says: No space left on device" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "report.json"

    def fail(error: BaseException) -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(SystemExit):
        fail(SystemExit(143))
    assert not list(tmp_path.iterdir())
    path.write_text("old")
    with pytest.raises(OSError, match="No space") as raised:
        fail(OSError(28, "No space left on device", "temporary"))
    assert raised.value.filename == str(path)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]
    (tmp_path / "link").symlink_to(path)
    write_text(tmp_path / "link", "new")
    assert path.read_text() == "new"
    assert (tmp_path / "link").is_symlink()


def test_vectors_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rmsnorm.parity import vectors

    def full(tensors: Any, metadata: Any) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(vectors, "serialized", full)
    for folder in (tmp_path / "new", tmp_path):
        run = rmsnorm("vectors", "write", folder, "--variant", "mlx")
        assert run.exit_code == 2, run.output
        assert not list(tmp_path.iterdir())


MANIFESTS: list[Any] = [
    [], 5, {"files": 5}, {"files": [5]}, {"files": [{}]},
    {"files": [{"file": "../x.safetensors", "sha256": "", "metadata": {"variant": "", "dtype": "", "case": ""}}]},
    {"files": [{"file": "x.safetensors", "sha256": 5, "metadata": {"variant": "", "dtype": "", "case": ""}}]},
    {"files": [{"file": "x.safetensors", "sha256": "", "metadata": {"variant": 5, "dtype": "", "case": ""}}]},
    {"files": [{"file": "x.safetensors", "sha256": "", "metadata": []}]},
]  # fmt: skip


@pytest.mark.parametrize("document", MANIFESTS, ids=range(len(MANIFESTS)))
def test_manifests_that_are_none(tmp_path: Path, document: Any) -> None:
    from rmsnorm.parity import vectors

    if isinstance(document, dict):
        digest = vectors.digest_of(document["files"])
        document = {"kind": vectors._KIND, "format": vectors.FORMAT, "digest": digest, **document}
    (tmp_path / "manifest.json").write_text(json.dumps(document))
    run = rmsnorm("vectors", "check", tmp_path)
    assert run.exit_code == 2, run.output
    assert "expected" in run.output
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    assert rmsnorm("vectors", "check", tmp_path).exit_code == 2


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_may_be_closed(closed: str) -> None:
    """Its number would go to the next file that is opened, which would then get what is printed."""
    line = [*map(shlex.quote, COMMAND), "variants", "gemma"]
    done = subprocess.run(["sh", "-c", f"{' '.join(line)} {closed}"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("gemma" in done.stdout) == (">&-" not in closed.replace("2>&-", ""))


def test_onnx_files_that_are_none(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from rmsnorm.targets.onnx import open_onnx
    from rmsnorm.targets.target import NoTarget

    path, random = tmp_path / "model.onnx", np.random.default_rng(0)
    x, y = (onnx.helper.make_tensor_value_info(name, 1, [None, 8]) for name in "xy")
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    graphs = [onnx.helper.make_graph(nodes, "g", *ends) for nodes, ends in (([node], ([], [y])), ([], ([x], [])))]
    contents = [b"", b"text", *(onnx.helper.make_model(graph).SerializeToString() for graph in graphs)]
    whole = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [x], [y])).SerializeToString()
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(NoTarget, match=r"model.onnx is no ONNX model"):
            open_onnx(path)
    for _ in range(200):
        flipped = bytearray(whole)
        for place in random.integers(0, len(whole), 3):
            flipped[place] ^= 1 << random.integers(8)
        path.write_bytes(flipped)
        try:
            open_onnx(path)
        except NoTarget as error:
            assert len(str(error).splitlines()) == 1, error  # noqa: PT017
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(NoTarget):
        open_onnx(path)
