"""The command line: what it prints, its files, its exit status, and what bad usage is told."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import compare
import pytest
import typer
from commands import command, rmsnorm

from rmsnorm import PRESETS, Variant, __version__, cpu
from rmsnorm.cli import app
from rmsnorm.files import replacing, write_text
from rmsnorm.parity import backends
from rmsnorm.parity.equations import candidate
from rmsnorm.specification.families import families

KERNEL = 0 if cpu.is_available() else 1
SELFTEST = ("selftest", "--backend", "numpy", "--variant", "mlx", "--dtype", "float32")


def test_help_begins_with_at_most_six_options_and_has_an_example_and_the_exit_status() -> None:
    groups, commands = [("rmsnorm", typer.main.get_command(app))], {}
    for name, one in groups:  # which grows
        groups += [(f"{name} {part}", inner) for part, inner in getattr(one, "commands", {}).items()]
        if not hasattr(one, "commands"):
            commands[name] = one
    assert len(commands) > 10
    for name, one in commands.items():
        plain = [parameter for parameter in one.params if parameter.param_type_name == "option"
                 and getattr(parameter, "rich_help_panel", "") is None]  # fmt: skip
        assert len(plain) <= 6, name
    for name in ("selftest", "check", "identify"):
        text = " ".join(rmsnorm(name, "--help").stdout.replace("│", " ").split())
        assert re.search(rf"rmsnorm {name} [-\w.]", text), name
        assert "Exit status: 0 " in text
    assert rmsnorm("--version").stdout.strip() == __version__


# What is typed, and what is said.

FILES = {
    "own.py": """
import numpy as np

def norm(x, weight):
    wide = x.astype(np.float64)
    normalised = (wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)
    y = normalised.astype(np.float64) * weight.astype(np.float64)
    return y.astype(x.dtype if weight.dtype == x.dtype else np.float32)

def same(x):
    return x
""",
    "own_layers.py": """
import torch

class Norm(torch.nn.Module):
    def __init__(self, secret, eps=1e-6, group=None):
        super().__init__()
        self.weight, self.eps, self.group = torch.nn.Parameter(torch.ones(secret)), eps, group

    def forward(self, x):
        h = x.float().unflatten(-1, (-1, self.group or x.shape[-1]))
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return h.flatten(-2).type_as(x) * self.weight

class WithoutGradient(Norm):
    def forward(self, x):
        return super().forward(x.detach()) + 0 * x

def first_axis(x):
    h = x.float()
    return (h * (h.square().mean(0, keepdim=True) + 1e-6).rsqrt()).type_as(x)
