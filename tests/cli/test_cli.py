"""The command line: what it prints, its files and its exit status."""

import json
import re
import sys

import pytest
import typer
from commands import rmsnorm

from rmsnorm import PRESETS, Variant
from rmsnorm.cli import app, tables
from rmsnorm.numpy_impl.paper import derivation
from rmsnorm.specification.families import families


def _commands(command, name="rmsnorm"):
    if not hasattr(command, "commands"):
        yield name, command
    for part, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, f"{name} {part}")


def test_help_begins_with_at_most_six_options():
    counts = {
        name: sum(getattr(parameter, "rich_help_panel", "") is None for parameter in command.params
                  if parameter.param_type_name == "option")
        for name, command in _commands(typer.main.get_command(app))
    }  # fmt: skip
    assert len(counts) > 10
    assert {name: count for name, count in counts.items() if count > 6} == {}


def test_selftest_holds_and_writes_its_report(tmp_path):
    file = tmp_path / "parity.json"
    shown = rmsnorm("selftest", "--backend", "numpy", "--variant", "llama", "--dtype", "bfloat16", "--json", file)
    assert shown.exit_code == 0, shown.stderr
    assert "NumPy held: all" in shown.stdout
    records = json.loads(file.read_text())["records"]
    assert {(r["backend"], r["variant"], r["dtype"]) for r in records} == {("numpy", "llama", "bfloat16")}


@pytest.mark.flax
@pytest.mark.parametrize("command", ["check", "identify"])
def test_a_device_that_the_library_of_a_target_lacks_exits_with_2(command, tmp_path):
    jax = pytest.importorskip("jax")
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("there is one")
    (tmp_path / "own.py").write_text("from jax import numpy as jnp\n\ndef norm(x):\n    return jnp.sqrt(x)\n")
    shown = rmsnorm(command, f"{tmp_path / 'own.py'}:norm", "--device", "cuda")
    assert shown.exit_code == 2
    assert "device is 'cuda', expected 'cpu'" in shown.stderr


def test_a_library_of_a_target_that_is_not_installed_exits_with_2(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("def norm(x):\n    return x\n")
    monkeypatch.setitem(sys.modules, "torch", None)
    shown = rmsnorm("identify", f"{tmp_path / 'own.py'}:norm", "--framework", "torch")
    assert shown.exit_code == 2
    assert "torch is not installed" in shown.stderr


@pytest.mark.parametrize("command", ["check", "identify"])
def test_a_mistake_of_ours_is_no_bad_usage(command, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("def norm(x):\n    return x\n")
    monkeypatch.delattr("rmsnorm.targets.open.arguments_of")
    shown = rmsnorm(command, f"{tmp_path / 'own.py'}:norm")
    assert shown.exit_code == 3
    assert "this is a mistake of rmsnorm, not of its use" in shown.stderr


def test_a_disagreement_exits_with_1(monkeypatch):
    true = derivation.Row.__init__

    def wrong(row, *args, **options):
        true(row, *args, **options)
        row.rho *= 1 + 1e-4

    monkeypatch.setattr(derivation.Row, "__init__", wrong)
    shown = rmsnorm("selftest", "--backend", "numpy", "--variant", "t5", "--dtype", "float32")
    assert shown.exit_code == 1, shown.stderr
    assert "x numpy t5 f32 'rows' y: parity ratio" in shown.stdout
    assert "NumPy differs:" in shown.stdout


def test_variants_are_listed_whole_in_80_columns():
    shown = rmsnorm("variants").stdout
    assert max(map(len, shown.splitlines())) <= 80
    entries = dict(zip(PRESETS, re.split("^(?:" + "|".join(PRESETS) + ") +", shown, flags=re.M)[1:], strict=True))
    for preset in PRESETS.values():
        columns = [cell.replace("`", "") for cell in tables._describe(preset)]
        entry = " ".join(entries[preset.name].split())
        assert all(cell in entry for cell in (columns[1].replace(",", ""), columns[2], *columns[6:])), entry
        assert [word in entry for word in ("; offset 1", "; bias yes", "; partial")] == [
            preset.scale_offset != 0, preset.bias, preset.partial_rounding == "floor"
        ]  # fmt: skip


@pytest.mark.parametrize("name", [*PRESETS, "qwen3", "Mamba2", "pixtral"])
def test_one_variant_is_shown_in_full(name):
    lines = rmsnorm("variants", name).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    of_variant = lines[lines.index("") :] if "" in lines else lines  # after the norms of a family
    labels = [line[2:16].strip() for line in of_variant if re.match("  [a-z]", line)]
    assert labels == ["equation", "eps", "place of eps", "rounded", "dtype of y", "gain", "bias",
                      "partial", "gate", "residual", "source", "families"]  # fmt: skip
    family = families().get(name.lower())
    if family is not None and name not in PRESETS:
        assert lines[0] == f"{name.lower()} is a family of models. Its norms in transformers:"
        assert {norm.variant for norm in family} <= set(lines)
        text = " ".join(" ".join(lines).split())
        assert all(f"- {', '.join(norm.roles)}: {norm.computes}, eps {norm.eps:g} " in text for norm in family)


def test_variants_as_json_are_the_fields():
    rows = json.loads(rmsnorm("variants", "--json").stdout)
    assert [Variant.from_json(json.dumps({key: value for key, value in row.items() if key != "families"}))
            for row in rows] == list(PRESETS.values())  # fmt: skip
    one = json.loads(rmsnorm("variants", "gemma", "--json").stdout)
    assert one["scale_offset"] == 1
    assert {"gemma", "gemma2", "gemma3_text", "recurrent_gemma", "qwen3_next"} <= set(one["families"])
    assert not {"gemma3n_text", "llama"} & set(one["families"])
