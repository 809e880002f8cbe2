"""The table of docs/which.md: which variant each family of models has, and where its eps is.

python docs/families.py --ask     # asks the classes of transformers, as `rmsnorm identify` does: half a minute
python docs/families.py           # prints the table of families.json for docs/which.md; a test compares
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "rmsnorm" / "specification" / "families.json"
# of the module transformers.models.NAME: the class of the norm, the class of the configuration
FAMILIES = {
    "arcee": ("ArceeRMSNorm", "ArceeConfig"),
    "bitnet": ("BitNetRMSNorm", "BitNetConfig"),
    "chameleon": ("ChameleonRMSNorm", "ChameleonConfig"),
    "deepseek_v2": ("DeepseekV2RMSNorm", "DeepseekV2Config"),
    "deepseek_v3": ("DeepseekV3RMSNorm", "DeepseekV3Config"),
    "ernie4_5": ("Ernie4_5RMSNorm", "Ernie4_5Config"),
    "exaone4": ("Exaone4RMSNorm", "Exaone4Config"),
    "gemma": ("GemmaRMSNorm", "GemmaConfig"),
    "gemma2": ("Gemma2RMSNorm", "Gemma2Config"),
    "gemma3": ("Gemma3RMSNorm", "Gemma3TextConfig"),
    "gemma3n": ("Gemma3nRMSNorm", "Gemma3nTextConfig"),
    "glm": ("GlmRMSNorm", "GlmConfig"),
    "glm4": ("Glm4RMSNorm", "Glm4Config"),
    "gpt_oss": ("GptOssRMSNorm", "GptOssConfig"),
    "granite": ("GraniteRMSNorm", "GraniteConfig"),
    "helium": ("HeliumRMSNorm", "HeliumConfig"),
    "internvl": ("InternVLVisionRMSNorm", "InternVLVisionConfig"),
    "jamba": ("JambaRMSNorm", "JambaConfig"),
    "llama": ("LlamaRMSNorm", "LlamaConfig"),
    "llama4": ("Llama4TextRMSNorm", "Llama4TextConfig"),
    "longt5": ("LongT5LayerNorm", "LongT5Config"),
    "mamba": ("MambaRMSNorm", "MambaConfig"),
    "mamba2": ("MambaRMSNormGated", "Mamba2Config"),
    "minimax": ("MiniMaxRMSNorm", "MiniMaxConfig"),
    "mistral": ("MistralRMSNorm", "MistralConfig"),
    "mixtral": ("MixtralRMSNorm", "MixtralConfig"),
    "mt5": ("MT5LayerNorm", "MT5Config"),
    "olmo2": ("Olmo2RMSNorm", "Olmo2Config"),
    "olmoe": ("OlmoeRMSNorm", "OlmoeConfig"),
    "phi3": ("Phi3RMSNorm", "Phi3Config"),
    "pixtral": ("PixtralRMSNorm", "PixtralVisionConfig"),
    "qwen2": ("Qwen2RMSNorm", "Qwen2Config"),
    "qwen3": ("Qwen3RMSNorm", "Qwen3Config"),
    "qwen3_moe": ("Qwen3MoeRMSNorm", "Qwen3MoeConfig"),
    "recurrent_gemma": ("RecurrentGemmaRMSNorm", "RecurrentGemmaConfig"),
    "smollm3": ("SmolLM3RMSNorm", "SmolLM3Config"),
    "t5": ("T5LayerNorm", "T5Config"),
    "umt5": ("UMT5LayerNorm", "UMT5Config"),
    "zamba2": ("Zamba2RMSNorm", "Zamba2Config"),
}
EPS = ("rms_norm_eps", "rms_norm_epsilon", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon")


def ask() -> dict[str, Any]:
    """What identify answers on each class, the name of its eps in the configuration, and the default of that."""
    from transformers import __version__

    from rmsnorm.identify.worker import identities

    targets = {f"transformers.models.{name}.modeling_{name}:{norm}": name for name, (norm, _) in FAMILIES.items()}
    families = {}
    for target, identity in identities(list(targets), time_limit=120.0, gradients=False):
        name = targets[target]
        if isinstance(identity, str) or identity.kind != "rmsnorm":
            print(f"{target}: {identity if isinstance(identity, str) else identity.headline}", file=sys.stderr)
            continue
        module = import_module(f"transformers.models.{name}.configuration_{name}")
        config = getattr(module, FAMILIES[name][1])()
        eps = next((field for field in EPS if hasattr(config, field)), None)
        families[name] = {
            "class": FAMILIES[name][0], "variant": identity.described.removeprefix("the variant "),
            "field": eps, "default": None if eps is None else getattr(config, eps),
        }  # fmt: skip
    return {"transformers": __version__, "families": families}


def table(document: dict[str, Any]) -> str:
    columns = ("family", "class in transformers", "variant", "eps in `config.json`", "its default", "layer")
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for name, family in sorted(document["families"].items()):
        variant, _, rest = family["variant"].partition(",")
        words = variant.split(" but ")
        plain = len(words) == 1 and not rest
        layer = f'`RMSNorm(n, eps=eps, variant="{words[0]}")`' if plain else "none; see the variant"
        field = f"`{family['field']}`" if family["field"] else "in the code"
        default = "" if family["default"] is None else f"{family['default']:g}".replace("e-0", "e-")
        lines.append(f"| {name} | `{family['class']}` | {family['variant']} | {field} | {default} | {layer} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--ask"]:
        PATH.write_text(json.dumps(ask(), indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(table(json.loads(PATH.read_text(encoding="utf-8"))))
