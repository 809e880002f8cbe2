"""identify --model: the norms that a config.json says, without weights, code of the model or a framework."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import rmsnorm

from rmsnorm.identify.config import identify_config
from rmsnorm.specification.families import families

ROOT = Path(__file__).parents[2]

QWEN_VISION = {"hidden_size": 1280, "model_type": "qwen2_5_vl", "depth": 32}
TEXT = {"hidden_size": 3584, "rms_norm_eps": 3e-4}
PARTS_OF_GEMMA = {"text_config": {"model_type": "gemma3_text", "rms_norm_eps": 3e-4},
                  "vision_config": {"model_type": "siglip_vision_model", "layer_norm_eps": 2e-4}}  # fmt: skip
LITE = {"kv_lora_rank": 512, "rms_norm_eps": 3e-4, "hidden_size": 2048}

# a file, and its norms: role -> (eps, path of eps in the file or where else it is from)
FILES: dict[str, tuple[dict[str, Any], dict[str, tuple[float, str]]]] = {
    "Qwen2.5-VL, saved again": (
        {"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text", **TEXT},
         "vision_config": QWEN_VISION, "rms_norm_eps": 1e-3},
        {"norm1": (1e-6, "code"), "norm2": (1e-6, "code"), "ln_q": (1e-6, "code"),
         "norm": (3e-4, "text_config.rms_norm_eps")},
    ),
    "LFM3": ({"model_type": "lfm3", "rms_norm_eps": 3e-4, "norm_eps": 1e-3},
             {"q_norm": (3e-4, "rms_norm_eps"), "embedding_norm": (3e-4, "rms_norm_eps")}),
    "DeepSeek-V2": ({"model_type": "deepseek_v2", **LITE, "q_lora_rank": 1536},
                    {"q_a_layernorm": (1e-6, "code"), "norm": (3e-4, "rms_norm_eps")}),
    "LLaMA of a family of one's own": (
        {"model_type": "ours", "architectures": ["OursForCausalLM", "LlamaForCausalLM"], "rms_norm_eps": 3e-4},
        {"norm": (3e-4, "rms_norm_eps")},
    ),
    "Gemma 3": (
        {"model_type": "gemma3", **PARTS_OF_GEMMA},
        {"q_norm": (3e-4, "text_config.rms_norm_eps"), "mm_soft_emb_norm": (2e-4, "vision_config.layer_norm_eps")},
    ),
    "LLaVA, whose text has no model_type": (
        {"model_type": "llava", "text_config": {"rms_norm_eps": 3e-4},
         "vision_config": {"model_type": "siglip_vision_model"}},
        {"norm": (3e-4, "text_config.rms_norm_eps")},
    ),
}  # fmt: skip


def write(path, config):
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def eps_of(path) -> dict[str, list[tuple[float, str]]]:
    found: dict[str, list[tuple[float, str]]] = {}
    for row in identify_config(path)[0]:
        for role in row.norm.roles:
            found.setdefault(role, []).append((row.norm.eps, row.norm.field or row.origin))
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_published_file(name, tmp_path):
    config, wanted = FILES[name]
    found = eps_of(write(tmp_path, config))
    assert {role: found.get(role) for role in wanted} == {role: [eps] for role, eps in wanted.items()}


@pytest.mark.parametrize(
    ("config", "role"),
    [
        ({"model_type": "deepseek_v3", **LITE, "q_lora_rank": None}, "q_a_layernorm"),
        ({"model_type": "lfm3", "use_sandwich_norm": False}, "post_ffn_norm"),
    ],
)
def test_an_option_takes_norms_away(config, role, tmp_path):
    assert role not in eps_of(write(tmp_path, config))
    assert {row.options for row in families()["deepseek_v3"]} == {(), (("q_lora_rank", True, True),)}


def test_parts_are_followed(tmp_path):
    """A part that the model does not read says nothing, one that has no RMSNorm is named, and one may be another's."""
    parts = {"vision_config": {"model_type": "qwen3_vl"}, "draft_config": {"model_type": "llama", "rms_norm_eps": 1e-3}}
    norms, unknown = identify_config(write(tmp_path, {"model_type": "qwen3_vl", **parts}))
    assert ({row.part for row in norms}, unknown) == ({""}, {"vision_config": "qwen3_vl_vision"})
    norms, unknown = identify_config(write(tmp_path, {"model_type": "gemma3", **PARTS_OF_GEMMA}))
    assert ({row.part for row in norms}, unknown) == ({""}, {"vision_config": "siglip_vision_model"})
    norms, _ = identify_config(write(tmp_path, {"model_type": "my_model", **PARTS_OF_GEMMA}))
    assert {(row.part, row.model_type) for row in norms} == {("text_config", "gemma3_text")}
    parts = {"text_config": {"model_type": "deepseek_v3", "rms_norm_eps": 3e-4}}
    norms, _ = identify_config(write(tmp_path, {"model_type": "mistral3", **parts}))
    assert "DeepseekV3RMSNorm" in {row.norm.norm for row in norms}
    assert "MistralRMSNorm" not in {row.norm.norm for row in norms}
    norms, unknown = identify_config(write(tmp_path, {"model_type": "qwen3_next"}))
    assert ({row.origin for row in norms}, unknown) == ({"default"}, {})
    assert {row.norm.variant for row in norms} == {"apex", "gemma"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"architectures": ["OursForCausalLM"]}', r"no family has the architectures \['OursForCausalLM'\]"),
        ('{"architectures": "LlamaForCausalLM"}', r"architectures is 'LlamaForCausalLM' \(str\), expected a list"),
        (
            '{"model_type": "hunyuan_vl", "vision_config": {"layer_norm_eps": -1}}',
            r"vision_config\.layer_norm_eps is -1",
        ),
        ("model", "config.json is not JSON"),
        ('{"model_type": 3}', r"model_type is 3 \(int\), expected a name"),
        ("{}", "model_type is None, expected one of the"),
        ('{"model_type": "qwen3_nxt"}', "expected one of the .* for its norms .names like it: qwen3_next, "),
        ('{"model_type": "llama", "rms_norm_eps": true}', r"rms_norm_eps is True \(bool\), expected a number"),
        ('{"model_type": "llama", "rms_norm_eps": NaN}', "rms_norm_eps is nan, expected a finite number >= 0"),
        ('{"model_type": "llama", "rms_norm_eps": 1' + "0" * 400 + "}", "expected a finite number >= 0"),
        ('{"text_config":' * 100_000, "is not JSON .nested too deep|is not JSON"),
    ],
)
def test_what_cannot_be_told_is_said(text, error, tmp_path):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises((TypeError, ValueError), match=f"^identify: .*{error}"):
        identify_config(tmp_path)


