"""Which norms each family of models has, their variants, and where their eps is: families.json of the package.

python tools/families.py --ask            # asks a small model of each family of transformers: a quarter of an hour
python tools/families.py --ask llama t5   # asks these alone, and keeps the others
python tools/families.py                  # prints the table of docs/variants.md
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from itertools import count, cycle, islice, product
from operator import getitem
from pathlib import Path
from typing import Any

from rmsnorm.specification.families import computes

SPECIFICATION = Path(__file__).parents[1] / "rmsnorm" / "specification"
PATH = SPECIFICATION / "families.json"
# Sizes of the small models. They differ, so that the width of a norm shows which field of the configuration it is.
SIZES = {
    "vocab_size": 64, "hidden_size": 48, "d_model": 48, "intermediate_size": 56, "d_ff": 56, "num_hidden_layers": 4,
    "num_layers": 4, "num_decoder_layers": 4, "num_attention_heads": 4, "num_heads": 4, "num_key_value_heads": 2,
    "head_dim": 10, "d_kv": 10, "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "num_expert_group": 1, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 28, "shared_expert_intermediate_size": 28, "q_lora_rank": 24, "kv_lora_rank": 14,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 18, "linear_key_head_dim": 26,
    "linear_value_head_dim": 30, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "pad_token_id": 0, "vocab_size_per_layer_input": 64, "depth": 2,
}  # fmt: skip
PARTS = {"hidden_size": 64, "d_model": 64, "intermediate_size": 72, "num_hidden_layers": 2}  # of vision and sound
LATENT = {"head_dim": 4, "num_key_value_heads": 4}  # with kv_lora_rank: qk_rope_head_dim, and a key for each query
_HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 12}
# what a family needs beside these, by model_type
MORE: dict[str, dict[str, Any]] = {
    "bamba": {**_HYBRID, "attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "diffusion_gemma_text": {"global_head_dim": 34},
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {"num_hidden_layers": 5, "num_kv_shared_layers": 0},
    "gemma4_text": {"global_head_dim": 34},
    "gemma4_unified_text": {"global_head_dim": 34},
    "granitemoehybrid": {**_HYBRID, "layer_types": ["mamba", "attention", "mamba", "attention"]},
    "internvl_vision": {"norm_type": "rms_norm", "use_qk_norm": True},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 12},
    "qwen2_vl_vision": {"embed_dim": 64},
    "zamba2": {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_headdim": 12},
}
HEADS = ("num_attention_heads", "num_key_value_heads", "num_heads", "linear_num_value_heads", "mamba_num_heads")


def arguments(kind: Any, eps: Iterator[float], sizes: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a small configuration, and of those in it, in which each eps has a value of its own."""
    own = vars(kind())
    more = MORE.get(kind.model_type, {})
    sizes = sizes | (LATENT if "kv_lora_rank" in own else {}) | more
    parts = {
        name: {"model_type": part.model_type, **arguments(type(part), eps, SIZES if "text" in name else SIZES | PARTS)}
        for name, part in own.items()
        if hasattr(part, "model_type")
    }
    values = {key: value for key, value in sizes.items() if key in own and type(own[key]) in (int, type(None))}
    values |= {key: next(eps) for key, value in own.items() if "eps" in key and isinstance(value, float)}
    if isinstance(own.get("layer_types"), list) and "num_hidden_layers" in values:  # each type that there is by default
        types = cycle(dict.fromkeys(own["layer_types"]))
        values["layer_types"] = [*islice(types, values["num_hidden_layers"])]
    return values | parts | more


