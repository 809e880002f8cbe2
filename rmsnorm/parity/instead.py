"""What computes the y of another program, where that is not the variant it should be: asked of its outputs alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from rmsnorm.parity.cases import CASES, Array, Data, make, recast
from rmsnorm.parity.judge import Outcome, compare, expect, golden
from rmsnorm.specification.variants import PRESETS, Variant

_CASES: Final = {case.name: case for case in CASES}
_NAMES: Final = 4  # that fit on a line
_OTHERS: Final = {
    "eps_position": ("inside", "outside", "clamp"),
    "rounding": ("before_scale", "after_scale"),
    "scale_offset": (0.0, 1.0),
    "gate_function": ("silu", "sigmoid"),
    "gate_position": ("after", "before"),
    "residual_rounding": ("before", "after"),
    "result_dtype": ("x", "scale", "promote"),
    "eps": (0.0, *(float(f"1e-{power}") for power in range(12, 0, -1)), None),
}


class Output(NamedTuple):
    """The y of one case, and the golden's."""

    case: str
    dtype: str
    y: Array
    golden: Array


def instead(variant: Variant, outputs: Sequence[Output]) -> str:
    """A sentence on which variant's y these are, by the bounds of the parity kit.

    The candidates are the presets; then the variant with one field changed; then the presets with its eps.

    Args:
        variant: the preset that should have computed them, with what it does with a gate in these cases.
        outputs: some that differ from the variant's first, as these rule most candidates out; then the others.

    Returns:
        The sentence. Of candidates that no output tells apart it names four. Empty if the outputs are of cases,
        variants or inputs that this version does not have.

    Example:
        >>> from rmsnorm.numpy_impl import rms_norm
        >>> data = make(_CASES["rows"], "llama", "float32")
        >>> want, got = (rms_norm(data.x, data.scale, variant=name) for name in ("llama", "gemma"))
        >>> instead(PRESETS["llama"], [Output("rows", "float32", got, want)])
        'y is that of gemma'
    """
    cases = [(data, output.y) for output in outputs if (data := _data(variant, output)) is not None]
    if not cases:
        return ""
    for candidates in _candidates(variant):
        if names := [candidate.label for candidate in candidates if _computes(candidate, cases)]:
            more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
            alike = "" if len(names) == 1 else ", which these cases do not tell apart"
            return f"y is that of {' or '.join(names[:_NAMES])}{more}{alike}"
    return "y is that of no preset, and of no variant that differs from this one in one field"


def _data(variant: Variant, output: Output) -> Data | None:
    """The inputs of an output, if this version makes the same ones."""
    if output.case not in _CASES or output.dtype not in _CASES[output.case].dtypes:
        return None
    data = make(_CASES[output.case], variant.name, output.dtype)
    same = golden(data, ["y"])["y"].tobytes() == output.golden.tobytes() and output.y.shape == data.x.shape
    return data if same else None


def _candidates(asked: Variant) -> Iterator[list[Variant]]:
    """The simplest answers first; last what may round anywhere, whose bounds let others pass."""
    of_calls = {name: getattr(asked, name) for name in ("gate_function", "gate_position", "residual_rounding")}
    presets = [preset.replace(**of_calls) for preset in PRESETS.values()]
    exact = [preset for preset in presets if preset.rounding != "input_dtype"]
    yield exact
    yield [asked.replace(**{name: value}) for name, values in _OTHERS.items() for value in values]
    yield [preset.replace(eps=asked.eps) for preset in exact]
    yield [preset for preset in presets if preset not in exact]


def _computes(candidate: Variant, cases: Sequence[tuple[Data, Array]]) -> bool:
    for data, y in cases:
        expected = expect(recast(data, candidate), ["y"])
        if not compare(Outcome({"y": [y]}), expected)[0].passed:
            return False
    return True
