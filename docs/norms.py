"""The page docs/identify.md: what each RMSNorm of a package computes, and whether replace takes it.

python docs/norms.py transformers > docs/identify.md    # half an hour
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Final

from rmsnorm.conversion import replace
from rmsnorm.identify import Identity, identify
from rmsnorm.specification import errors
from rmsnorm.targets.arguments import constructor_arguments
from rmsnorm.targets.locate import locate
from rmsnorm.targets.open import WIDTH

_NAMED: Final = re.compile(r"rms_?norm", re.IGNORECASE)
# the name of a class and its body, which ends at the next line without an indent
_CLASS: Final = re.compile(r"^class (\w+)[^\n]*\n((?:(?:[ \t][^\n]*)?\n)+)", re.MULTILINE)
_CALL: Final = re.compile(r"^[ \t]+def (?:forward|call|__call__)\b", re.MULTILINE)
_ROOT: Final = re.compile(r"rsqrt|sqrt|-0\.5")


def find(package: str) -> tuple[list[str], list[str]]:
    """The classes in the source of a package that are named RMSNorm, and other norms with a root in their source."""
    root, named, others = Path(importlib.import_module(package).__path__[0]), list[str](), list[str]()
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        # transformers generates its modeling files from those that are modular
        if "test" in file.name or "tests" in parts or any(part.startswith("modular_") for part in parts):
            continue
        module = ".".join([package, *(part for part in parts if part != "__init__")])
        for name, body in _CLASS.findall(file.read_text(errors="ignore")):
            if _CALL.search(body) and _NAMED.search(name):
                named.append(f"{module}:{name}")
            elif _CALL.search(body) and name.endswith("Norm") and _ROOT.search(body):
                others.append(f"{module}:{name}")
    return named, others


def identified(name: str) -> Identity | str:
    """What a class computes, or why it cannot be asked."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return identify(name, time_limit=60.0)
    except errors.InputError as error:
        return str(error).removeprefix("identify: ")


def why_left(name: str) -> str | None:
    """Why replace leaves a layer of that class; None where it does not."""
    make = locate(name)
    try:
        report = replace(make(**constructor_arguments(make, {}, WIDTH)), dry_run=True)
    except errors.InputError as error:
        return str(error)
    own = next((entry for entry in report if not entry.name), None)
    return "it is not asked" if own is None else own.why if own.variant is None else None


def outcomes(left: list[str | None]) -> str:
    """What replace does with some classes: yes, or why not, with the number where they differ."""
    counts = Counter("yes" if why is None else f"no: {why}" for why in left)
    return "; ".join(text if count == len(left) else f"{count} {text}" for text, count in counts.most_common())


def page(package: str) -> str:
    alike: dict[str, list[str]] = {}
    refused: dict[str, str] = {}
    named, others = find(package)
    for name in (*named, *others):
        print(name, file=sys.stderr)
        result = identified(name)
        if name in others and (isinstance(result, str) or result.kind not in ("rmsnorm", "l2norm")):
            continue
        if isinstance(result, Identity) and result.answered:
            alike.setdefault(result.cluster, []).append(name)
        else:
            refused[name] = result if isinstance(result, str) else result.defects[0]
    count, table, replaced = sum(map(len, alike.values())), [], 0
    for text, names in sorted(alike.items(), key=lambda entry: (-len(entry[1]), entry[0])):
        left = [why_left(name) for name in names]
        examples = ", ".join(f"`{name.split(':')[1]}`" for name in names[:3])
        table.append(f"| {len(names)} | {text} | {examples} | {outcomes(left)} |")
        replaced += left.count(None)
    lines = [
        f"# The RMSNorms of {package} {version(package)}", "",
        f"This page says what each RMSNorm class of {package} computes. `python docs/norms.py {package}` writes it: it",
        "makes small instances of the classes, calls them as `rmsnorm identify` does, and looks at their results.",
        f"{count} classes are RMSNorm or have its name.",
        f"Each of the {len(table)} rows has the classes that compute the same.",
        f"`rmsnorm.conversion.replace` can replace {replaced} of them.", "",
        "These are classes. The eps and the variant of each norm of a model, by its name in the model, are in",
        "[Which RMSNorm do I need?](which.md). `rmsnorm identify --model FOLDER` says them for a `config.json`.",
        "It reads nothing else and needs no framework. A norm whose eps is in the code, such as `q_a_layernorm` of",
        "DeepSeek-V3, shows there, and a norm beside those of the family, such as the gated one of Qwen3-Next.", "",
        "| classes | what they compute | examples | replace |",
        "| ---: | --- | --- | --- |", *table, "",
    ]  # fmt: skip
    lines += [f"Not called: {len(refused)}.", ""] if refused else []
    lines += [f"- `{name.split(':')[1]}`: {reason.replace(name, 'it')}" for name, reason in refused.items()]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(page(sys.argv[1]), end="")
