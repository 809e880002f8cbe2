"""replace: the RMSNorm modules of transformers' models become ours; the models say the same, and learn the same."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch_arrays import randn  # noqa: E402
from torch_layers import ulp_bound  # noqa: E402

import rmsnorm  # noqa: E402
from rmsnorm.conversion import replace  # noqa: E402

Replaced = importlib.import_module("rmsnorm.conversion.replacement.change").Replaced

ROOT = Path(__file__).parents[2]
WIDTH = 32
SIZES = {
    "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
# configuration, model, its arguments, and its norms: variant and number
MODELS: dict[str, tuple[str, str, dict[str, Any], str, int]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"rms_norm_eps": 1e-5}, "llama", 5),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {}, "gemma", 5),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}, "llama", 9),  # 64 norms in 4 groups are like 9 in 2
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {"eos_token_id": 1}, "standard", 9),
    "t5": ("T5Config", "T5ForConditionalGeneration",
           {"vocab_size": 64, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
            "dropout_rate": 0.0}, "t5", 12),
}  # fmt: skip


def build(name: str) -> Any:
    """A tiny model from its configuration, with gains and other weights that show."""
    transformers = pytest.importorskip("transformers")
    config, cls, options, _, _ = MODELS[name]
    sizes = {} if name == "t5" else SIZES
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**{**sizes, **options}))
    for i, parameter in enumerate(model.parameters()):
        if parameter.ndim == 1:
            parameter.data.add_(0.3 * randn(*parameter.shape, seed=i))
    return model.train()


def tokens(seed: int = 0) -> Any:
    return torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(seed))


def outputs(model: Any, ids: Any) -> Any:
    more = {"decoder_input_ids": ids.roll(1, 1)} if hasattr(model, "encoder") else {}
    return model(input_ids=ids, labels=ids, **more)


def norms_of(model: Any) -> list[Any]:
    return [layer for layer in model.modules() if "Norm" in type(layer).__name__]


def as_far_as_rounding_goes(model: Any, measure: Callable[[Any], Any]) -> Any:
    """How far a measure of a model moves when every output of a norm is off by the bound on the original's own
    rounding. Ours is off by less than an ulp, and errors of the same size in other places move it about as far; four
    times the farther of two allows for those that add up.
    """
    bound, still, farthest = ulp_bound(WIDTH, torch.float32), measure(copy.deepcopy(model)), 0.0
    for seed in range(2):
        moved = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(seed)
        for norm in norms_of(moved):
            norm.register_forward_hook(
                lambda _, __, y, g=generator: y * (1 + bound * (2 * torch.rand(y.shape, generator=g) - 1).sign())
            )
        farthest = max(farthest, (measure(moved) - still).abs().max().item())
    assert 0 < farthest < 1e-2
    return 4 * farthest


def logits(model: Any) -> Any:
    return outputs(model, tokens()).logits.detach()


def learned(model: Any) -> Any:
    """Losses of four steps on the same few sentences, and the logits after them."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.03), []
    for _ in range(4):
        loss = outputs(model, tokens(1)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.cat([torch.stack(losses), logits(model).flatten()])


@pytest.mark.usefixtures("few_circumstances")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_says_and_learns_the_same(name: str) -> None:
    model = build(name)
    mine = copy.deepcopy(model)
    parameters, norms = dict(mine.named_parameters()), norms_of(mine)
    kinds = [type(norm) for norm in norms]
    keys = list(mine.state_dict())
    report = replace(mine)
    _, _, _, variant, count = MODELS[name]
    assert [entry.variant.name for entry in report if entry.variant] == [variant] * count
    assert [entry.name for entry in report] == [n for n, layer in mine.named_modules() if isinstance(layer, Replaced)]
    assert all(isinstance(norm, kind) and norm.training for norm, kind in zip(norms, kinds, strict=True))
    assert list(mine.state_dict()) == keys
    assert all(parameter is parameters[key] for key, parameter in mine.named_parameters())
    (again,) = replace(mine)
    assert str(again) == f"the model ({type(mine).__name__}): left; its {count} RMSNorm are replaced already"

    wrong = copy.deepcopy(model)  # the tolerance can tell one eps from another
    replace(wrong, rmsnorm.Variant.get(variant).replace(eps=1e-3))
    for measure in (logits, learned):
        want, got = measure(copy.deepcopy(model)), measure(copy.deepcopy(mine))
        tolerance = as_far_as_rounding_goes(model, measure)
        assert (got - want).abs().max() <= tolerance
        assert (measure(wrong) - want).abs().max() > tolerance
    assert got[3] < got[2] < got[1] < 0.99 * got[0]
    mine.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(mine.state_dict(), strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "deepseek_v2", "deepseek_v3", "deepseek_v4", "gemma3_text", "gemma3n_text", "gemma4_text", "glm_moe_dsa",
    "kimi_linear", "llama4_text", "minimax", "minimax_m2", "nemotron_h", "olmo2", "qwen3_5_text", "qwen3_next",
])  # fmt: skip
def test_the_table_of_families_is_what_small_models_have_and_they_say_the_same(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    path = Path(rmsnorm.__file__).parent / "specification" / "families.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    spec = importlib.util.spec_from_file_location("families_program", ROOT / "tools" / "families.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    rows = document["families"][name]
    if document["transformers"] == transformers.__version__:
        assert program.ask(name) == rows
    model = program.build(name).eval()
    mine = copy.deepcopy(model)
    left = {entry.kind for entry in replace(mine) if entry.variant is None}
    assert left - {"LayerNorm"} == {row["class"] for row in rows if row["variant"] is None}
    assert (logits(mine) - logits(model)).abs().max() <= as_far_as_rounding_goes(model, logits)
