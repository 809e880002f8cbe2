"""identify of a whole model, and of the gains of a checkpoint beside its config.json."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commands import rmsnorm
from safetensors.numpy import save_file

from rmsnorm.identify.config import identify_config
from rmsnorm.identify.weights import weigh
from rmsnorm.targets import open_target

PAGE = (Path(__file__).parents[2] / "docs" / "which.md").read_text(encoding="utf-8")
MODEL = """
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.proj = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, width)

class Model(nn.Module):
    def __init__(self, layers, width=8):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.final = nn.LayerNorm(width)

def make_model(layers):
    return Model(layers)

model = Model(3)
plain = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
"""


def shown_on_the_page(command: str) -> list[str]:
    """The lines below a command on the page, without its dots."""
    block = PAGE.partition(f"    $ {command}\n")[2].partition("\n\n")[0]
    return [line.removeprefix("    ") for line in block.splitlines() if line.strip() != "..."]


@pytest.mark.slow
def test_a_factory_of_a_model_is_asked_for_all_norms(tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
    (tmp_path / "my_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    command = ["identify", "my_model.py:make_model", "--init", "layers=2"]
    shown = rmsnorm(*command)
    assert (shown.exit_code, shown.stdout.splitlines()) == (0, shown_on_the_page(f"rmsnorm {' '.join(command)}"))
    refused = rmsnorm(*command, "--shape", "4x8", "--no-gradients")
    words = "--shape and --no-gradients is given for my_model.py:make_model, a whole model (Model), expected one norm"
    assert (refused.exit_code, words in " ".join(refused.stderr.split())) == (2, True)


def test_an_object_is_a_model_too_and_one_without_rmsnorm_is_status_1(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
    (tmp_path / "my_model.py").write_text(MODEL)
    document = json.loads(rmsnorm("identify", f"{tmp_path}/my_model.py:model", "--json").stdout)
    blocks, final = document["norms"]
    assert (document["model"], blocks["place"], blocks["class"]) == ("Model", "blocks.*.norm", "RMSNorm")
    assert (blocks["variant"], blocks["eps"], blocks["count"]) == ("torch", 1e-5, 3)
    assert blocks["names"] == [f"blocks.{i}.norm" for i in range(3)]
    assert (final["place"], final["variant"], final["why"]) == ("final", None, "it computes LayerNorm")
    assert rmsnorm("identify", f"{tmp_path}/my_model.py:plain").exit_code == 1


def test_only_a_model_is_told_from_a_norm():
    nn = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'").nn

    class GatedRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.proj = nn.RMSNorm(8), nn.Linear(8, 8)

    open_target(nn.Sequential(nn.RMSNorm(8), nn.Identity()))
    open_target(GatedRMSNorm())
    for model in (nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)), nn.Sequential(nn.RMSNorm(8), nn.RMSNorm(8))):
        with pytest.raises(
            ValueError, match=r"check: .*:Sequential is a whole model \(Sequential\), expected one norm"
        ):
            open_target(model, op="check")


def test_models_of_keras_and_flax_are_told_from_norms():
    keras = pytest.importorskip("keras", reason="keras is not installed; pip install '.[keras]'")
    dense, norm = keras.layers.Dense(8), keras.layers.RMSNormalization()
    with pytest.raises(ValueError, match="is a whole model"):
        open_target(keras.Sequential([dense, norm]))  # not built, so without any weights
    open_target(keras.layers.RMSNormalization())
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed; pip install '.[flax]'")
    layers = [nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.RMSNorm(8, rngs=nnx.Rngs(0))]
    with pytest.raises(ValueError, match="is a whole model"):
        open_target(nnx.Sequential(*layers))
    open_target(nnx.Sequential(layers[1]))


def folder(path: Path, model_type: str, gains: dict[str, float]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    save_file({name: np.full(64, gain, np.float32) for name, gain in gains.items()}, path / "model.safetensors")
    return path


def test_the_gains_contradict_the_config(tmp_path):
    """And the page shows it."""
    names = [f"model.layers.{i}.input_layernorm.weight" for i in range(2)]
    wrong = folder(tmp_path / "wrong", "gemma3_text", dict.fromkeys(names, 1.0))
    shown = rmsnorm("identify", "--model", str(wrong), "--weights")
    lines = shown_on_the_page("rmsnorm identify --model Gemma --weights")
    assert (shown.exit_code, shown.stdout.splitlines()[-len(lines) :]) == (1, lines)
    right = folder(tmp_path / "right", "gemma3_text", dict.fromkeys(names, 0.0))
    shown = rmsnorm("identify", "--model", str(right / "config.json"), "--weights", "--json")
    document = json.loads(shown.stdout)
    assert (shown.exit_code, document["warnings"], document["gains"][0]["agrees"]) == (0, [], True)
    assert "--model FOLDER --weights" in rmsnorm("identify", "torch.nn:RMSNorm", "--weights").stderr


def test_each_gain_is_compared_with_the_norm_of_its_name(tmp_path):
    """Qwen3-Next has norms of both sorts, and two that are called norm."""
    layer = "model.layers.0"
    gains = {f"{layer}.input_layernorm.weight": 0.0, f"{layer}.linear_attn.norm.weight": 1.0, "model.norm.weight": 1.0,
             "vision.norm.weight": 1.0, f"{layer}.self_attn.q_norm.weight": 0.5}  # fmt: skip
    path = folder(tmp_path / "a", "qwen3_next", gains)
    found = {entry.kind.name: entry.agrees for entry in weigh(path, identify_config(path)[0])}
    assert found == {
        "model.layers.*.input_layernorm.weight": True,
        "model.layers.*.linear_attn.norm.weight": True,
        "model.layers.*.self_attn.q_norm.weight": None,  # between both
        "model.norm.weight": False,
        "vision.norm.weight": None,  # config.json does not say it
    }
