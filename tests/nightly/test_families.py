"""families.json is what `replace` says of small models of transformers' families."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from rmsnorm.identify.config import identify_config
from rmsnorm.specification.families import families

ROOT = Path(__file__).parents[2]
NAMES = "deepseek_v3 gemma3n_text gemma4_text kimi_linear llama4_text minimax nemotron_h olmo2 qwen3_next"


def program():
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("families_program", ROOT / "tools" / "families.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES.split())
def test_the_table_of_families_is_what_small_models_have(name):
    transformers = pytest.importorskip("transformers")
    document = json.loads((ROOT / "rmsnorm" / "specification" / "families.json").read_text(encoding="utf-8"))
    if document["transformers"] != transformers.__version__:
        pytest.skip(f"the table is of transformers {document['transformers']}")
    assert program().ask(name) == document["families"][name]


@pytest.mark.parametrize("name", sorted(families()))
def test_the_file_that_a_model_saves_says_its_norms(name, tmp_path):
    """Each norm that is said is in the model with that eps, another one in each field, and none is left out."""
    model = program().build(name, "meta")
    model.config.to_json_file(tmp_path / "config.json", use_diff=False)
    modules = {}
    for path, module in model.named_modules():
        place = (type(module).__name__, *(part for part in path.split(".") if not part.isdecimal()))
        modules.setdefault(place, []).append(module)
    norms = [row.norm for row in identify_config(tmp_path)[0]]
    assert norms
    said = set()
    for norm in norms:
        for role in norm.roles:
            end = tuple(role.split("."))
            same = {place for place in modules if place[0] == norm.norm and place[-len(end) :] == end}
            eps = {
                getattr(m, "variance_epsilon", getattr(m, "eps", norm.eps)) for place in same for m in modules[place]
            }
            assert same, role
            assert norm.eps is None or norm.eps in eps, (role, norm.eps, eps)
            said |= same
    assert said == {place for place in modules if place[0] in {norm.norm for norm in norms}}
