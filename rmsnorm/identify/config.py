"""Which norms a model has, by its config.json alone: the rows of its family, with the eps of the file."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from rmsnorm.files import read_json
from rmsnorm.specification import errors
from rmsnorm.specification.families import FamilyNorm, families, family_of, files

_OP: Final = "identify"
_WANTED: Final = "the config.json of a model"
_DEEPEST: Final = 4  # parts in parts; transformers has two
_ABSENT: Final = object()


class ConfigNorm(NamedTuple):
    """Norms of a model: the part of the configuration and its model_type, what they compute, and where eps is from.

    ``norm.field`` is the path of eps in the file. ``origin`` is "file", "default" where the file has no such field, or
    "code" where no field has it. ``named_by`` is what said the model_type: "model_type", "architectures" or "default".
    """

    part: str
    model_type: str
    named_by: str
    norm: FamilyNorm
    origin: str

    @property
    def json(self) -> dict[str, Any]:
        row = self.norm._asdict()
        return {"part": self.part, "model_type": self.model_type, "model_type_origin": self.named_by} | {
            "roles": [*row["roles"]], "class": row["norm"], "variant": row["variant"],
            "computes": self.norm.computes, "eps": row["eps"],
            "eps_field": row["field"], "eps_origin": self.origin, "size": row["size"],
        }  # fmt: skip

    def __str__(self) -> str:
        field = self.norm.field
        origins = {"file": f"from {field}", "default": f"by default, as the file has no {field}"}
        return self.norm.sentence(origins.get(self.origin, "in the code, whatever the file says"))


def identify_config(path: str | Path) -> tuple[list[ConfigNorm], dict[str, str]]:
    """The norms of the model of a folder with a config.json, and its parts whose model_type is not in the table.

    Nothing but that file is read, and no framework is needed. Where the file has no known model_type, its
    ``architectures`` say which model it is. Norms that its options take away are left out.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError, ValueError: it is no configuration, or its model_type and those of its parts are unknown.
    """
    path = _file(Path(path))
    config = read_json(_OP, path, _WANTED)
    if not isinstance(config, dict):
        raise errors.wrong_type(_OP, str(path), config, f"an object, {_WANTED}", "name another file")
    unknown: dict[str, str] = {}
    norms = list(_norms(config, "", *_kind(config, ""), unknown))
    if not norms:
        kind, models = config.get("model_type"), config.get("architectures")
        near = difflib.get_close_matches(str(kind), families(), n=3)
        raise errors.out_of_domain(
            _OP, "model_type", kind, f"one of the {len(families())} families with RMSNorm of docs/variants.md",
            "load the model, and ask rmsnorm.conversion.replace(model, dry_run=True) for its norms"
            + (f" (names like it: {', '.join(near)})" if near else "")
            + (f"; no family has the architectures {models}, give the model_type that they share" if models else ""),
        )  # fmt: skip
    return norms, unknown


def _file(path: Path) -> Path:
    """The config.json that a folder or a file means.

    Raises:
        FileNotFoundError: there is none.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise FileNotFoundError(
            f"{_OP}: {file} is missing, expected {_WANTED}; name a folder on this machine that has one: of an adapter "
            "that of its base model, of a cache of the Hugging Face hub snapshots/COMMIT"
        )
    return file


def _norms(
    root: dict[str, Any], path: str, kind: str | None, named_by: str, unknown: dict[str, str]
) -> Iterator[ConfigNorm]:
    """The norms of a part of the configuration, then those of the parts in it that the family's rows do not have."""
    prefix = f"{path}." if path else ""
    config = _at(root, path)
    kinds = {name: _part_kind(config, kind, name, prefix) for name in _parts(config, kind)}
    covered = set()
    for norm in families().get(kind or "", ()):
        name = (norm.field or norm.size).partition(".")[0]
        if norm.part is not None:
            if kinds.get(name, (norm.part,))[0] != norm.part:
                continue  # the file has a part of another family than the one that was asked
            covered.add(name)
        if _there(norm, root, prefix):
            yield ConfigNorm(path, str(kind), named_by, *_filled(norm, root, prefix))
    if path and kind and config and kind not in families() and not files().get(kind, {}).get("parts"):
        unknown[path] = kind
    for name, (part, how) in kinds.items():
        if name not in covered and path.count(".") < _DEEPEST:
            yield from _norms(root, prefix + name, part, how, unknown)