""",
}
DEVICE = "NumPy refused: numpy: device is 'cuda', expected 'cpu'"
COMMANDS = [  # what is typed, the exit status, and what is said; "compare" is a program in benchmarks/
    ("selftest --backend theano", 2, "backend is 'theano', expected 'torch', 'tf', 'keras', 'jax', 'flax' or 'numpy'"),
    ("selftest --variant lama", 2, "or 'x_transformers'; did you mean 'llama'?"),
    ("selftest --variant qwen3", 2,
     "a family of models, expected a name of a variant; its variant is llama, with eps 1e-06"),
    ("selftest --dtype float8", 2, "dtype is 'float8', expected 'float16', 'bfloat16', 'float32' or 'float64'"),
    ("selftest --backend numpy --device cuda", 2, DEVICE),
    ("selftest --frobnicate 1", 2, "No such option"),
    ("check", 2, "rmsnorm check: TARGET is missing, expected your own such as my_norm.py:norm; to compare the backends "
     "of this package, use `rmsnorm selftest`"),
    ("check x:y --dtype float8", 2, "check: dtype is 'float8', expected 'float16', 'bfloat16', 'float32' or 'float64'"),
    ("check x:y --variant lama", 2, "or 'x_transformers'; did you mean 'llama'?"),
    ("check x:y --quantity dw", 2, "quantities is 'dw', expected 'y', 'dx'"),
    ("check x:y --framework caffe", 2, "rmsnorm check: framework is 'caffe', expected 'torch'"),
    ("check no_such:norm", 2, "rmsnorm check: no_such cannot be imported (ModuleNotFoundError: No module named"),
    ("check x:y --init dim", 2, "rmsnorm check: init is 'dim', expected NAME=VALUE or a JSON object; write it as"),
    ("identify", 2, "got neither TARGET nor --model, expected one of them; name a callable"),
    ("identify torch.nn:RMSNor", 2, "torch.nn has no 'RMSNor'"),
    ("identify x:y --shape 4,64", 2, "shape is '4,64', expected sizes such as 4x64"),
    ("variants --json --markdown", 2, "--json and --markdown are given, expected one of them"),
    ("gains /no/such.npz", 2, "rmsnorm gains: /no/such.npz is missing, expected a .safetensors"),
    ("vectors /proc/no-such", 2, "/proc/no-such cannot be used, as the system says: No such file or directory"),
    ("explain numpy --shape 16777216x33554432", 2, "shape is '16777216x33554432', expected at most 2^48 elements"),
    ("compare --op recurrent", 2, "op is 'recurrent', expected 'fwd' or 'fwd+bwd'"),
    ("compare --threads 4096", 2, "threads is 4096, expected at most"),
    # a norm of a file
    ("check own:norm --variant llama --dtype bfloat16", 0, "own:norm is llama: all "),
    ("check own.py:norm --framework numpy --variant gemma", 1, "scale_offset is 0.0, gemma has 1.0"),
    ("check own:norm --variant mlx --eps 1e-6 --dtype float32", 0, "own:norm is mlx"),
    ("check own:norm --eps nan", 2, "rmsnorm check: "),
    ("check own:nothing", 2, "rmsnorm check: own has no 'nothing'; check the name"),
    ("check own:norm --variant llama --variant t5", 2, "--variant is given 2 times, expected one for a TARGET"),
    ("check own:norm --quantisation onnx", 2, "quantisation is 'onnx', expected"),
    *((f"check own:norm --quantisation onnx.qdq {option}", 2,
       f"{option.split()[0]} is for a norm, expected none beside --quantisation; drop it")
      for option in ("--eps 1e-5", "--extremes", "--quantity y", "--variant llama")),
    ("identify torch.nn:RMSNorm", 0, "torch.nn:RMSNorm is RMSNorm: the variant torch"),
    ("identify own_layers.py:first_axis --shape 64x3 --axis 0 --framework torch", 0,
     "is RMSNorm over axis 0 of 2 (not the last): the variant standard"),
    ("identify torch.nn:LayerNorm --json", 1, '"kind": "layernorm"'),
    ("identify own.py:same --time-limit inf --framework numpy", 1, "nothing is normalised"),
    *((f"identify {name}", 2, f"target is '{name}', expected module:attribute such as torch.nn:RMSNorm")
      for name in ("transformers.models.llama", "own.py")),
    # a class, which both open in the same way
    *((f"{command} own_layers.py:{words}", status, said)
      for command in ("check --variant llama --dtype float32", "identify")
      for words, status, said in (
          ("Norm", 2, f"rmsnorm {command.split()[0]}: "),
          ("Norm --init secret=64", 0, "own_layers.py:Norm is"),
          ("Norm --init secret=64 --init group=16 --group-size 16", 0, "own_layers.py:Norm is"),
          ("WithoutGradient --init secret=64 --no-gradients", 0, "own_layers.py:WithoutGradient is"),
          ("WithoutGradient --init secret=64", 1, "gradient"))),
    # which kernel runs
    ("explain numpy --with residual", KERNEL, "NumPy: "),
    ("explain flax --shape 4x6 --axis 0", 1, "the normalised axes are not the last ones"),
    ("explain numpy --with mask", 1, "the call has a mask"),
    ("explain numpy --axis 2", 2, "axis is 2"),
    ("explain numpy --with weights", 2, "with is 'weights'"),
]  # fmt: skip


@pytest.mark.usefixtures("few_circumstances")
@pytest.mark.parametrize(("line", "status", "words"), COMMANDS, ids=[line for line, *_ in COMMANDS])
def test_the_exit_status_and_what_is_said(
    line: str, status: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "torch" in line or "layers" in line:
        pytest.importorskip("torch")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    name, *arguments = line.split()
    done = command(*((compare.app,) if name == "compare" else (app, name)), *arguments, COLUMNS="300")
    assert done.exit_code == status, done.output
    assert words in " ".join(done.output.split())
    assert "Traceback" not in done.output
    if "--json" in arguments and status < 2:
        json.loads(done.stdout)


# Exit status.


def test_selftest_holds_and_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a disagreement exits with 1."""
    file, asked = tmp_path / "a.json", ("selftest", "--backend", "numpy", "--variant", "llama", "--dtype", "bfloat16")
    shown = rmsnorm(*asked, "--json", file)
    assert (shown.exit_code, "NumPy held: all" in shown.stdout) == (0, True), shown.stderr
    records = json.loads(file.read_text())["records"]
    assert {(r["backend"], r["variant"], r["dtype"]) for r in records} == {("numpy", "llama", "bfloat16")}
    wrong = {"inverse": lambda s, inverse: inverse * (1 + 1e-4)}
    monkeypatch.setattr(backends, "candidate", lambda data: candidate(data, wrong))
    shown = rmsnorm(*SELFTEST)
    assert shown.exit_code == 1, shown.stderr
    assert re.search(r"x numpy mlx f32 '[^']+' y: parity ratio", shown.stdout)
    assert "NumPy differs:" in shown.stdout


