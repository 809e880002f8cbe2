"""The example in C reads golden vectors, judges its kernel, and refuses what it cannot read."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from commands import rmsnorm

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "examples" / "rms_norm.c"


@pytest.fixture(scope="module")
def compiler():
    path = shutil.which(os.environ.get("CC", "cc"))
    if path is None:
        pytest.skip("no C compiler is installed")
    return path


def test_the_example_in_c(compiler, tmp_path):
    """Runs the commands of its first comment; then the same with its deliberate mistake."""
    assert len(SOURCE.read_text().splitlines()) <= 100
    folder, program = tmp_path / "vectors", tmp_path / "rms_norm"
    flags = ["--quantity", "y", "--quantity", "dx", "--quantity", "dscale"]
    done = rmsnorm("vectors", "write", folder, "--variant", "gemma", "--dtype", "float32", *flags)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("7 cases, 0.3 MB in ")
    (folder / "outputs").mkdir()
    for define, status, words in ((), 0, "vectors held: all 20 comparisons of 7 cases"), (
        ("-DEPS_OUTSIDE",), 1, "x vectors gemma f32 'rows' y: parity ratio"
    ):  # fmt: skip
        strict = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror"]
        subprocess.run([compiler, *strict, *define, "-o", program, SOURCE, "-lm"], check=True, timeout=60)
        subprocess.run([program, *sorted(folder.glob("gemma.*.safetensors"))], check=True, timeout=60)
        done = rmsnorm("vectors", "check", folder, "--json", tmp_path / "parity.json")
        assert done.exit_code == status, done.stdout + done.stderr
        assert words in done.stdout
        assert ('"passed": false' in (tmp_path / "parity.json").read_text()) == bool(status)


def test_the_example_in_c_refuses_what_it_cannot_read(compiler, tmp_path):
    program = tmp_path / "rms_norm"
    subprocess.run([compiler, "-o", program, SOURCE, "-lm"], check=True, timeout=60)
    cut = tmp_path / "cut.safetensors"
    for content, words in ((b"\x00\x10\x00\x00\x00\x00\x00\x00{}", "cut off"), (b"\x08", "cannot be read"),
                           (b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ", "not in the metadata: n")):  # fmt: skip
        cut.write_bytes(content)
        done = subprocess.run([program, cut], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert words in done.stderr