def check(model: Any, path: Any) -> None:
    """Each norm that is said is in the model with that eps, and none is left out."""
    names = [(type(module).__name__, name.split("."), module) for name, module in model.named_modules()]
    rows = [row.norm for row in identify_config(path)[0]]
    assert rows
    seen = set()
    for row in rows:
        for role in row.roles:
            end = role.split(".")
            same = [
                (kind, name, module)
                for kind, name, module in names
                if kind == row.norm and [part for part in name if not part.isdecimal()][-len(end) :] == end
            ]
            assert same, f"{role} ({row.norm}) is not in the model"
            eps = {getattr(m, "variance_epsilon", getattr(m, "eps", row.eps)) for _, _, m in same}
            assert row.eps is None or row.eps in eps, (role, row.eps, eps)
            seen |= {".".join(name) for _, name, _ in same}
    kinds = {row.norm for row in rows}
    left = {".".join(name) for kind, name, _ in names if kind in kinds} - seen
    assert not left, f"not said: {sorted(left)[:8]}"


def program() -> Any:
    spec = importlib.util.spec_from_file_location("families_program", ROOT / "tools" / "families.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(families()))
def test_a_model_that_is_saved_says_its_norms(name, tmp_path):
    """A small model of each family, with an eps of its own in each field, and the file that it saves."""
    pytest.importorskip("transformers")
    model = program().build(name, "meta")
    model.config.to_json_file(tmp_path / "config.json", use_diff=False)
    check(model, tmp_path)


def test_the_command_prints_lines_of_80_columns_or_json(tmp_path):
    shown = rmsnorm("identify", "--model", str(write(tmp_path, {"model_type": "deepseek_v3", "rms_norm_eps": 1e-5})))
    assert (shown.exit_code, max(map(len, shown.stdout.splitlines())) <= 80) == (0, True)
    page = (ROOT / "docs" / "variants.md").read_text(encoding="utf-8")
    lines = [line.strip() for line in page.partition("$ rmsnorm identify --model")[2].splitlines()[1:7]]
    assert {line for line in lines if line != "..."} <= {line.strip() for line in shown.stdout.splitlines()}
    shown = rmsnorm("identify", "--model", str(tmp_path / "config.json"), "--json")
    first = json.loads(shown.stdout)["norms"][0]
    assert (first["roles"], first["eps"], first["eps_origin"]) == (["q_a_layernorm"], 1e-6, "code")
    both = ["torch.nn:RMSNorm", "--model", str(tmp_path)]
    for arguments, got in (([], "neither TARGET nor --model"), (both, "both TARGET and --model")):
        shown = rmsnorm("identify", *arguments)
        words = f"got {got}, expected one of them" in " ".join(shown.stderr.split())
        assert (shown.exit_code, words) == (2, True)


def test_a_missing_or_huge_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing, expected the config\.json of a model"):
        identify_config(tmp_path)
    with (tmp_path / "config.json").open("wb") as file:
        file.write(b"{")
        file.seek(2**28)
        file.write(b"}")
    with pytest.raises(ValueError, match=r"expected the config\.json of a model"):
        identify_config(tmp_path)


def test_no_framework_is_loaded(tmp_path):
    code = (
        "import sys; from rmsnorm.identify.config import identify_config; identify_config(sys.argv[1]); "
        "assert not {'torch', 'transformers', 'jax', 'tensorflow'} & set(sys.modules)"
    )
    path = write(tmp_path, {"model_type": "llama", "auto_map": {"AutoConfig": "evil.Config"}})
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)
