"""The norms of families of models in transformers: a table that docs/families.py measures. No array library."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple


class FamilyNorm(NamedTuple):
    """Norms of a family of models that compute the same.

    Attributes:
        roles: the last words of their names in the model, such as q_a_layernorm.
        norm: their class.
        variant: what that computes: the name of a variant, and what it does beside it.
        field: the name of eps in config.json, None where eps is in the code.
        eps: the default of that, or what the code has; None where no variant describes the norm.
        size: the field of config.json with the size of a row, or a product of fields; empty if it is not known.
        part: the model_type of the part of the configuration that they belong to, None if that is the whole.
    """

    roles: tuple[str, ...]
    norm: str
    variant: str
    field: str | None
    eps: float | None
    size: str
    part: str | None

    @property
    def preset(self) -> str | None:
        """The variant's name alone."""
        return None if self.variant.startswith("none:") else self.variant.split(",")[0].split(" but ")[0]

    def sentence(self, origin: str) -> str:
        """A row of a report; origin: where eps is from."""
        eps = "" if self.eps is None else f", eps {self.eps:g} {origin}"
        rows = f"; rows of {self.size}" if self.size else ""
        return f"{', '.join(self.roles)}: {self.variant}{eps}{rows} ({self.norm})"


@lru_cache(maxsize=1)
def families() -> dict[str, tuple[FamilyNorm, ...]]:
    """The families of models whose norms were asked, by their model_type, from families.json.

    >>> [(norm.roles[0], norm.field, norm.eps) for norm in families()["deepseek_v3"]][-2:]
    [('kv_a_layernorm', None, 1e-06), ('input_layernorm', 'rms_norm_eps', 1e-06)]
    """
    document = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))["families"]
    return {
        name: tuple(FamilyNorm(tuple(row.pop("roles")), *row.values()) for row in rows)
        for name, rows in document.items()
    }


def family_named(name: str) -> str | None:
    """The model_type that is meant, in any spelling and with or without _text, or None.

    >>> family_named("Qwen3"), family_named("gemma3n"), family_named("llama-5")
    ('qwen3', 'gemma3n_text', None)
    """
    word = name.lower().replace("-", "_")
    return next((known for known in (name, word, f"{word}_text") if known in families()), None)
