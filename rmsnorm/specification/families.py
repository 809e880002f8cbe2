"""The norms of families of models in transformers, and where their files have what they read. No array library.

tools/families.py asks models for the first table, tools/family_files.py configurations for the second.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple


class FamilyNorm(NamedTuple):
    """Norms of a family of models that compute the same.

    Attributes:
        roles: the last words of their names in the model, such as q_a_layernorm.
        norm: their class.
        variant: the name of the variant that it computes, None where no variant describes it.
        field: the name of eps in config.json, None where eps is in the code.
        eps: the default of that, or what the code has; None where no variant describes the norm.
        size: the field of config.json with the size of a row, or a product of fields; empty if it is not known.
        part: the model_type of the part of the configuration that they belong to, None if that is the whole.
        options: the fields that say whether they are there, each with what it must be (set or not) and is by default.
        gate: the function and the position of its gate, None where it has none.
        in_groups: whether groups of a row are normalised apart.
        gain: whether it has one.
        why_none: why no variant describes it.
    """

    roles: tuple[str, ...]
    norm: str
    variant: str | None
    field: str | None
    eps: float | None
    size: str
    part: str | None
    options: tuple[tuple[str, bool, bool], ...] = ()
    gate: tuple[str, str] | None = None
    in_groups: bool = False
    gain: bool = True
    why_none: str = ""

    @property
    def computes(self) -> str:
        """Its variant, and what it does beside it, in words."""
        return computes(self._asdict())

    def sentence(self, origin: str) -> str:
        """A row of a report; origin: where eps is from."""
        eps = "" if self.eps is None else f", eps {self.eps:g} {origin}"
        rows = f"; rows of {self.size}" if self.size else ""
        return f"{', '.join(self.roles)}: {self.computes}{eps}{rows} ({self.norm})"


def computes(row: Mapping[str, Any]) -> str:
    """What norms compute, in words, from a row of families.json or the fields of a FamilyNorm.

    >>> computes({"variant": "llama", "gate": ("silu", "before"), "in_groups": True})
    'llama, with a silu gate before the norm, in groups'
    """
    if row["variant"] is None:
        return f"none: {row['why_none']}"
    gate = f", with a {row['gate'][0]} gate {row['gate'][1]} the norm" if row.get("gate") else ""
    groups = ", in groups" if row.get("in_groups") else ""
    return f"{row['variant']}{gate}{groups}{'' if row.get('gain', True) else ', without a gain'}"


_NAMES = {"class": "norm", "default": "eps"}  # of a row of the file that are others here


@lru_cache(maxsize=1)
def families() -> dict[str, tuple[FamilyNorm, ...]]:
    """The families of models whose norms were asked, by their model_type, from families.json.

    >>> [(norm.roles[0], norm.field, norm.eps) for norm in families()["deepseek_v3"]][-2:]
    [('kv_a_layernorm', None, 1e-06), ('input_layernorm', 'rms_norm_eps', 1e-06)]
    """
    return {
        name: tuple(
            FamilyNorm(
                tuple(row.pop("roles")),
                options=tuple((field, *states) for field, states in row.pop("options", {}).items()),
                gate=tuple(row.pop("gate")) if "gate" in row else None,
                **{_NAMES.get(key, key): value for key, value in row.items()},
            )
            for row in rows
        )
        for name, rows in _document("families.json")["families"].items()
    }


@lru_cache(maxsize=1)
def files() -> dict[str, dict[str, Any]]:
    """What is particular to a config.json, by its model_type: its parts and where a field may be.

    ``parts``: the ``kind`` (model_type) of a part, whether a file may say ``any`` other one, and what it calls them
    (``named``); ``optional`` parts may be missing. ``places``: the paths in a file that a field is taken from, the
    first one that is there; ``flat``: those where the file does not have the part that the field belongs to.

    >>> files()["qwen2_5_vl"]["flat"], files()["lfm3"]["places"]
    ({'text_config.rms_norm_eps': ['rms_norm_eps']}, {'norm_eps': ['rms_norm_eps', 'norm_eps']})
    """
    rows: dict[str, dict[str, Any]] = _document("family_files.json")["files"]
    return rows


@lru_cache(maxsize=1)
def _spelled() -> dict[str, str]:
    """The known model_type by its letters and digits alone, and by the classes of models that are named otherwise."""
    document = _document("family_files.json")
    known = {_letters(name): name for name in sorted({*families(), *files()}, reverse=True)}
    return {_letters(text): kind for text, kind in document["named"].items()} | known | document["architectures"]


def family_of(name: str) -> str | None:
    """The model_type that is known by a name, which may be an architecture, or None.

    >>> family_of("LlamaForCausalLM"), family_of("Qwen3-Next"), family_of("KimiK2ForCausalLM"), family_of("MyModel")
    ('llama', 'qwen3_next', 'deepseek_v3', None)
    """
    if name in families() or name in files():
        return name
    return _spelled().get(name) or _spelled().get(_letters(re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", name)))


def _letters(name: str) -> str:
    return re.sub("[-_. ]", "", name).lower()


def _document(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return document


def family_named(name: str) -> str | None:
    """The model_type that is meant, in any spelling and with or without _text, or None.

    >>> family_named("Qwen3"), family_named("gemma3n"), family_named("llama-5")
    ('qwen3', 'gemma3n_text', None)
    """
    word = name.lower().replace("-", "_")
    return next((known for known in (name, word, f"{word}_text") if known in families()), None)
