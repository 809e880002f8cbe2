"""However a command ends: no process of it stays, and nothing unfinished is left."""

from __future__ import annotations

import os
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
    assert out == ""
    assert errors.startswith("asking hangs.py:norm: ")
    assert errors.count("\n") == 1


def test_a_full_disk(tmp_path: Path) -> None:
    """A sentence and status 2, whichever output it is."""
    with open("/dev/full", "w") as full:
        run = subprocess.run([*COMMAND, "variants"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert run.returncode == 2
    assert run.stderr == ("rmsnorm: standard output cannot be used, as the system says: No space left on device\n")


@pytest.mark.parametrize(
    ("file", "reason"),
    [("/dev/full", "No space left on device"), ("/no/such/folder/x.json", "No such file or directory")],
)
def test_a_report_that_cannot_be_written(file: str, reason: str) -> None:
    """It is printed before: nothing is lost."""
    done = rmsnorm("selftest", "--backend", "numpy", "--variant", "mlx", "--dtype", "float32", "--json", file)
    assert done.exit_code == 2
    assert "NumPy held: all" in done.stdout
    assert done.stderr == f"rmsnorm: {file} cannot be used, as the system says: {reason}\n"


def test_who_reads_no_more_than_the_first_line_sees_no_error() -> None:
    """As ``| head -1``."""
    arguments = ["selftest", "--backend", "numpy", "--variant", "mlx", "--dtype", "float32"]
    with started(Path(), *arguments) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


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
    from rmsnorm.parity import static, vectors

    def full(document: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(static, "VARIANTS", ("mlx",))
    monkeypatch.setattr(static, "TYPES", ("bfloat16",))
    monkeypatch.setattr(vectors, "flat", full)
    for folder in (tmp_path / "new", tmp_path):
        run = rmsnorm("vectors", folder)
        assert run.exit_code == 2, run.output
        assert "No space left on device" in run.output
        assert not list(tmp_path.iterdir())


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
