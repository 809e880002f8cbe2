"""What a solved variant is called: a preset's name, or that of the nearest one and the fields that differ."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from fractions import Fraction
from typing import Any, Final

from rmsnorm.specification.variants import PRESETS, Variant

FIELDS: Final = tuple(f.name for f in fields(Variant) if f.name not in ("name", "scale_name", "source"))
SHOWN: Final = 6  # presets that are listed
_FAMILIES: Final = ("llama", "gemma", "t5", "standard")  # the best known first: others are one with another eps
_MODERN: Final = ("standard", "llama", "gemma", "t5", "torch", "flax", "mlx", "onnx", "apex", "x_transformers",
                  "transformer_engine", "equinox")  # fmt: skip


def different(variant: Variant, wanted: Variant, observed: Collection[str]) -> list[str]:
    """The observed fields that two variants do not share."""
    return [name for name in FIELDS if name in observed and getattr(variant, name) != getattr(wanted, name)]


def named(variant: Variant, presets: Iterable[Variant], *, unlike: Collection[str], own: Collection[str]) -> Variant:
    """The variant under the name of the first of these presets that has the same values, or under its own name.

    Args:
        variant: what was solved.
        presets: in the order of preference.
        unlike: fields that may have other values; those of the preset then count, but for
        own: fields of the variant that count.
    """
    same = [name for name in FIELDS if name not in unlike]
    for preset in presets:
        if not different(variant, preset, same):
            return preset.replace(**{name: getattr(variant, name) for name in (*same, *own)})
    return variant


def described(variant: Variant, values: Mapping[str, Any]) -> str:
    """The variant by its name, or by the nearest preset and the fields that differ; then the others that fit.

    values: of all findings by their names; a field that is None there was not observed.
    """
    observed = {name for name, value in values.items() if value is not None}
    presets = nearest(variant, values)
    fields = different(variant, presets[0], observed)
    names = [preset.name for preset in presets]
    text = f"the variant {names[0]}"
    if fields == ["eps"]:
        text += f" with eps {variant.eps}"
    elif fields:
        text += " but " + ", ".join(f"{name} is {written(getattr(variant, name))}" for name in fields)
    elif len(names) == 1 and variant.eps is not None:
        family = next((name for name in _FAMILIES if different(variant, PRESETS[name], observed) == ["eps"]), None)
        if family is not None:
            text = f"the variant {family} with eps {variant.eps} (the same as the preset {names[0]})"
    others = f" (or {', '.join(names[1:SHOWN])}, the same in what was asked)" if len(names) > 1 else ""
    return text + others


def aliases(name: str) -> list[str]:
    """The other presets with the numbers of this one.

    >>> aliases("standard"), aliases("llama")
    (['gemma4', 'olmo2', 'keras'], [])
    """
    return [other for other in PRESETS if other != name and not different(PRESETS[other], PRESETS[name], FIELDS)]


def also_known_as(variant: Variant, values: Mapping[str, Any]) -> list[str]:
    """The aliases of the preset that ``described`` names, where at most its eps differs."""
    observed = {name for name, value in values.items() if value is not None}
    preset = nearest(variant, values)[0]
    return [] if set(different(variant, preset, observed)) - {"eps"} else aliases(preset.name)


def written(value: Any) -> str:
    """The value of a field in a sentence.

    >>> written("floor"), written(Fraction(1, 4))
    ("'floor'", '1/4')
    """
    return str(value) if isinstance(value, Fraction) else repr(value)


def nearest(variant: Variant, values: Mapping[str, Any]) -> list[Variant]:
    """The presets that differ in the fewest observable fields: one of them unless they differ in eps at most.

    An old preset is no name for what it does not describe completely.
    """
    observed = {name for name, value in values.items() if value is not None}
    ranked: dict[tuple[int, bool], list[Variant]] = {}
    for name in (*_MODERN, *(name for name in PRESETS if name not in _MODERN)):
        fields = different(variant, PRESETS[name], observed)
        if not fields or name in _MODERN:
            ranked.setdefault((len(set(fields) - {"eps"}), "eps" in fields), []).append(PRESETS[name])
    count, _ = best = min(ranked)
    if count:
        return ranked[best][:1]
    hidden = {"eps", "bias"}
    if values.get("gain") is False and not values.get("bias"):
        hidden |= {"scale_offset", "rounding", "result_dtype"}  # of what it does not have
    if values.get("partial") is None:
        hidden.add("partial_rounding")
    kinds = {tuple(getattr(preset, name) for name in FIELDS if name not in hidden): preset
             for preset in reversed(ranked[best])}  # fmt: skip
    return [preset for preset in ranked[best] if preset in kinds.values()]
