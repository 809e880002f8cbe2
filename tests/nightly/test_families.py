"""families.json is what `replace` says of small models of transformers' families."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = "deepseek_v3 gemma3n_text gemma4_text kimi_linear llama4_text minimax nemotron_h olmo2 qwen3_next"


@pytest.mark.parametrize("name", NAMES.split())
def test_the_table_of_families_is_what_small_models_have(name):
    transformers = pytest.importorskip("transformers")
    document = json.loads((ROOT / "rmsnorm" / "specification" / "families.json").read_text(encoding="utf-8"))
    if document["transformers"] != transformers.__version__:
        pytest.skip(f"the table is of transformers {document['transformers']}")
    spec = importlib.util.spec_from_file_location("families_program", ROOT / "tools" / "families.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    assert program.ask(name) == document["families"][name]
