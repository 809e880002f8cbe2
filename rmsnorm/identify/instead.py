"""What explains arrays that are not what a variant gives: another variant, or a mistake that is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from rmsnorm.identify import mending, mistakes, names
from rmsnorm.identify.candidates import HOLDS, Candidate, of_call
from rmsnorm.identify.gradients import explanation
from rmsnorm.identify.mistakes import Mistake
from rmsnorm.parity.cases import Array, Data, recast
from rmsnorm.specification.variants import Variant

_EPS: Final = (1e-5, 1e-6, 1e-8, 1e-12, 0.0, None)  # that somebody may have taken


def explained(quantity: str, data: Data, got: Array) -> str:
    """What y or a gradient of a call is, as far as one other choice or one mistake says it; else empty."""
    if quantity == "h":
        return ""
    if quantity != "y":
        return explanation(quantity, data, got)
    if got.size and not got.any():
        return "all of these rows are 0"
    gate = None if data.gate is None else data.variant.gate_function
    for words, variant in _variants(data):
        own = recast(data, variant)
        is_held = own.call.result_dtype == got.dtype.name and _holds(Candidate(variant, activation=gate), own, got)
        if is_held:
            return words
    if says := mistaken(_mistakes(data), data, got):
        return says
    is_centred = any(_holds(of_call(data).of(eps=eps).but(mistakes.CENTRED), data, got) for eps in _EPS)
    return "the mean is subtracted: it is LayerNorm" if is_centred else ""


def mistaken(known: Iterable[Mistake], data: Data, got: Array) -> str:
    """The first of these mistakes that explains y, and more of it than the variant alone; empty where none does."""
    candidate = of_call(data)
    # Of one element more, at least: an element alone may be less than what may be elsewhere.
    least = max(HOLDS, candidate.gives(data, got).mean() + 0.5 / got.size) if got.size else HOLDS
    for mistake in known:
        if (data.gate is not None or "gate" not in mistake.says) and (
            candidate.but(mistake).gives(data, got).mean() >= least
        ):
            return mistake.says.removeprefix(f"for {data.x.dtype.name} x, ")
    return ""


def _holds(candidate: Candidate, data: Data, got: Array) -> bool:
    return bool(candidate.gives(data, got).mean() >= HOLDS)


def _variants(data: Data) -> Iterator[tuple[str, Variant]]:
    """Other variants, those that differ least in what shows first, in words."""
    asked, unseen = data.variant, {"bias"}
    if data.gate is None:
        unseen |= {"gate_function", "gate_position"}
    if data.residual is None:
        unseen |= {"residual_rounding"}
    if data.scale is None or data.scale.dtype == data.x.dtype:
        unseen |= {"result_dtype", "scale_dtype"}
    presets = [preset.replace(eps=asked.eps, bias=asked.bias) for preset in names.ordered()]

    def different(preset: Variant) -> list[str]:
        return [name for name in names.different(asked, preset, names.FIELDS) if name not in unseen]

    # Where every operation rounds, intervals are so wide that other norms fit, too.
    others = [preset for preset in presets if different(preset) and preset.rounding != "input_dtype"]
    for preset in sorted(others, key=lambda preset: len(different(preset))):
        values = [(name, getattr(preset, name)) for name in different(preset)]
        words = [mending.seen(name, value) or f"{name} is {names.written(value)}" for name, value in values]
        yield f"it is {preset.name}: {', '.join(words)}", preset
    for eps in _EPS:
        yield f"its eps is {'that of the arithmetic' if eps is None else eps}", asked.replace(eps=eps)
    for offset in (0.0, 1.0, 2.0):
        words = ["1 is added to the gain twice" if offset == 2 else mending.seen("scale_offset", offset)]
        yield words[0], asked.replace(scale_offset=offset)
    for preset in names.ordered():
        if preset.rounding != "input_dtype":
            yield f"it is {preset.name} with eps {preset.eps}", preset.replace(bias=asked.bias)


def _mistakes(data: Data) -> Iterator[Mistake]:
    """The mistakes that change y."""
    dtype, n = data.x.dtype.name, int(data.call.n)
    yield from (mistakes.GAIN_DROPPED, mistakes.GAIN_FIRST, mistakes.BIAS_DROPPED, mistakes.OF_SUM)
    yield mistakes.divisor("n - 1", lambda s: max(s.k - 1, 1))
    yield from mistakes.of_statistic(dtype)
    yield from mistakes.of_product(dtype)
    yield from mistakes.of_options([name for name in ("mask", "residual", "gate") if getattr(data, name) is not None],
                                   dtype)  # fmt: skip
    yield from mistakes.of_x(dtype)
    yield from mistakes.of_range()
    yield from mistakes.of_width(n)
    yield from mistakes.of_rows(data.x.size // max(1, n))
