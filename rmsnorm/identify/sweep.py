"""Every RMSNorm of a package: read from its source, built small, identified, and counted by what it computes."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any, Final

from rmsnorm.identify.identity import Identity
from rmsnorm.identify.worker import identities
from rmsnorm.targets.target import NoTarget

_NAMED: Final = re.compile(r"rms_?norm", re.IGNORECASE)
_NORM: Final = re.compile(r"Norm$")
# the name of a class and its body, which ends at the next line without an indent
_CLASS: Final = re.compile(r"^class (\w+)[^\n]*\n((?:(?:[ \t][^\n]*)?\n)+)", re.MULTILINE)
_CALL: Final = re.compile(r"^[ \t]+def (?:forward|call|__call__)\b", re.MULTILINE)
_ROOT: Final = re.compile(r"rsqrt|sqrt|-0\.5")


@dataclass(frozen=True)
class Sweep:
    """The RMSNorms of a package.

    Attributes:
        package, version: of the distribution.
        clusters: what the classes compute, with their names, the largest cluster first.
        refused: (class, reason) of those that could not be built or called.
        others: how many classes without RMSNorm in their name were identified and are something else.
    """

    package: str
    version: str
    clusters: tuple[tuple[str, tuple[str, ...]], ...]
    refused: tuple[tuple[str, str], ...]
    others: int

    @property
    def json(self) -> dict[str, Any]:
        return {
            "package": self.package,
            "version": self.version,
            "clusters": [
                {"computes": text, "count": len(names), "classes": list(names)} for text, names in self.clusters
            ],
            "refused": [{"class": name, "why": reason} for name, reason in self.refused],
            "others": self.others,
        }

    @property
    def classes(self) -> list[str]:
        """Those of all clusters."""
        return [name for _, names in self.clusters for name in names]

    def markdown(self, left: Mapping[str, str | None]) -> str:
        """The counts as a table, with what replace does with each class: None, or why it leaves it."""
        count, replaced = len(self.classes), sum(left[name] is None for name in self.classes)
        rows = [
            f"# The RMSNorms of {self.package} {self.version}",
            "",
            f"This page says what each RMSNorm class of {self.package} computes.",
            f"`rmsnorm sweep {self.package} --markdown docs/identify.md` writes it: this command makes small",
            f"instances of the classes, calls them, and looks at their results alone. {count} classes are RMSNorm or",
            f"have its name. Each of the {len(self.clusters)} rows has the classes that compute the same.",
            f"`rmsnorm.conversion.replace` can replace {replaced} of them.",
            "",
            "| classes | what they compute | examples | replace |",
            "| ---: | --- | --- | --- |",
        ]
        for text, names in self.clusters:
            examples = ", ".join(f"`{name.split(':')[1]}`" for name in names[:3])
            rows.append(f"| {len(names)} | {text} | {examples} | {_outcomes([left[name] for name in names])} |")
        rows += ["", f"Not called: {len(self.refused)}.", ""] if self.refused else [""]
        rows += [f"- `{name.split(':')[1]}`: {reason.replace(name, 'it')}" for name, reason in self.refused]
        return "\n".join(rows).rstrip() + "\n"


def _outcomes(left: list[str | None]) -> str:
    """Of a cluster: yes, or why not, with the number where there are several."""
    counts = Counter("yes" if why is None else f"no: {why}" for why in left)
    return "; ".join(outcome if count == len(left) else f"{count} {outcome}" for outcome, count in counts.most_common())


def find(package: str) -> tuple[list[str], list[str]]:
    """Classes of a package as module:attribute: those named RMSNorm, and other norms with a root in their source.

    Raises:
        NoTarget: there is no such package.
    """
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin:
        raise NoTarget(
            f"identify: package {package!r} is not installed, expected one that can be imported; check the name"
        )
    root = Path(spec.origin)
    files = sorted(root.parent.rglob("*.py")) if root.name == "__init__.py" else [root]
    named: list[str] = []
    others: list[str] = []
    for file in files:
        if "test" in file.name or "tests" in file.parts:
            continue
        text = file.read_text(errors="ignore")
        if "Norm" not in text and not _NAMED.search(text):
            continue
        parts = file.relative_to(root.parent).with_suffix("").parts if root.name == "__init__.py" else ()
        if any(part.startswith("modular_") for part in parts):
            continue  # transformers generates its modeling files from these
        module = ".".join([package, *(part for part in parts if part != "__init__")])
        for name, body in _CLASS.findall(text):
            if _CALL.search(body) and _NAMED.search(name):
                named.append(f"{module}:{name}")
            elif _CALL.search(body) and _NORM.search(name) and _ROOT.search(body):
                others.append(f"{module}:{name}")
    return named, others


def sweep(
    package: str,
    *,
    time_limit: float,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> Sweep:
    """Identify every class with RMSNorm in its name, and the other norms of the package that are one.

    Raises:
        NoTarget: there is no such package.
    """
    named, others = find(package)
    names = [*named, *others]
    clusters: dict[str, list[str]] = {}
    refused: list[tuple[str, str]] = []
    something_else = 0
    for done, (name, result) in enumerate(identities(names, time_limit=time_limit, **options), start=1):
        on_progress(done, len(names))
        if isinstance(result, Identity) and result.kind == "rmsnorm":
            clusters.setdefault(result.cluster, []).append(name)
        elif name in others:
            something_else += 1
        elif isinstance(result, Identity) and result.answered:
            clusters.setdefault(result.cluster, []).append(name)
        else:
            refused.append((name, result.defects[0] if isinstance(result, Identity) else result))
    ordered = sorted(clusters.items(), key=lambda entry: (-len(entry[1]), entry[0]))
    largest_first = tuple((text, tuple(classes)) for text, classes in ordered)
    return Sweep(package, _version(package), largest_first, tuple(refused), something_else)


def _version(package: str) -> str:
    distributions: Mapping[str, list[str]] = packages_distributions()
    try:
        return version(next(iter(distributions.get(package.split(".")[0], [package]))))
    except PackageNotFoundError:
        return ""
