"""identify --model: the norms that a config.json says, without weights, code of the model or a framework."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import rmsnorm

from rmsnorm.identify.config import identify_config

ROOT = Path(__file__).parents[2]

TEXT = {"hidden_size": 3584, "rms_norm_eps": 3e-4}
VISION = {"model_type": "siglip_vision_model"}
PARTS_OF_GEMMA = {"text_config": {"model_type": "gemma3_text", "rms_norm_eps": 3e-4},
                  "vision_config": {**VISION, "layer_norm_eps": 2e-4}}  # fmt: skip
LITE = {"kv_lora_rank": 512, "rms_norm_eps": 3e-4, "hidden_size": 2048}

# a file, and its norms: role -> (eps, path of eps in the file or where else it is from), or None for no such norm
FILES: dict[str, tuple[dict[str, Any], dict[str, tuple[float, str] | None]]] = {
    "Qwen2.5-VL, saved again": (
        {"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text", **TEXT},
         "vision_config": {"hidden_size": 1280, "model_type": "qwen2_5_vl", "depth": 32}, "rms_norm_eps": 1e-3},
        {"norm1": (1e-6, "code"), "norm2": (1e-6, "code"), "ln_q": (1e-6, "code"),
         "norm": (3e-4, "text_config.rms_norm_eps")},
    ),
    "LFM3": ({"model_type": "lfm3", "rms_norm_eps": 3e-4, "norm_eps": 1e-3},
             {"q_norm": (3e-4, "rms_norm_eps"), "embedding_norm": (3e-4, "rms_norm_eps")}),
    "LFM3 without some norms": ({"model_type": "lfm3", "use_sandwich_norm": False}, {"post_ffn_norm": None}),
    "DeepSeek-V2": ({"model_type": "deepseek_v2", **LITE, "q_lora_rank": 1536},
                    {"q_a_layernorm": (1e-6, "code"), "norm": (3e-4, "rms_norm_eps")}),
    "DeepSeek-V3 without some norms": ({"model_type": "deepseek_v3", **LITE, "q_lora_rank": None},
                                       {"q_a_layernorm": None}),
    "LLaMA of a family of one's own": (
        {"model_type": "ours", "architectures": ["OursForCausalLM", "LlamaForCausalLM"], "rms_norm_eps": 3e-4},
        {"norm": (3e-4, "rms_norm_eps")},
    ),
    "Gemma 3": (
        {"model_type": "gemma3", **PARTS_OF_GEMMA},
        {"q_norm": (3e-4, "text_config.rms_norm_eps"), "mm_soft_emb_norm": (2e-4, "vision_config.layer_norm_eps")},
    ),
    "LLaVA, whose text has no model_type": (
        {"model_type": "llava", "text_config": {"rms_norm_eps": 3e-4}, "vision_config": VISION},
        {"norm": (3e-4, "text_config.rms_norm_eps")},
    ),
}  # fmt: skip


def write(path: Path, config: Any) -> Path:
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", FILES)
def test_a_published_file(name: str, tmp_path: Path) -> None:
    config, wanted = FILES[name]
    found: dict[str, list[tuple[float, str]]] = {}
    for row in identify_config(write(tmp_path, config))[0]:
        for role in row.norm.roles:
            found.setdefault(role, []).append((row.norm.eps, row.norm.field or row.origin))
    assert {role: found.get(role) for role in wanted} == {role: eps and [eps] for role, eps in wanted.items()}


@pytest.mark.parametrize(
    ("config", "parts", "norms", "unknown"),
    [
        # a part that the model does not read says nothing, and one that has no RMSNorm is named
        ({"model_type": "qwen3_vl", "vision_config": {"model_type": "qwen3_vl"},
          "draft_config": {"model_type": "llama", "rms_norm_eps": 1e-3}}, {""}, set(),
         {"vision_config": "qwen3_vl_vision"}),
        ({"model_type": "gemma3", **PARTS_OF_GEMMA}, {""}, set(), {"vision_config": "siglip_vision_model"}),
        ({"model_type": "my_model", **PARTS_OF_GEMMA}, {"text_config"}, set(), None),
        # a part may be of another family
        ({"model_type": "mistral3", "text_config": {"model_type": "deepseek_v3", "rms_norm_eps": 3e-4}}, None,
         {"DeepseekV3RMSNorm"}, None),
        ({"model_type": "qwen3_next"}, {""}, {"Qwen3NextRMSNorm", "Qwen3NextRMSNormGated"}, {}),
    ],
    ids=["unread", "no RMSNorm", "no family", "another family", "defaults"],
)  # fmt: skip
def test_parts_are_followed(config: Any, parts: Any, norms: set[str], unknown: Any, tmp_path: Path) -> None:
    rows, others = identify_config(write(tmp_path, config))
    assert parts is None or {row.part for row in rows} == parts
    assert norms <= {row.norm.norm for row in rows}
    assert "MistralRMSNorm" not in {row.norm.norm for row in rows}
    assert unknown is None or others == unknown
    assert len(config) > 1 or {row.origin for row in rows} == {"default"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, r"config\.json is missing, expected the config\.json of a model"),
        (b"{" + bytes(2**28) + b"}", r"expected the config\.json of a model"),
        ('{"architectures": ["OursForCausalLM"]}', r"no family has the architectures \['OursForCausalLM'\]"),
        ('{"architectures": "LlamaForCausalLM"}', r"architectures is 'LlamaForCausalLM' \(str\), expected a list"),
        ('{"model_type": "hunyuan_vl", "vision_config": {"layer_norm_eps": -1}}', r"layer_norm_eps is -1"),
        ("model", "config.json is not JSON"),
        ('{"model_type": 3}', r"model_type is 3 \(int\), expected a name"),
        ("{}", "model_type is None, expected one of the"),
        ('{"model_type": "qwen3_nxt"}', "expected one of the .* for its norms .names like it: qwen3_next, "),
        ('{"model_type": "llama", "rms_norm_eps": true}', r"rms_norm_eps is True \(bool\), expected a number"),
        ('{"model_type": "llama", "rms_norm_eps": NaN}', "rms_norm_eps is nan, expected a finite number >= 0"),
        ('{"model_type": "llama", "rms_norm_eps": 1' + "0" * 400 + "}", "expected a finite number >= 0"),
        ('{"text_config":' * 100_000, "is not JSON .nested too deep|is not JSON"),
    ],
    ids=range(13),
)  # fmt: skip
def test_what_cannot_be_told_is_said(text: Any, error: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises((TypeError, ValueError, FileNotFoundError), match=f"^identify: .*{error}"):
        identify_config(tmp_path)


def test_the_command_prints_what_its_page_shows_or_json(tmp_path: Path) -> None:
    shown = rmsnorm("identify", "--model", str(write(tmp_path, {"model_type": "deepseek_v3", "rms_norm_eps": 1e-5})))
    assert (shown.exit_code, max(map(len, shown.stdout.splitlines())) <= 80) == (0, True)
    page = (ROOT / "docs" / "variants.md").read_text(encoding="utf-8")
    lines = [line.strip() for line in page.partition("$ rmsnorm identify --model")[2].splitlines()[1:7]]
    assert {line for line in lines if line != "..."} <= {line.strip() for line in shown.stdout.splitlines()}
    shown = rmsnorm("identify", "--model", str(tmp_path / "config.json"), "--json")
    first = json.loads(shown.stdout)["norms"][0]
    assert (first["roles"], first["eps"], first["eps_origin"]) == (["q_a_layernorm"], 1e-6, "code")
    shown = rmsnorm("identify", "torch.nn:RMSNorm", "--model", tmp_path)
    assert shown.exit_code == 2
    assert "got both TARGET and --model, expected one of them" in " ".join(shown.stderr.split())


def test_no_framework_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from rmsnorm.identify.config import identify_config; identify_config(sys.argv[1]); "
        "assert not {'torch', 'transformers', 'jax', 'tensorflow'} & set(sys.modules)"
    )
    path = write(tmp_path, {"model_type": "llama", "auto_map": {"AutoConfig": "evil.Config"}})
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)
