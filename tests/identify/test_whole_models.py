"""identify of a whole model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import rmsnorm

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
