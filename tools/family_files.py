"""Where a config.json may have what a model reads: rmsnorm/specification/family_files.json, as transformers reads.

python tools/family_files.py              # builds each configuration many times, with one number of its own: minutes
python tools/family_files.py llama t5     # builds these alone, and keeps the others

A class of a configuration moves and renames fields: the fields of a part lie beside it ("flat"), a field has another
name, or a part of another name and kind. No model is built. families.py asks models which of them they read.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Iterable
from functools import reduce
from pathlib import Path
from typing import Any

from families import SPECIFICATION, answers, leaves

PATH = SPECIFICATION / "family_files.json"
EPS = re.compile("(?<![a-z])eps")
OTHER = ("llama", "bert")  # kinds that no part has by itself but where any kind is taken


def made(kind: Any, file: dict[str, Any]) -> Any:
    """The configuration that transformers makes of a file, or None if it refuses that."""
    try:
        return kind(**copy.deepcopy(file))
    except Exception:  # whatever it raises, this is no file of that kind
        return None


def fields(kind: Any, file: dict[str, Any]) -> dict[str, Any]:
    """The fields of that configuration and of its parts, by their names."""
    config = made(kind, file)
    return {} if config is None else dict(leaves(config))


def file_of(values: dict[str, Any], stubs: dict[str, Any]) -> dict[str, Any]:
    """A file with values at their paths, and these parts."""
    file: dict[str, Any] = copy.deepcopy(stubs)
    for path, value in values.items():
        *parts, key = path.split(".")
        reduce(lambda place, part: place.setdefault(part, {}), parts, file)[key] = value
    return file


def mark(value: Any, i: int) -> Any:
    """A value for a field that is unlike its default; i: which of several."""
    if isinstance(value, bool):
        return not value
    return 0.25 + 0.01 * i if isinstance(value, float) else 7 + i


def places(kind: Any, stubs: dict[str, Any], candidates: Iterable[str]) -> dict[str, list[str]]:
    """The paths in a file from which a configuration takes its fields, those first that it prefers, by field."""
    default = fields(kind, stubs)

    def read(values: dict[str, Any]) -> dict[str, Any]:
        return fields(kind, file_of(values, stubs))

    found: dict[str, list[str]] = {}
    for path in candidates:
        was = default.get(path, 0.0)  # an option keeps its type; a name that is no field is one of eps
        value = mark(was, 0)
        for leaf, got in read({path: value}).items():
            if type(got) is type(value) and got == value != default.get(leaf) and same_kind(leaf, path):
                found.setdefault(leaf, []).append(path)
    for leaf, paths in found.items():
        ordered: list[str] = []
        while left := [path for path in paths if path not in ordered]:
            value = read({path: mark(0.0, i) for i, path in enumerate(left)}).get(leaf)
            ordered.append(next((path for i, path in enumerate(left) if value == mark(0.0, i)), left[0]))
        found[leaf] = ordered
    return found


def same_kind(leaf: str, path: str) -> bool:
    """Whether both are an eps, or have the same name."""
    ends = [name.rpartition(".")[2] for name in (leaf, path)]
    return all(map(EPS.search, ends)) or ends[0] == ends[1]


def part_of(kind: Any, name: str, texts: set[str]) -> dict[str, Any] | None:
    """What a part is by default, whether a file may name another kind, and which names it replaces."""
    part = getattr(made(kind, {}), name, None)
    optional = part is None
    part = part or getattr(made(kind, {name: {}}), name, None)
    if not hasattr(part, "model_type"):
        return None
    row: dict[str, Any] = {"kind": type(part).model_type}
    took = {}
    for text in {*texts, *OTHER, kind.model_type} - {row["kind"]}:
        took[text] = getattr(type(getattr(made(kind, {name: {"model_type": text}}), name, None)), "model_type", None)
    if any(took[other] == other for other in OTHER if other in took):
        row["any"] = True
        named = {text: other for text, other in sorted(took.items()) if other not in (None, text)}
        row |= {"named": named} if named else {}
    return row | ({"optional": True} if optional else {})


def measured(kind: Any, options: set[str]) -> dict[str, Any]:
    """The parts of a kind, the places of its fields that have more than one, and those of a file without the part."""
    source = source_of(kind)
    types = {text for line in source.splitlines() if "model_type" in line for text in re.findall(r'"([a-z]\w*)"', line)}
    names = {key for key, value in vars(made(kind, {})).items() if hasattr(value, "model_type")}
    names |= {*getattr(kind, "sub_configs_defaults", {})}
    parts = {name: row for name in sorted(names) if (row := part_of(kind, name, types))}
    aliases = sorted(set(re.findall(r'"(\w+_(?:config|cfg))"', source)) - names)
    stubs = {name: {"model_type": row["kind"]} for name, row in parts.items()}
    default = fields(kind, {})
    ends = {leaf.rpartition(".")[2] for leaf in default}
    keys = sorted({word for word in re.findall(r"[a-z]\w+", source) if EPS.search(word)} | {*filter(EPS.search, ends)})
    keys += sorted(options & ends)
    found = {"places": own(places(kind, {}, keys), "")}
    for name, stub in stubs.items():
        inside = [leaf for leaf in default if leaf.startswith(f"{name}.") and leaf.rpartition(".")[2] in keys]
        if inside:
            found["places"] |= own(places(kind, {name: stub}, [*inside, *keys]), f"{name}.")
            others = {other: row for other, row in stubs.items() if other != name}
            ends = {leaf.partition(".")[2] for leaf in inside}
            candidates = [*keys, *(f"{alias}.{end}" for alias in aliases for end in sorted(ends))]
            found["flat"] = found.get("flat", {}) | own(places(kind, others, candidates), f"{name}.")
    return {key: value for key, value in {"parts": parts, **found}.items() if value}


def source_of(kind: Any) -> str:
    """The code of a class of configurations, of those that it is made of, and of its parts."""
    each = (kind, *map(type, parts_of(kind)))
    modules = {sys.modules[base.__module__] for own in each for base in own.__mro__}
    paths = [Path(module.__file__ or "") for module in modules if ".models." in module.__name__]
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(paths))


def own(found: dict[str, list[str]], part: str) -> dict[str, list[str]]:
    """The fields of a part, without those that are in their own place alone."""
    return {
        leaf: paths
        for leaf, paths in sorted(found.items())
        if paths != [leaf] and (leaf.startswith(part) if part else "." not in leaf)
    }


def parts_of(kind: Any) -> list[Any]:
    """The configurations in a configuration of this kind."""
    config = made(kind, {})
    return [] if config is None else [value for value in vars(config).values() if hasattr(value, "model_type")]


def below(kind: Any) -> dict[str, Any]:
    """The kinds of the parts of a kind, and of those in them, by model_type."""
    parts = {part.model_type: type(part) for part in parts_of(kind)}
    for part in [*parts.values()]:
        parts = below(part) | parts
    return parts


def kinds() -> dict[str, Any]:
    """All classes of configurations, those of parts too, by model_type."""
    import transformers

    found = {name: transformers.CONFIG_MAPPING[name] for name in transformers.CONFIG_MAPPING}
    for kind in [*found.values()]:
        found = below(kind) | found
    return {name: kind for name, kind in found.items() if name and made(kind, {}) is not None}


def plain(text: str) -> str:
    """The beginning of a class's name, or a model_type, in letters that both have."""
    return re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", text).replace("_", "").lower()


