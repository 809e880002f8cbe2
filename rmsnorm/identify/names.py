"""What a variant that was found is called: a preset's name, or that of the nearest one and the fields that differ."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from fractions import Fraction
from typing import Any, Final

from rmsnorm.specification.variants import PRESETS, Variant

FIELDS: Final = tuple(f.name for f in fields(Variant) if f.name not in ("name", "scale_name", "source"))
_SHOWN: Final = 6  # presets that are listed
_FAMILIES: Final = ("standard", "llama", "gemma", "t5")  # the best known first: others are one with another eps
_MODERN: Final = ("standard", "llama", "gemma", "t5", "torch", "flax", "mlx", "onnx", "apex", "x_transformers",
                  "transformer_engine", "equinox")  # fmt: skip


def different(variant: Variant, wanted: Variant, observed: Collection[str]) -> list[str]:
    """The observed fields that two variants do not share."""
    return [name for name in FIELDS if name in observed and getattr(variant, name) != getattr(wanted, name)]


def named(variant: Variant, values: Mapping[str, Any], library: str) -> Variant:
    """The variant under the name by which all of the package calls it: that of a preset, or one and what differs.

    It is the first one of ``nearest``, where nothing but eps and a bias differs; its fields then count where they were
    not observed. Else the name says what differs, as "llama but eps_position is 'outside'".

    Args:
        variant: what was found.
        values: of all findings by their names; a field that is None there was not observed.
        library: the package that the norm is of.
    """
    preset = nearest(variant, values, library)[0]
    observed = _observed(values)
    fields = different(variant, preset, observed)
    if {*fields} <= {"eps", "bias"}:
        return preset.replace(**{name: getattr(variant, name) for name in ("eps", "bias") if name in observed})
    return variant.replace(name=f"{preset.name} but {_listed(variant, fields)}")


def described(variant: Variant, values: Mapping[str, Any], library: str = "") -> str:
    """The variant by its name; then the other presets that fit."""
    first, *others = nearest(variant, values, library)
    fields = different(variant, first, _observed(values))
    text = f"the variant {first.name}"
    if fields == ["eps"]:
        text += f" with eps {variant.eps}"
        same = next((each.name for each in ordered() if not different(variant, each, _observed(values))), None)
        text += f" (the same as the preset {same})" if same else ""
    elif fields:
        text += f" but {_listed(variant, fields)}"
    names = ", ".join(preset.name for preset in others[: _SHOWN - 1])
    return f"{text} (or {names}, the same in what was asked)" if names else text


def _observed(values: Mapping[str, Any]) -> set[str]:
    """The fields that were seen; beside a rounding a gain is taken as it is, unless it was seen that it is not."""
    seen = {name for name, value in values.items() if value is not None}
    return seen | {"scale_dtype"} if "rounding" in seen else seen


def _listed(variant: Variant, fields: Iterable[str]) -> str:
    return ", ".join(f"{name} is {written(getattr(variant, name))}" for name in fields)


def ordered() -> list[Variant]:
    """The presets, those that are in use first."""
    return [PRESETS[name] for name in dict.fromkeys([*_MODERN, *PRESETS])]


def aliases(name: str) -> list[str]:
    """The other presets with the numbers of this one.

    >>> aliases("standard"), aliases("llama")
    (['gemma4', 'olmo2', 'keras'], [])
    """
    return [other for other in PRESETS if other != name and not different(PRESETS[other], PRESETS[name], FIELDS)]


def also_known_as(variant: Variant, values: Mapping[str, Any], library: str) -> list[str]:
    """The aliases of the preset that ``described`` names, where at most its eps differs."""
    preset = nearest(variant, values, library)[0]
    return [] if {*different(variant, preset, _observed(values))} - {"eps"} else aliases(preset.name)


def written(value: Any) -> str:
    """The value of a field in a sentence.

    >>> written("floor"), written(Fraction(1, 4))
    ("'floor'", '1/4')
    """
    return str(value) if isinstance(value, Fraction) else repr(value)


def nearest(variant: Variant, values: Mapping[str, Any], library: str = "") -> list[Variant]:
    """The presets that differ in the fewest observable fields: one of them unless they differ in eps at most.

    The first one gives the variant its name. Where several differ in eps at most, that is the preset of the library
    that the norm is of, by which its users know it; else a family that is widely known, as the other ones are it with
    another eps; else the first one with that eps. An old preset is no name for what it does not describe completely.
    """
    observed = _observed(values)
    ranked: dict[tuple[int, bool], list[Variant]] = {}
    for preset in ordered():
        fields = different(variant, preset, observed)
        if not fields or preset.name in (*_MODERN, library):
            ranked.setdefault((len({*fields} - {"eps"}), "eps" in fields), []).append(preset)
    count, _ = best = min(ranked)
    if count:
        return ranked[best][:1]
    hidden = {"eps", "bias"}
    if values.get("gain") is False and not values.get("bias"):
        hidden |= {"scale_offset", "rounding", "result_dtype"}  # of what it does not have
    if values.get("partial") is None:
        hidden.add("partial_rounding")

    def numbers(preset: Variant) -> tuple[Any, ...]:
        return tuple(getattr(preset, name) for name in FIELDS if name not in hidden)

    kinds = {numbers(preset): preset for preset in reversed(ranked[best])}  # the first one of each kind
    fitting = ranked[best] + ranked.get((0, True), [])
    known = [PRESETS[library]] if library in PRESETS else []
    if len(kinds) == 1 and variant.eps is not None:
        known += [PRESETS[name] for name in _FAMILIES]
    first = next((preset for preset in known if preset in fitting), ranked[best][0])
    others = [preset for preset in ranked[best] if preset is kinds[numbers(preset)]]
    return [first, *(preset for preset in others if numbers(preset) != numbers(first))]
