"""identify --model: the norms that a config.json says, without weights, code of the model or a framework."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import rmsnorm

from rmsnorm.identify.config import identify_config


def folder(path, **config):
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def eps_of(norms):
    return {role: (row.norm.eps, row.origin) for row in norms for role in row.norm.roles}


def test_eps_is_that_of_the_file_but_where_the_code_has_one(tmp_path):
    norms, unknown = identify_config(folder(tmp_path, model_type="deepseek_v3", rms_norm_eps=3e-4))
    eps = eps_of(norms)
    assert (eps["q_a_layernorm"], eps["kv_a_layernorm"]) == ((1e-6, "code"), (1e-6, "code"))
    assert (eps["input_layernorm"], unknown) == ((3e-4, "file"), {})
    norms, _ = identify_config(folder(tmp_path, model_type="qwen3_next"))
    assert {row.origin for row in norms} == {"default"}
    assert {row.norm.variant for row in norms} == {"apex", "gemma"}


def test_parts_are_followed(tmp_path):
    """Those of the family that was asked, another one in their place, and those of an unknown whole."""
    parts = {"text_config": {"model_type": "gemma3_text", "rms_norm_eps": 3e-4},
             "vision_config": {"model_type": "siglip_vision_model", "layer_norm_eps": 2e-4}}  # fmt: skip
    norms, unknown = identify_config(folder(tmp_path, model_type="gemma3", **parts))
    assert [eps_of(norms)[role][0] for role in ("q_norm", "mm_soft_emb_norm")] == [3e-4, 2e-4]
    assert ({row.part for row in norms}, unknown) == ({""}, {"vision_config": "siglip_vision_model"})
    norms, unknown = identify_config(folder(tmp_path, model_type="my_model", **parts))
    assert {(row.part, row.model_type) for row in norms} == {("text_config", "gemma3_text")}
    parts = {"text_config": {"model_type": "deepseek_v3", "rms_norm_eps": 3e-4}}
    norms, _ = identify_config(folder(tmp_path, model_type="mistral3", **parts))
    assert "DeepseekV3RMSNorm" in {row.norm.norm for row in norms}
    assert "MistralRMSNorm" not in {row.norm.norm for row in norms}


def test_the_command_prints_lines_of_80_columns_or_json(tmp_path):
    shown = rmsnorm("identify", "--model", str(folder(tmp_path, model_type="deepseek_v3", rms_norm_eps=1e-5)))
    assert (shown.exit_code, max(map(len, shown.stdout.splitlines())) <= 80) == (0, True)
    page = (Path(__file__).parents[2] / "docs" / "which.md").read_text(encoding="utf-8")
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


def test_an_unknown_model_is_said_and_what_to_do(tmp_path):
    shown = rmsnorm("identify", "--model", str(folder(tmp_path, model_type="qwen3_nxt")))
    text = " ".join(shown.stderr.split())
    assert shown.exit_code == 2
    assert "model_type is 'qwen3_nxt', expected one of the " in text
    assert "replace(model, dry_run=True) for its norms (names like it: qwen3_next, " in text


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("model", "config.json is not JSON"),
        ("[1]", r"config.json is \[1\] \(list\), expected an object"),
        ('{"model_type": 3}', r"model_type is 3 \(int\), expected a name"),
        ("{}", "model_type is None, expected one of the"),
        ('{"model_type": "llama", "rms_norm_eps": "1e-5"}', r"rms_norm_eps is '1e-5' \(str\), expected a number"),
        ('{"model_type": "llama", "rms_norm_eps": true}', r"rms_norm_eps is True \(bool\), expected a number"),
        ('{"model_type": "llama", "rms_norm_eps": -1e-5}', "rms_norm_eps is -1e-05, expected a finite number >= 0"),
        ('{"model_type": "llama", "rms_norm_eps": NaN}', "rms_norm_eps is nan, expected a finite number >= 0"),
        ('{"model_type": "llama", "rms_norm_eps": 1' + "0" * 400 + "}", "expected a finite number >= 0"),
        ('{"text_config":' * 100_000, "is not JSON .nested too deep|is not JSON"),
    ],
)
def test_hostile_files(text, error, tmp_path):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises((TypeError, ValueError), match=f"^identify: .*{error}"):
        identify_config(tmp_path)


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
    path = folder(tmp_path, model_type="llama", auto_map={"AutoConfig": "evil.Config"})
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)
