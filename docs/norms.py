"""The page docs/identify.md: what each RMSNorm of a package computes, and whether replace takes it.

python docs/norms.py transformers > docs/identify.md    # half an hour
"""

from __future__ import annotations

import sys
from collections import Counter
from importlib.metadata import version

from rmsnorm.conversion import replace
from rmsnorm.identify import Identity
from rmsnorm.identify.package import norms
from rmsnorm.specification import errors
from rmsnorm.targets.arguments import constructor_arguments
from rmsnorm.targets.locate import locate
from rmsnorm.targets.open import WIDTH


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
    for name, result in norms(package, time_limit=60.0):
        print(name, file=sys.stderr)
        if isinstance(result, Identity) and result.answered:
            alike.setdefault(result.cluster, []).append(name)
        else:
            refused[name] = result.defects[0] if isinstance(result, Identity) else result.removeprefix("identify: ")
    count, table, replaced = sum(map(len, alike.values())), [], 0
    for text, names in sorted(alike.items(), key=lambda entry: (-len(entry[1]), entry[0])):
        left = [why_left(name) for name in names]
        examples = ", ".join(f"`{name.split(':')[1]}`" for name in names[:3])
        table.append(f"| {len(names)} | {text} | {examples} | {outcomes(left)} |")
        replaced += left.count(None)
    lines = [
        f"# The RMSNorms of {package} {version(package)}", "",
        f"This page says what each RMSNorm class of {package} computes. `rmsnorm identify {package}` says it in a line",
        f"for each, and `python docs/norms.py {package}` writes this page: both make small instances of the classes,",
        f"call them, and look at their results alone. {count} classes are RMSNorm or have its name.",
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