def architectures(known: set[str]) -> dict[str, str]:
    """The model_type of the classes of models whose names do not begin with it."""
    from transformers.models.auto import modeling_auto

    spelled = {plain(name): name for name in sorted(known, reverse=True)}
    found: dict[str, str] = {}
    for name, table in vars(modeling_auto).items():
        for kind, classes in table.items() if re.fullmatch("MODEL_.*MAPPING_NAMES", name) else ():
            for model in (classes,) if isinstance(classes, str) else classes:
                if kind in known and spelled.get(plain(model)) != kind:
                    found.setdefault(model, kind)
    return dict(sorted(found.items()))


def main() -> None:
    families = json.loads((SPECIFICATION / "families.json").read_text(encoding="utf-8"))["families"]
    options = {name.rpartition(".")[2] for rows in families.values() for row in rows for name in row.get("options", ())}
    found = kinds()
    files: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))["files"] if sys.argv[1:] else {}
    inside = {name: {*below(kind)} for name, kind in found.items()}
    wholes = [{name, *parts} for name, parts in inside.items() if {name, *parts} & {*families}]
    asked = sys.argv[1:] or sorted(set().union(*wholes) & {*found})
    for name, row in answers(asked, lambda name: measured(found[name], options)):
        files.pop(name, None)
        files |= {name: row} if row else {}
    parts = [part for row in files.values() for part in row.get("parts", {}).values()]
    named = {text: kind for part in parts for text, kind in part.get("named", {}).items() if text not in found}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(files.items()))
    document = (("named", named), ("architectures", architectures({*families, *files})))
    head = "".join(f' "{key}": {json.dumps(value)},\n' for key, value in document)
    PATH.write_text(f'{{\n{head} "files": {{\n{lines}\n }}\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
