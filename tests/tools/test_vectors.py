"""Static vectors: vectors/ is what the command writes, and readers without this package judge kernels by it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import rmsnorm

from rmsnorm import Variant
from rmsnorm.parity import static, vectors

ROOT = Path(__file__).parents[2]
VECTORS, EXAMPLES, PAGE = ROOT / "vectors", ROOT / "examples" / "vectors", ROOT / "docs" / "checking.md"
FILES = sorted(path.name for path in VECTORS.glob("*.json") if path.name.count(".") > 1)
F32 = np.float32


def document(name):
    return json.loads((VECTORS / name).read_text(encoding="utf-8"))


def array(entry, name, dtype=None):
    """The numbers of an array, by the public definition of the file."""
    dtype = np.dtype(dtype or entry["dtype"])
    return np.array([int(word, 16) for word in entry[name].split()], f"u{dtype.itemsize}").view(dtype)


# The folder.


def test_the_folder_has_the_files_of_its_manifest_in_two_megabytes():
    manifest = document("manifest.json")
    assert len(FILES) == 18
    names = {entry["file"]: entry for entry in manifest["files"]}
    on_disk = {path.name: path for path in VECTORS.iterdir()}
    assert names.keys() == on_disk.keys() - {"manifest.json"}
    for name, entry in names.items():
        assert hashlib.sha256(on_disk[name].read_bytes()).hexdigest() == entry["sha256"], name
        if name in FILES:
            assert document(name)["numberOfTests"] == len(document(name)["tests"]) == entry["numberOfTests"]
    assert sum(document(name)["numberOfTests"] for name in FILES) == manifest["numberOfTests"]
    assert sum(path.stat().st_size for path in on_disk.values()) < 2.2e6


@pytest.mark.parametrize("is_full", [True, False])
def test_the_command_writes_a_folder_which_is_whole_or_not_there(is_full, tmp_path, monkeypatch):
    def full(document):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(static, "VARIANTS", ("onnx",))
    monkeypatch.setattr(static, "TYPES", ("bfloat16",))
    folder = tmp_path / "vectors"
    if is_full:
        monkeypatch.setattr(vectors, "flat", full)
    for target in (folder, tmp_path) if is_full else (folder,):
        done = rmsnorm("vectors", target)
        said = "No space left on device" if is_full else "15 tests, 0.1 MB in "
        assert (done.exit_code, said in done.output) == (2 * is_full, True), done.output
    if is_full:
        assert not list(tmp_path.iterdir())
        return
    names = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
    assert names == {name: (VECTORS / name).read_bytes() for name in names}
    assert len(names) == 3
    with pytest.raises(ValueError, match=r"folder is '.*vectors', expected an empty one; empty it first"):
        vectors.write(folder)


@pytest.mark.parametrize("name", [f"{v}.{t}" for v in static.VARIANTS for t in static.TYPES])
def test_a_file_is_what_the_command_writes(name):
    again = static.document_of(*name.split("."))
    assert (VECTORS / f"{name}.json").read_text("utf-8") == json.dumps(again, indent=1) + "\n", "write vectors/ again"
    assert (VECTORS / f"{name}.txt").read_text("utf-8") == vectors.flat(again)


def test_the_schema_accepts_every_file_and_refuses_others():
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    schema = document("schema.json")
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for name in FILES:
        validator.validate(document(name))
    changes = [("format", 2), ("numberOfTests", 0), ("more", 1), ("tests", []), ("dtype", "float64"),
               ("notes", {"Usual": "no such flag"}), ("tests.0.eps", "1e-6"), ("tests.0.inputs.x.bits", "3F80"),
               ("tests.0.outputs.y.block", 2)]  # fmt: skip
    for path, value in changes:
        place = changed = document("llama.bfloat16.json")
        *keys, last = path.split(".")
        for key in keys:
            place = place[int(key) if key.isdecimal() else key]
        place[last] = value
        assert not validator.is_valid(changed), path


# The numbers.


@pytest.mark.parametrize("name", FILES)
def test_the_right_number_is_in_its_interval_which_is_narrow(name):
    is_wide = []
    for test in document(name)["tests"]:
        for quantity, entry in test["outputs"].items():
            dtype = F32 if entry["block"] > 1 else None  # of a block there are bounds of its sum alone
            low, high = (array(entry, end, dtype).astype(np.float64) for end in ("lo", "hi"))
            value = low if dtype else array(entry, "bits").astype(np.float64)
            is_nan = np.isnan(value)
            assert np.array_equal(is_nan, np.isnan(low)), (test["comment"], quantity)
            assert np.array_equal(is_nan, np.isnan(high)), (test["comment"], quantity)
            assert np.all(is_nan | ((low <= value) & (value <= high))), (test["comment"], quantity)
            if not dtype and quantity == "y" and entry["dtype"] != "float32" and test["flags"] != ["Tie"]:
                is_wide += (low != high)[~is_nan].tolist()
    # 1/rho errs by (64/2 + 9) 2^-24 at most, to both sides, and borders are 2^-11 apart or more: one element in 100.
    assert not is_wide or np.mean(is_wide) < 0.01


# The readers, in a folder that has nothing of this package.

STRICT = ["-O2", "-Wall", "-Wextra", "-Werror"]
LANGUAGES = {
    "C": ("cc", ["-std=c99", *STRICT, "-o", "c", "kernel.c", "-lm"], ["./c"], "txt"),
    "C in float32": ("cc", ["-std=c99", *STRICT, "-DSTATISTIC=float", "-o", "f", "kernel.c", "-lm"], ["./f"], "txt"),
    "C++": ("c++", ["-std=c++17", *STRICT, "-o", "cpp", "kernel.cpp"], ["./cpp"], "txt"),
    "Rust": ("rustc", ["-O", "-D", "warnings", "-o", "rs", "kernel.rs"], ["./rs"], "txt"),
    "JavaScript": ("node", [], ["node", "kernel.mjs"], "json"),
    "Python": (sys.executable, [], [sys.executable, "-S", "-E", "kernel.py"], "json"),
}  # fmt: skip
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The readers and the vectors, what was compiled of them, and what the reader before saw."""
    copy = tmp_path_factory.mktemp("adopter")
    for path in EXAMPLES.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    shutil.copytree(VECTORS, copy / "vectors")
    return copy