def _parts(config: dict[str, Any], kind: str | None) -> list[str]:
    """The names of the parts that a model of this kind reads; of an unknown one, all that say their model_type."""
    if kind in families() or kind in files():
        rows = files().get(str(kind), {}).get("parts", {})
        return [name for name, row in rows.items() if not row.get("optional") or isinstance(config.get(name), dict)]
    return [name for name, part in config.items() if isinstance(part, dict) and "model_type" in part]


def _kind(config: dict[str, Any], path: str) -> tuple[str | None, str]:
    """The model_type of a file, and what says it: that, or its architectures."""
    kind, models = config.get("model_type"), config.get("architectures")
    if kind is not None and not isinstance(kind, str):
        raise errors.wrong_type(_OP, f"{path}model_type", kind, "a name", "correct the file")
    if known := family_of(kind or ""):
        return known, "model_type"
    if models is not None and (not isinstance(models, list) or not all(isinstance(model, str) for model in models)):
        raise errors.wrong_type(_OP, f"{path}architectures", models, "a list of names", "correct the file")
    known = next(filter(None, map(family_of, models or ())), None)
    return (known, "architectures") if known else (kind, "model_type")


def _part_kind(config: dict[str, Any], kind: str | None, name: str, prefix: str) -> tuple[str | None, str]:
    """The model_type that a part has as transformers reads the file, which may say another one."""
    row = files().get(str(kind), {}).get("parts", {}).get(name, {"kind": None, "any": True})
    part = config.get(name)
    if not row.get("any") or not isinstance(part, dict):
        return row["kind"], "default"
    said, how = _kind(part, f"{prefix}{name}.")
    return (row["kind"], "default") if said is None else (row.get("named", {}).get(part.get("model_type"), said), how)


def _at(config: Any, path: str) -> dict[str, Any]:
    """The object at a path, empty where there is none."""
    for name in path.split(".") if path else ():
        config = config.get(name) if isinstance(config, dict) else None
    return config if isinstance(config, dict) else {}


def _read(config: dict[str, Any], kind: str | None, field: str, prefix: str = "") -> tuple[Any, str]:
    """What transformers takes for a field and its path in the file; _ABSENT with the path of its first place."""
    name, _, rest = field.partition(".")
    flat = rest and not isinstance(config.get(name), dict)
    places = files().get(str(kind), {}).get("flat" if flat else "places", {}).get(field, [field])
    for place in places:
        part, _, key = place.rpartition(".")
        if place == field and rest and not flat:
            value, path = _read(config[name], _part_kind(config, kind, name, prefix)[0], rest, f"{prefix}{name}.")
        else:
            value, path = _at(config, part).get(key, _ABSENT), prefix + place
        if value is not _ABSENT:
            return value, path
    return _ABSENT, path if places == [field] else prefix + places[-1]


def _there(norm: FamilyNorm, root: dict[str, Any], prefix: str) -> bool:
    """Whether the options of the file leave the norm in the model."""
    for field, wanted, default in norm.options:
        value, _ = _read(root, _kind(root, "")[0], prefix + field)
        if (default if value is _ABSENT else value is not None and value is not False) != wanted:
            return False
    return True


def _filled(norm: FamilyNorm, root: dict[str, Any], prefix: str) -> tuple[FamilyNorm, str]:
    """The row with the eps of the file and its path there, and where it is from."""
    if norm.field is None:
        return norm, "code"
    value, path = _read(root, _kind(root, "")[0], prefix + norm.field)
    norm = norm._replace(field=path)
    if value is _ABSENT or value is None:
        return norm, "default"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise errors.wrong_type(_OP, path, value, "a number", "correct the file")
    if not 0 <= value <= sys.float_info.max:
        raise errors.out_of_domain(_OP, path, value, "a finite number >= 0", "correct the file")
    return norm._replace(eps=float(value)), "file"