@pytest.mark.parametrize("name", ["check", "identify"])
def test_what_is_not_here_exits_with_2_and_a_mistake_of_ours_with_3(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library, a device of it, and an attribute of ours that is gone."""
    (tmp_path / "own.py").write_text(FILES["own.py"])
    (tmp_path / "of_jax.py").write_text("from jax import numpy as jnp\n\ndef norm(x):\n    return jnp.sqrt(x)\n")
    jax = sys.modules.get("jax") or pytest.importorskip("jax")
    if not any(device.platform == "gpu" for device in jax.devices()):
        shown = rmsnorm(name, f"{tmp_path / 'of_jax.py'}:norm", "--device", "cuda")
        assert (shown.exit_code, "device is 'cuda', expected 'cpu'" in shown.stderr) == (2, True)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch", None)
        shown = rmsnorm(name, f"{tmp_path / 'own.py'}:norm", "--framework", "torch")
        assert (shown.exit_code, "torch is not installed" in shown.stderr) == (2, True)
    monkeypatch.delattr("rmsnorm.targets.open.arguments_of")
    shown = rmsnorm(name, f"{tmp_path / 'own.py'}:norm")
    assert shown.exit_code == 3
    assert "this is a mistake of rmsnorm, not of its use" in shown.stderr


# Tables of variants.


def test_variants_are_listed_whole_in_80_columns() -> None:
    shown = rmsnorm("variants").stdout
    assert max(map(len, shown.splitlines())) <= 80
    entries = dict(zip(PRESETS, re.split("^(?:" + "|".join(PRESETS) + ") +", shown, flags=re.M)[1:], strict=True))
    for preset in PRESETS.values():
        entry = " ".join(entries[preset.name].split())
        assert [word in entry for word in ("; offset 1", "; bias yes", "; partial")] == [
            preset.scale_offset != 0, preset.bias, preset.partial_rounding == "floor"
        ]  # fmt: skip


@pytest.mark.parametrize("name", [*PRESETS, "qwen3", "Mamba2", "pixtral"])
def test_one_variant_is_shown_in_full(name: str) -> None:
    lines = rmsnorm("variants", name).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    of_variant = lines[lines.index("") :] if "" in lines else lines  # after the norms of a family
    labels = [line[2:16].strip() for line in of_variant if re.match("  [a-z]", line)]
    assert labels == ["equation", "eps", "place of eps", "rounded", "dtype of y", "gain", "bias",
                      "partial", "gate", "residual", "source", "families"]  # fmt: skip
    if name not in PRESETS:
        assert lines[0] == f"{name.lower()} is a family of models. Its norms in transformers:"
        text = " ".join(" ".join(lines).split())
        for norm in families()[name.lower()]:
            assert f"- {', '.join(norm.roles)}: {norm.computes}, eps {norm.eps:g} " in text


def test_variants_as_json_are_the_fields() -> None:
    rows = json.loads(rmsnorm("variants", "--json").stdout)
    assert [Variant.from_json(json.dumps({key: value for key, value in row.items() if key != "families"}))
            for row in rows] == list(PRESETS.values())  # fmt: skip
    one = json.loads(rmsnorm("variants", "gemma", "--json").stdout)
    assert one["scale_offset"] == 1
    assert {"gemma", "gemma2", "gemma3_text", "recurrent_gemma", "qwen3_next"} <= set(one["families"])
    assert not {"gemma3n_text", "llama"} & set(one["families"])


# Files and streams.


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


@pytest.mark.skipif(sys.platform == "win32", reason="files of POSIX")
def test_what_cannot_be_written_is_a_sentence_and_status_2() -> None:
    """A report is printed before its file: nothing is lost."""
    for file, reason in (("/dev/full", "No space left on device"),
                         ("/no/such/folder/x.json", "No such file or directory")):  # fmt: skip
        done = rmsnorm(*SELFTEST, "--json", file)
        assert (done.exit_code, "NumPy held: all" in done.stdout) == (2, True)
        assert done.stderr == f"rmsnorm: {file} cannot be used, as the system says: {reason}\n"
    program = [sys.executable, "-m", "rmsnorm"]
    with open("/dev/full", "w") as full:
        run = subprocess.run([*program, "variants"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert run.returncode == 2
    assert run.stderr == "rmsnorm: standard output cannot be used, as the system says: No space left on device\n"
    with subprocess.Popen([*program, *SELFTEST], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # as head -1 does
        assert process.stderr.read() == ""
    assert process.returncode == 1