def leaves(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a configuration and of its parts, each with its name."""
    for key, value in {**MORE.get(config.model_type, {}), **vars(config)}.items():
        if hasattr(value, "model_type"):
            yield from leaves(value, f"{path}{key}.")
        elif not key.startswith("_"):
            yield path + key, value


def numbers(config: Any) -> dict[str, float]:
    """The numbers in a configuration and in its parts, by their names."""
    return {key: value for key, value in leaves(config) if type(value) in (int, float)}


def build(name: str, device: str = "cpu", **options: Any) -> Any:
    """A small model of the family with random weights, or without numbers on the device "meta".

    Each eps in its configuration has a value of its own; options: other values of fields, which may be in parts.
    """
    import torch
    import transformers

    kind = transformers.CONFIG_MAPPING[name]
    values = arguments(kind, (3e-4 + 1e-5 * i for i in count()), SIZES)
    for path, value in options.items():
        *parts, key = path.split(".")
        reduce(getitem, parts, values)[key] = value
    config = kind(**values)
    autos = ("ImageTextToText", "CausalLM", "Seq2SeqLM")
    classes = [*(getattr(transformers, f"AutoModelFor{auto}") for auto in autos), transformers.AutoModel]
    auto = next((auto for auto in classes if kind in auto._model_mapping), None)
    torch.manual_seed(0)
    with torch.device(device):
        return model_of(kind)._from_config(config) if auto is None else auto.from_config(config)


def model_of(kind: Any) -> Any:
    """The class of models of a class of configurations that no automatic class knows, as of a part."""
    import transformers

    module = importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))
    models = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    models = [each for each in models if issubclass(each, transformers.PreTrainedModel) and each.config_class is kind]
    ends = ("ForConditionalGeneration", "ForCausalLM", "Model", "")
    return next(
        each for end in ends for each in models if each.__name__.endswith(end) and "PreTrained" not in str(each)
    )


def widths(model: Any) -> dict[str, int]:
    """How wide the rows of the norms without a gain are, by role, as a call of the model shows."""
    import torch

    seen: dict[str, int] = {}
    for name, module in model.named_modules():
        if "Norm" in type(module).__name__ and not [*module.parameters()]:
            role = ".".join(role_of(name))
            module.register_forward_hook(lambda _, __, y, role=role: seen.setdefault(role, y.shape[-1]))
    ids = torch.ones(1, 8, dtype=torch.int64)
    with contextlib.suppress(Exception):  # a model of images may need more; then its row says no size
        model(input_ids=ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))
    return seen


def role_of(name: str) -> list[str]:
    """The name of a module without the numbers of layers."""
    return [part for part in name.split(".") if not part.isdecimal()]


def size_of(width: int | None, config: Any, part: str) -> str:
    """The field of the configuration that a width is, or the product of two; rather one of this part than others."""
    known = {
        key: value
        for key, value in numbers(config).items()
        if re.search("(?<!vocab_)(?<!patch_)size|head|hidden|dim|(?<![a-z])d_|rank|channel", key)
    }
    order = {key: i for i, key in enumerate(SIZES)}

    def place(key: str) -> tuple[Any, ...]:
        return not key.startswith(part), bool(part) * key.count("."), order.get(key.split(".")[-1], len(order))

    same = [key for key, value in known.items() if value == width and ".num_" not in f".{key}"]
    if same:
        return min(same, key=place)
    for key in [key for key in known if key.endswith("num_attention_heads")]:
        path = key.removesuffix("num_attention_heads")
        if f"{path}hidden_size" in known and not known.get(f"{path}head_dim"):
            known[f"{path}hidden_size / {path}num_attention_heads"] = known[f"{path}hidden_size"] / known[key]
    dims = sorted((key for key in known if re.search(r"head_dim$|d_kv$| / ", key)), key=place)
    heads = [key for key in known if key.split(".")[-1] in HEADS]
    if width in (known[dim] for dim in dims):
        return next(dim for dim in dims if known[dim] == width)
    for head, dim in product(heads, dims):
        if known[head] * known[dim] == width:
            return f"{head} * {dim}"
    return ""


def ask(name: str) -> list[dict[str, Any]]:
    """The RMSNorms of a family: a row for those that compute the same and that the same options add or take away."""
    import transformers

    defaults = dict(switches(transformers.CONFIG_MAPPING[name]()))
    model = build(name, "meta")
    words, base, added = tested(model), norms_of(model), []
    taken: dict[tuple[str, ...], dict[str, tuple[bool, bool]]] = defaultdict(dict)
    for field, value in switches(model.config):
        if field.rpartition(".")[2] not in words or field not in defaults or value is None:
            continue
        other = not value if isinstance(value, bool) else None
        try:
            norms = norms_of(build(name, "meta", **{field: other}))
            new = asked(name, **{field: other}) if norms - base else []
        except Exception:  # no small model can be built with this option alone
            continue
        state = (on(value), on(defaults[field]))
        for norm in base - norms:
            taken[norm][field] = state
        for row in new:
            roles = [role for role in row["roles"] if not matching(row, role, base) and matching(row, role, norms)]
            added += [row | {"roles": roles, "options": {field: (on(other), on(defaults[field]))}}] if roles else []
    parted = []
    for row in asked(name):
        groups: dict[str, list[str]] = defaultdict(list)
        for role in row["roles"]:
            conditions = [taken[norm] for norm in matching(row, role, base)] or [{}]
            common = {field: c for field, c in conditions[0].items() if all(field in other for other in conditions)}
            groups[json.dumps(common)].append(role)
        for common, roles in groups.items():
            parted.append(row | {"roles": roles} | ({"options": json.loads(common)} if common != "{}" else {}))
    return json.loads(json.dumps(parted + added))


def on(value: Any) -> bool:
    """Whether an option is set."""
    return value is not None and value is not False


def matching(row: dict[str, Any], role: str, norms: set[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The norms of a row that have this role."""
    end = role.split(".")
    return [norm for norm in norms if norm[0] == row["class"] and [*norm[-len(end) :]] == end]


def norms_of(model: Any) -> set[tuple[str, ...]]:
    """The class of each norm and its name without the numbers of layers."""
    modules = ((type(module).__name__, name) for name, module in model.named_modules())
    return {(kind, *role_of(name)) for kind, name in modules if "Norm" in kind}


def switches(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a configuration and of its parts that are true or false, or that may be None."""
    import transformers

    shared = transformers.PreTrainedConfig.__dataclass_fields__
    types = {key: str(field.type) for key, field in getattr(type(config), "__dataclass_fields__", {}).items()}
    for key, value in vars(config).items():
        may_be_none = isinstance(value, (int, type(None))) and re.search(r"int.*\| None", types.get(key, ""))
        if hasattr(value, "model_type"):
            yield from switches(value, f"{path}{key}.")
        elif key not in shared and (isinstance(value, bool) or may_be_none):
            yield path + key, value


def tested(model: Any) -> set[str]:
    """The words in the lines of the model's code that test something."""
    files = {sys.modules[type(module).__module__].__file__ for module in model.modules()}
    texts = [Path(file).read_text(encoding="utf-8") for file in files if file and "transformers" in file]
    lines = (line for text in texts for line in text.splitlines() if re.search(r"\b(if|not|and|or)\b", line))
    return {word for line in lines for word in re.findall(r"\w+", line)}


def asked(name: str, **options: Any) -> list[dict[str, Any]]:
    """The RMSNorms of a family with these options: a row for those that compute the same."""
    import transformers

    from rmsnorm.conversion import replace

    model = build(name, **options)
    defaults = numbers(transformers.CONFIG_MAPPING[name]())
    fields_of_eps = {value: key for key, value in numbers(model.config).items() if "eps" in key.split(".")[-1]}
    gainless, roles = widths(model), defaultdict(list)
    for entry in replace(model, dry_run=True):
        if entry.variant is None and "rms" not in entry.kind.lower():
            continue
        path = role_of(entry.name)
        module = model.get_submodule(entry.name)
        gains = [*module.parameters()]
        eps, more = getattr(module, "eps", None), {"why_none": re.sub(r"transformers\.\S+:", "", entry.why)}
        if entry.variant is not None:
            eps, more = entry.variant.eps, {}
            if entry.gated:
                more["gate"] = (entry.variant.gate_function, entry.variant.gate_position)
            more |= {"in_groups": True} if entry.group else {}
            more |= {} if gains else {"gain": False}
        field = next((key for value, key in fields_of_eps.items() if eps and abs(value / eps - 1) < 0.01), None)
        width = gains[0].shape[-1] if gains else gainless.get(".".join(path))
        size = size_of(width, model.config, (field or "").rpartition(".")[0])
        default = defaults.get(field) if field else eps
        part = part_of(model.config, field or size, type(module))
        name = entry.variant and entry.variant.name
        roles[entry.kind, name, field, default, size, part, tuple(more.items())].append(path)
    rows = []
    for row, paths in roles.items():
        others = [path for other, more in roles.items() if other != row for path in more]
        named = dict(zip(("class", "variant", "field", "default", "size", "part"), row, strict=False))
        rows.append({"roles": [*dict.fromkeys(shortest(path, others) for path in paths)], **named, **dict(row[-1])})
    return rows


def part_of(config: Any, field: str, norm: type) -> str | None:
    """The model_type of the part of the configuration that the field is in, if the norm is of the same code."""
    name = field.partition(".")[0]
    part = getattr(config, name, None) if name != field else None
    same = part is not None and type(part).__module__.split(".")[2] == norm.__module__.split(".")[2]
    return part.model_type if same else None


def shortest(path: list[str], others: list[list[str]]) -> str:
    """The shortest end of a path that no other path has."""
    for length in range(1, len(path)):
        if all(path[-length:] != other[-length:] for other in others if other != path):
            return ".".join(path[-length:])
    return ".".join(path)


def dump(document: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    families = ",\n".join(
        f"  {json.dumps(name)}: [\n" + ",\n".join(f"   {json.dumps(row)}" for row in rows) + "\n  ]"
        for name, rows in sorted(document["families"].items())
    )
    return f'{{\n "transformers": "{document["transformers"]}",\n "families": {{\n{families}\n }}\n}}\n'


def names() -> list[str]:
    """The families in whose code there is a norm with a root."""
    import transformers

    root = Path(transformers.__file__).parent / "models"
    code = {
        name: "".join(path.read_text(encoding="utf-8") for path in (root / folder).glob("modeling_*.py"))
        for name in transformers.CONFIG_MAPPING
        if (root / (folder := transformers.CONFIG_MAPPING[name].__module__.split(".")[2])).is_dir()
    }
    return [name for name, text in code.items() if re.search(r"RMSNorm|L2Norm|variance \+ self", text)]


def table(document: dict[str, Any]) -> str:
    """A row for the families whose norms compute the same: those of few roles by name, then the others."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, rows in sorted(document["families"].items()):
        norms: dict[str, list[str]] = defaultdict(list)
        for row in rows:
            eps = "" if row["default"] is None else f"{row['default']:g}".replace("e-0", "e-")
            place = f"`{row['field'].rpartition('.')[2]}` ({eps})" if row["field"] else f"eps {eps} in the code"
            norms[f"{computes(row) if row['variant'] else 'no variant'}, {place}".replace("  ", " ")] += row["roles"]
        *few, most = sorted(norms, key=lambda what: len(norms[what]))
        cells = [f"{', '.join(f'`{role}`' for role in dict.fromkeys(norms[what]))}: {what}" for what in few]
        groups["; ".join([*cells, f"others: {most}" if few else most])].append(name)
    lines = (f"| {', '.join(names)} | {norms} |\n" for norms, names in groups.items())
    return "".join(["| families | their norms |\n| --- | --- |\n", *lines])


def answers(names: Iterable[str], question: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
    """The answer for each name; where there is none, the error is printed, and the others are asked."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    for name in names:
        try:
            yield name, question(name)
        except Exception as error:  # some models want more than sizes
            print(f"{name}: {type(error).__name__}: {str(error).strip()[:200]!r}", file=sys.stderr, flush=True)


def main() -> None:
    document = json.loads(PATH.read_text(encoding="utf-8"))
    if sys.argv[1:2] == ["--ask"]:
        import transformers

        document["transformers"] = transformers.__version__
        document["families"] = document["families"] if sys.argv[2:] else {}
        for name, rows in answers(sys.argv[2:] or names(), ask):
            document["families"] |= {name: rows} if rows else {}
            PATH.write_text(dump(document), encoding="utf-8")
    sys.stdout.write(table(document))


if __name__ == "__main__":
    main()
