"""Which norms a model has, by its config.json alone: the rows of its family, with the eps of the file."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from rmsnorm.files import read_json
from rmsnorm.specification import errors
from rmsnorm.specification.families import FamilyNorm, families

_OP: Final = "identify"
_WANTED: Final = "the config.json of a model"
_DEEPEST: Final = 4  # parts in parts; transformers has two


class ConfigNorm(NamedTuple):
    """Norms of a model: the part of the configuration and its model_type, what they compute, and where eps is from.

    ``origin`` is "file", "default" where the file has no such field, or "code" where no field has it.
    """

    part: str
    model_type: str
    norm: FamilyNorm
    origin: str

    @property
    def json(self) -> dict[str, Any]:
        row = self.norm._asdict()
        return {"part": self.part, "model_type": self.model_type} | {
            "roles": [*row["roles"]], "class": row["norm"], "variant": row["variant"], "eps": row["eps"],
            "eps_field": row["field"], "eps_origin": self.origin, "size": row["size"],
        }  # fmt: skip

    def __str__(self) -> str:
        field = self.norm.field
        origins = {"file": f"from {field}", "default": f"by default, as the file has no {field}"}
        return self.norm.sentence(origins.get(self.origin, "in the code, whatever the file says"))


def identify_config(path: str | Path) -> tuple[list[ConfigNorm], dict[str, str]]:
    """The norms of the model of a folder with a config.json, and its parts whose model_type is not in the table.

    Nothing but that file is read, and no framework is needed.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError, ValueError: it is no configuration, or its model_type and those of its parts are unknown.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    config = read_json(_OP, path, _WANTED)
    if not isinstance(config, dict):
        raise errors.wrong_type(_OP, str(path), config, f"an object, {_WANTED}", "name another file")
    unknown: dict[str, str] = {}
    norms = list(_norms(config, "", unknown, _DEEPEST))
    if not norms:
        kind = _kind(config, "")
        near = difflib.get_close_matches(str(kind), families(), n=3)
        raise errors.out_of_domain(
            _OP, "model_type", kind, f"one of the {len(families())} families with RMSNorm of docs/which.md",
            "load the model, and ask rmsnorm.conversion.replace(model, dry_run=True) for its norms"
            + (f" (names like it: {', '.join(near)})" if near else ""),
        )  # fmt: skip
    return norms, unknown


def _norms(config: dict[str, Any], path: str, unknown: dict[str, str], depth: int) -> Iterator[ConfigNorm]:
    """The norms of a part of the configuration, then those of the parts in it that the family's rows do not have."""
    kind = _kind(config, path)
    parts = {name: part for name, part in config.items() if isinstance(part, dict) and "model_type" in part}
    kinds = {name: _kind(part, name) for name, part in parts.items()}
    covered, known = set(), kind in families()
    for norm in families().get(kind or "", ()):
        name = (norm.field or norm.size).partition(".")[0]
        if norm.part is not None and kinds.get(name, norm.part) not in (norm.part, None):
            continue  # the file has a part of another family than the one that was asked
        if norm.part is not None:
            covered.add(name)
        yield ConfigNorm(path, str(kind), *_filled(norm, config))
    if path and kind is not None and not known:
        unknown[path] = kind
    for name, part in parts.items():
        if name not in covered and depth:
            yield from _norms(part, f"{path}{'.' if path else ''}{name}", unknown, depth - 1)


def _kind(config: dict[str, Any], path: str) -> str | None:
    kind = config.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise errors.wrong_type(_OP, f"{path}.model_type".strip("."), kind, "a name", "correct the file")
    return kind


def _filled(norm: FamilyNorm, config: dict[str, Any]) -> tuple[FamilyNorm, str]:
    """The row with the eps of the file, and where it is from."""
    if norm.field is None:
        return norm, "code"
    value: Any = config
    for name in norm.field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if value is None:
        return norm, "default"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise errors.wrong_type(_OP, norm.field, value, "a number", "correct the file")
    if not 0 <= value <= sys.float_info.max:
        raise errors.out_of_domain(_OP, norm.field, value, "a finite number >= 0", "correct the file")
    return norm._replace(eps=float(value)), "file"