def reader(language, folder):
    """What calls the program that judges, which is compiled once, and the kind of file that it reads."""
    compiler, arguments, command, kind = LANGUAGES[language]
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    if arguments and not (folder / arguments[arguments.index("-o") + 1]).exists():
        subprocess.run([compiler, *arguments], cwd=folder, env=ENVIRONMENT, check=True, timeout=120)

    def judged(*words):
        typed = [*command, *map(str, words)]
        done = subprocess.run(typed, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout.splitlines(), done.stderr

    return judged, kind


def files_of(variants, kind):
    return [f"vectors/{variant}.{dtype}.{kind}" for variant in variants for dtype in static.TYPES]


READERS = [name for name in LANGUAGES if name != "C in float32"]


@pytest.mark.parametrize("language", READERS)
def test_a_reader_judges_a_right_and_a_wrong_kernel(language, folder):
    """And every reader sees the same mistakes."""
    judged, kind = reader(language, folder)
    few = ("llama", "gemma") if language == "Python" else static.VARIANTS
    status, lines, text = judged("right", *files_of(few, kind))
    assert (status, lines) == (0, [])
    assert re.fullmatch(rf"{44 * len(few)} tests, [1-9]\d+ outputs judged, 0 wrong\n", text)
    status, lines, text = judged("wrong", *files_of(("llama", "gemma"), kind))
    assert status == 1
    assert text.endswith(f"outputs judged, {len(lines)} wrong\n")
    assert {"llama.bfloat16 1 Ordinary y", "llama.float16 1 Ordinary y", "gemma.float32 1 Ordinary y"} <= {*lines}
    assert all(re.fullmatch(r"\w+\.\w+ \d+ \w+ (y|dx|dscale|inverse_rms|h)", line) for line in lines)
    forward = sorted(line for line in lines if line.endswith((" y", " inverse_rms")))
    assert len(forward) > 20
    seen = folder / "seen.json"
    if not seen.exists():
        seen.write_text(json.dumps(forward), "utf-8")
    assert forward == json.loads(seen.read_text("utf-8")), "as the reader before saw them"


@pytest.mark.parametrize("language", READERS)
def test_what_cannot_be_judged_has_status_2_and_a_sentence(language, folder, tmp_path):
    judged, kind = reader(language, folder)
    good = VECTORS / f"llama.float32.{kind}"
    whole = good.read_text("utf-8")
    texts = {
        "cut": whole[:5000], "renamed": whole.replace("inverse_rms", "inverse"), "empty": "",
        "other": whole.replace("vectors 1", "vectors 2").replace('"format": 1', '"format": 2'),
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / f"{name}.{kind}").write_text(text, "utf-8")
    asked = [("right", tmp_path / f"{name}.{kind}") for name in (*texts, "missing")]
    for arguments in ((), ("right",), ("rihgt", good), *asked):
        status, lines, text = judged(*arguments)
        assert (status, lines, text.count("\n")) == (2, [], 1), (arguments, text)
        assert "renamed" not in str(arguments) or "has no inverse_rms" in text
        assert "rihgt" not in arguments or "usage: " in text


def test_a_statistic_in_float32_fails_only_where_squares_overflow(folder):
    """One square after the other, in float32: the intervals allow any order. Each line is expected by the adopter."""
    judged, kind = reader("C in float32", folder)
    status, lines, _ = judged("right", *files_of(static.VARIANTS, kind))
    assert status == 1
    assert {line.split()[2] for line in lines} == {"LargeValues"}
    assert {line.split(".")[1].split()[0] for line in lines} == {"bfloat16", "float32"}


# The page.


def test_the_commands_of_the_page_run(tmp_path):
    """Those that judge, one after the other, in a folder with the two folders that the page takes."""
    if shutil.which("cc") is None:
        pytest.skip("cc is not installed")
    shutil.copytree(VECTORS, tmp_path / "rmsnorm" / "vectors")
    shutil.copytree(EXAMPLES, tmp_path / "rmsnorm" / "examples" / "vectors")
    page = PAGE.read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "git " not in block]
    assert len(blocks) >= 2
    for block in blocks:
        done = subprocess.run(
            ["sh", "-e", "-c", block], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, block + done.stdout + done.stderr
    expected = (tmp_path / "xfail.txt").read_text()
    assert f"```text\n{expected}```" in page


def test_the_hash_of_the_page_is_that_of_the_files():
    (snippet,) = re.findall(r"```python\n(def hashed.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names = {}
    exec(snippet, names)
    test = next(test for test in document("standard.bfloat16.json")["tests"] if test["flags"] == ["WideRows"])
    x = test["inputs"]["x"]
    data = static.data_of(static.TESTS[test["id"] - 1], test["id"], Variant.get("standard"), "bfloat16")
    numbers = [names["hashed"](x["seed"], i, 8, x["exponent"]) for i in range(data.x.size)]
    assert numbers == data.x.astype(float).ravel().tolist()
