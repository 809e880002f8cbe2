"""identify: names, axes and arguments, JSON, the short report, whole models, and the pages that show it."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import zoo
import zoo_torch as layers
from commands import rmsnorm
from zoo_torch import torch

from rmsnorm import PRESETS
from rmsnorm.identify import identify
from rmsnorm.identify.names import described
from rmsnorm.targets import open_target

ROOT = Path(__file__).parents[2]
nn = torch.nn


def test_presets_with_the_same_numbers_are_one_with_several_names() -> None:
    identity = identify(zoo.standard, framework="numpy")
    assert identity.headline.endswith("is RMSNorm: the variant standard")
    assert [row.word for row in identity.rows if row.name == "also known as"] == ["gemma4, olmo2, keras"]
    assert "also known as" in identity.text
    assert described(PRESETS["torch"].replace(partial=0.25, eps=1e-5), {"partial": 0.25}).endswith("partial is 1/4")


def test_shape_axis_and_options_are_as_asked() -> None:
    with pytest.raises(ValueError, match="requires 'condition', whose value cannot be guessed"):
        identify(layers.channels)
    identity = identify(
        layers.channels, framework="torch", shape=(4, 64, 3, 2), axis=1, init={"condition": torch.zeros(1)}
    )
    assert "is RMSNorm over axis 1 of 4 (not the last): the variant standard" in identity.headline
    assert identity.recognised
    over = {axis: identity.is_over(axis) for axis in (None, 1, -3, (1,), 2, (1, 2))}
    assert {axis for axis, holds in over.items() if holds} == {1, -3, (1,)}


def test_an_identity_is_written_as_json() -> None:
    identity = identify(layers.AllInT)
    data = json.loads(json.dumps(identity.json))
    assert data["variant"] == json.loads(identity.variant.json)
    assert {finding["name"] for finding in data["findings"]} == {finding.name for finding in identity.findings}
    assert (data["kind"], data["recognised"]) == (identity.kind, identity.recognised)


def test_the_short_report_has_the_defects_first_and_fits_into_80_columns(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import numpy as np\n\ndef norm(x, weight):\n"
        "    rho = np.sqrt((x * x).sum(-1, keepdims=True) / max(1, x.shape[-1] - 1))\n"
        "    return (x / rho * weight).astype(x.dtype)\n"
    )
    command = ("identify", f"{tmp_path}/own.py:norm", "--framework", "numpy")
    lines = rmsnorm(*command).stdout.splitlines()
    assert lines[1] == "defect: the sum of squares is divided by n - 1 = 63"
    assert lines[2].startswith("to make it ")
    assert "divide the sum of squares by n" in lines[2]
    assert max(map(len, lines[1:])) <= 80
    assert len(lines) <= 3 + 1 + 2 + 8 + 1  # and the rest of the advice, a header, eight findings, and the last line
    assert ("widths" in rmsnorm(*command, "-v").stdout, "widths" in "\n".join(lines)) == (True, False)


# Whole models.

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


def test_a_whole_model_is_asked_for_all_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A factory as docs/variants.md shows it, an object, and one without RMSNorm, which is status 1."""
    (tmp_path / "my_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    command = ["identify", "my_model.py:make_model", "--init", "layers=2"]
    page = (ROOT / "docs" / "variants.md").read_text(encoding="utf-8")
    block = page.partition(f"    $ rmsnorm {' '.join(command)}\n")[2].partition("\n\n")[0]
    shown = rmsnorm(*command)
    wanted = [line.removeprefix("    ") for line in block.splitlines() if line.strip() != "..."]
    assert (shown.exit_code, shown.stdout.splitlines()) == (0, wanted)
    refused = rmsnorm(*command, "--shape", "4x8", "--no-gradients")
    words = "--shape and --no-gradients is given for my_model.py:make_model, a whole model (Model), expected one norm"
    assert (refused.exit_code, words in " ".join(refused.stderr.split())) == (2, True)
    document = json.loads(rmsnorm("identify", "my_model.py:model", "--json").stdout)
    blocks, final = document["norms"]
    assert (document["model"], blocks["place"], blocks["class"]) == ("Model", "blocks.*.norm", "RMSNorm")
    assert (blocks["variant"], blocks["eps"], blocks["count"]) == ("torch", 1e-5, 3)
    assert blocks["names"] == [f"blocks.{i}.norm" for i in range(3)]
    assert (final["place"], final["variant"], final["why"]) == ("final", None, "it computes LayerNorm")
    assert rmsnorm("identify", "my_model.py:plain").exit_code == 1


class GatedRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj = nn.RMSNorm(8), nn.Linear(8, 8)


def norms_and_models(framework: str) -> Any:
    if framework == "torch":
        norms = [nn.Sequential(nn.RMSNorm(8), nn.Identity()), GatedRMSNorm()]
        return norms, [nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)), nn.Sequential(nn.RMSNorm(8), nn.RMSNorm(8))]
    if framework == "keras":
        keras = pytest.importorskip("keras", reason="keras is not installed; pip install '.[keras]'")
        norm = keras.layers.RMSNormalization()
        return [norm], [keras.Sequential([keras.layers.Dense(8), norm])]  # not built, so without any weights
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed; pip install '.[flax]'")
    linear, norm = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.RMSNorm(8, rngs=nnx.Rngs(0))
    return [nnx.Sequential(norm)], [nnx.Sequential(linear, norm)]


@pytest.mark.parametrize("name", ["torch", "keras", "flax"])
def test_only_a_model_is_told_from_a_norm(name: str) -> None:
    norms, models = norms_and_models(name)
    for norm in norms:
        open_target(norm)
    for model in models:
        with pytest.raises(ValueError, match=r"check: .* is a whole model \(\w+\), expected one norm"):
            open_target(model, op="check")


# The pages.

PAGE = (ROOT / "docs" / "identify.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
SNIPPET = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)


@pytest.mark.parametrize(
    "section", [text for text in SECTIONS[1:] if "```python" in text], ids=lambda section: section.splitlines()[0]
)
def test_a_section_of_the_page_prints_what_it_says(section: str, capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, Any] = {"__name__": "page"}
    for package in ("torch", "transformers", "flax", "keras"):
        if package in section + SECTIONS[0] and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    for code, printed in [*SNIPPET.findall(SECTIONS[0]), *SNIPPET.findall(section)]:
        exec(compile(code, "docs/identify.md", "exec"), space)
        assert capsys.readouterr().out == printed or not printed
