"""Bad usage of every command and program ends with status 2 and a sentence that says what is valid; help teaches."""

from __future__ import annotations

from typing import Any

import compare
import pytest
from commands import command
from timing.backends import BACKENDS

from rmsnorm import __version__
from rmsnorm.cli import app

# what is typed, where DIR is an empty folder, and what is said; "compare" is a program in benchmarks/
USAGE = [
    ("selftest --backend theano", "backend is 'theano', expected 'torch', 'tf', 'keras', 'jax', 'flax' or 'numpy'"),
    ("selftest --variant lama", "or 'x_transformers'; did you mean 'llama'?"),
    (
        "selftest --variant qwen3",
        "a family of models, expected a name of a variant; its variant is llama, with eps 1e-06",
    ),
    ("selftest --dtype float8", "dtype is 'float8', expected 'float16', 'bfloat16', 'float32' or 'float64'"),
    ("selftest --device tpu", "device is 'tpu', expected 'cpu' or 'cuda'"),
    ("selftest --backend numpy --device cuda", "NumPy refused: numpy: device is 'cuda', expected 'cpu'"),
    ("selftest --frobnicate 1", "No such option"),
    (
        "check",
        "rmsnorm check: TARGET is missing, expected your own such as my_norm.py:norm; to compare the backends of "
        "this package, use `rmsnorm selftest`",
    ),
    ("check x:y --framework caffe", "rmsnorm check: framework is 'caffe', expected 'torch'"),
    (
        "check no_such:norm",
        "rmsnorm check: no_such cannot be imported (ModuleNotFoundError: No module named 'no_such')",
    ),
    ("check x:y --device tpu", "rmsnorm check: device is 'tpu', expected 'cpu' or 'cuda'"),
    ("check --every", "No such option"),
    ("identify no_such:norm", "rmsnorm identify: no_such cannot be imported ("),
    ("variants --json --markdown", "--json and --markdown are given, expected one of them"),
    ("identify torch.nn:RMSNor", "torch.nn has no 'RMSNor'"),
    (
        "identify x:y --init {",
        "rmsnorm identify: init is '{', expected NAME=VALUE or a JSON object; write it as dim=64",
    ),
    ("check x:y --init dim", "rmsnorm check: init is 'dim', expected NAME=VALUE or a JSON object; write it as dim=64"),
    ("identify", "got neither TARGET nor --model, expected one of them; name a callable"),
    ("identify no_such_package", "rmsnorm identify: target is 'no_such_package', expected module:attribute"),
    ("gains /no/such.npz", "rmsnorm gains: /no/such.npz is missing, expected a .safetensors"),
    ("identify x:y --framework caffe", "framework is 'caffe', expected 'torch'"),
    ("identify x:y --shape 4,64", "shape is '4,64', expected sizes such as 4x64"),
    ("vectors /proc/no-such", "/proc/no-such cannot be used, as the system says: No such file or directory"),
    ("compare --backend theano", "backend is 'theano', expected 'torch', 'tf', 'keras', 'jax', 'flax', 'numpy',"),
    ("compare --op recurrent", "op is 'recurrent', expected 'fwd' or 'fwd+bwd'"),
    ("compare --shape 4096,4096", "shape is '4096,4096', expected sizes > 0; write it as 4096x4096"),
    ("compare --shape 0x8", "shape is '0x8', expected sizes > 0"),
    ("compare --dtype float64", "dtype is 'float64', expected 'float16', 'bfloat16' or 'float32'"),
    ("compare --variant lama", "variant is 'lama', expected 'standard', 'paper',"),
    ("compare --device tpu", "device is 'tpu', expected 'cpu' or 'cuda'"),
    ("compare --backend numpy --device cuda", "NumPy refused: numpy: device is 'cuda', expected 'cpu'"),
    ("compare --threads 4096", "threads is 4096, expected at most"),
    ("compare --threads 0", "Invalid value for '--threads'"),
    ("compare --seconds -1", "Invalid value for '--seconds'"),
    ("compare --frobnicate 1", "No such option"),
    ("explain numpy --shape 16777216x33554432", "shape is '16777216x33554432', expected at most 2^48 elements"),
    ("explain numpy --shape 8388608x16777216 --dtype float64", "there is too little memory (Unable to allocate"),
]
HELP = {
    "selftest": (
        "--backend --variant --dtype --device --json --all",
        "rmsnorm selftest --backend torch --variant llama --dtype bfloat16", "Exit status: 0 everything agrees",
    ),
    "check": (
        "--variant --eps --dtype --init --framework --group-size --compiled --no-gradients --device --json "
        "--extremes --batch-invariant --large",
        "rmsnorm check my_norm:norm --variant llama", "Exit status: 0 everything agrees", "rmsnorm selftest",
    ),
    "identify": (
        "--init --framework --group-size --compiled --no-gradients --device --axis --width --shape --time-limit",
        "rmsnorm identify torch.nn:RMSNorm", "Exit status: 0 an RMSNorm",
    ),
    "compare": (
        "--backend --op --shape --dtype --variant --device --seconds --threads --no-compile --json --summary --plot",
        *BACKENDS, "How to read a row",
        "python benchmarks/compare.py --backend torch --shape 512x768 --dtype float32", "Exit status: 0 all timed",
    ),
}  # fmt: skip


def typed(line: str, **places: Any) -> Any:
    program, *arguments = (str(places.get(word, word)) for word in line.split())
    if program == "compare":
        return command(compare.app, *arguments, COLUMNS="300")
    return command(app, program, *arguments, COLUMNS="300")


@pytest.mark.parametrize(("line", "words"), USAGE)
def test_bad_usage_exits_with_2_and_says_what_is_valid(line: str, words: str, tmp_path: Any) -> None:
    if "torch.nn" in line:
        pytest.importorskip("torch")
    done = typed(line, DIR=tmp_path)
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
    assert "Traceback" not in done.output


@pytest.mark.parametrize("program", HELP)
def test_help_teaches(program: str) -> None:
    shown = typed(f"{program} --help")
    assert shown.exit_code == 0
    text = " ".join(shown.stdout.replace("│", " ").split())
    for words in HELP[program]:
        for part in words.split() if words.startswith("--") else [words]:
            assert part in text


def test_the_version_is_printed() -> None:
    assert typed("--version").stdout.strip() == __version__
