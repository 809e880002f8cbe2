"""What the gains of a checkpoint say of its norms: whether they multiply by w or by 1 + w, and whether they learned.

A gain begins as the number with which the norm passes its rows on unchanged: w = 1, or w = 0 where the gain is 1 + w.
Training moves it, and what stays is a tendency. So each tensor speaks for

    w        if its mean is at least 0.7 and less than 1 % of it is negative;
    1 + w    if its mean is at most 0.3, on either side of 0, and at least 10 % of it is negative, or all of it is 0;

and for neither otherwise. Tensors of one kind, whose names differ in the numbers of the blocks around the norm alone,
are counted together. They fit what more than two thirds of those that speak for something speak for.

The checkpoint fits what more than two thirds of its tensors fit. A kind that fits the other one contradicts that if it
lies where such gains begin: around 0, where it would silence a norm that multiplies by w, or within 0.3 of 1. One that
is far from both may have learned it. Norms that are known to differ are told apart: the gated norm of linear attention,
towers for images and sound, and heads that draft tokens. If all tensors lie around 2, 1 was added twice.

In 16 bits a gain of 1 moves by 2^-8 (bfloat16) or 2^-11 at least, and a smaller step of the optimiser is lost: of gains
that learned, only a few are exactly 1 then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from rmsnorm.identify.gains import read_gains, starred
from rmsnorm.specification.variants import PRESETS, Variant, get_variant

Array = npt.NDArray[Any]
_OP: Final = "gains"
_APART: Final = re.compile(
    r"(linear_attn|ssm|gated?)[._]?norm|visual|vision|audio|image|mtp|nextn|draft|eagle|medusa", re.IGNORECASE
)
Fit = Literal["w", "1 + w", "w + 2", "bias", "unclear"]
_NAMES: Final = 8  # in a sentence; the table has all
_OFFSETS: Final[Mapping[Fit, float]] = {"w": 0.0, "1 + w": 1.0}
_UNTOLD: Final[Mapping[str, str]] = {
    "unclear": "nothing shows whether they are w or 1 + w", "bias": "they have a bias beside them, as in a LayerNorm",
    "w + 2": "they lie around 2: 1 was added twice, once to the file and once by the code that wrote it",
}  # fmt: skip
_LEFT_OUT: Final = "left out when the others were converted?"
_STUCK: Final = 0.25  # of the gains of a kind, exactly 1 beside others that moved
_NEAR: Final = 0.3  # of 1, where gains of a norm that multiplies by w begin
_STEPS: Final = {"bfloat16": (2.0**-8, 2.0**-7), "float16": (2.0**-11, 2.0**-10)}  # below 1 and above it


@dataclass(frozen=True)
class Kind:
    """The gains whose names differ in the numbers of the blocks around the norm alone.

    Attributes:
        name: with a star for each such number.
        count: of tensors.
        shape: of each tensor; the shapes of all where they differ.
        mean: of all elements; ``least`` and ``most`` are the ends of their range.
        negative: share of the elements below 0.
        stuck: share of the elements that are exactly 1.
        dtype: of the tensors.
        others: the names of tensors that speak for the other of w and 1 + w.
        fits: ``w`` or ``1 + w``; ``w + 2`` where 1 was added twice; ``bias`` for a norm with a bias, perhaps a
            LayerNorm; ``unclear``.
    """

    name: str
    count: int
    shape: str
    mean: float
    least: float
    most: float
    negative: float
    stuck: float
    dtype: str
    others: tuple[str, ...]
    fits: Fit

    @property
    def is_apart(self) -> bool:
        """Whether such norms are known to differ from those of the trunk."""
        return bool(_APART.search(self.name))


@dataclass(frozen=True)
class Checkpoint:
    """The gains of a file, and what they say.

    Attributes:
        agrees: with the variant that was asked for; without one, whether they tell one thing; None where they tell
            nothing.
        text: the same in a sentence for each finding.
    """

    path: str
    variant: str | None
    kinds: tuple[Kind, ...]
    agrees: bool | None
    text: str

    @property
    def json(self) -> dict[str, Any]:
        return asdict(self)


def identify_checkpoint(path: str | os.PathLike[str], variant: str | Variant | None = None) -> Checkpoint:
    """Compare the gains of a checkpoint with a variant, or find out whether they are w or 1 + w.

    Only tensors that are named as gains of a norm are read; of safetensors files of any size no others are loaded.
    Quantisation scales, layer scales, batch norms, the matrices within a norm (AdaLN) and the state of an
    optimiser are no gains.

    Args:
        path: a safetensors file or a folder of them, a GGUF file, a NumPy archive, a file of Keras, a checkpoint of
            Orbax.
        variant: a preset or a ``Variant``, of which ``scale_offset`` counts.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is of another form or damaged, or no tensor has the name of a norm's gain.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(f"{folder}/model.npz", **{"layers.0.input_norm.weight": np.ones(8, np.float32)})
        ...     print(identify_checkpoint(f"{folder}/model.npz", "gemma").text)
        gains have mean 1: with gemma's offset 1 every norm's y is 2 times as large (layers.*.input_norm.weight)
    """
    chosen = None if variant is None else get_variant(_OP, variant)
    gains, has_bias = read_gains(path)
    groups: dict[str, list[_Summary]] = {}
    for name, values in gains.items():
        wide = values.astype(np.float64)
        summary = _Summary(name, wide, _speaks_for(wide), name in has_bias, values.dtype.name)
        groups.setdefault(starred(name), []).append(summary)
    kinds = tuple(_kind(name, members) for name, members in sorted(groups.items()))
    agrees, sentences = _conclusions(kinds, chosen)
    chosen_name = None if chosen is None else chosen.name
    return Checkpoint(str(path), chosen_name, kinds, agrees, "\n".join(sentences))


class _Summary(NamedTuple):
    """A gain, and what it says."""

    name: str
    values: Array
    fits: Fit
    has_bias: bool
    dtype: str


def _kind(name: str, members: list[_Summary]) -> Kind:
    spoken = [member.fits for member in members]
    fits: Fit = "bias"
    if not any(member.has_bias for member in members):
        fits = next((fit for fit in _OFFSETS if _is_most(spoken.count(fit), spoken)), "unclear")
    others = [member.name for member in members if fits in _OFFSETS and member.fits != fits and _is_strong(
        member.fits, float(member.values.mean()))]  # fmt: skip
    shapes = dict.fromkeys("x".join(map(str, member.values.shape)) for member in members)
    every = np.concatenate([member.values.ravel() for member in members])
    types = dict.fromkeys(member.dtype for member in members)
    return Kind(
        name, len(members), ", ".join(shapes), float(every.mean()), float(every.min()), float(every.max()),
        float(np.mean(every < 0)), float(np.mean(every == 1)), ", ".join(types), tuple(others), fits,
    )  # fmt: skip


def _is_strong(fits: Fit, mean: float) -> bool:
    """Whether numbers that fit w or 1 + w are where these begin: others may have learned it."""
    return fits == "1 + w" or (fits == "w" and abs(mean - 1) <= _NEAR)


def _is_most(count: int, spoken: list[Fit]) -> bool:
    """Whether so many are more than two thirds of those that speak for w or 1 + w."""
    return 3 * count > 2 * sum(fit in _OFFSETS for fit in spoken)


def _speaks_for(values: Array) -> Fit:
    mean, negative = values.mean(), np.mean(values < 0)
    if mean >= 0.7 and negative < 0.01:
        return "w"
    return "1 + w" if not values.any() or (abs(mean) <= 0.3 and negative >= 0.1) else "unclear"


def _conclusions(kinds: tuple[Kind, ...], variant: Variant | None) -> tuple[bool | None, list[str]]:
    """Whether the kinds agree with a variant, or with each other; and the sentences on them."""
    trunk = [kind for kind in kinds if not kind.is_apart] or [*kinds]
    if all(kind.fits == "w" and 1.7 <= kind.mean <= 2.3 and kind.least > 1 for kind in trunk) and len(trunk) > 1:
        kinds = tuple(replace(kind, fits="w + 2") if kind in trunk else kind for kind in kinds)
        trunk = [kind for kind in kinds if not kind.is_apart]
    spoken: list[Fit] = [kind.fits for kind in trunk for _ in range(kind.count)]
    most = next((fit for fit in _OFFSETS if spoken.count(fit) and _is_most(spoken.count(fit), spoken)), None)
    others = [kind for kind in kinds if most and kind.fits in _OFFSETS and kind.fits != most]
    left_out = [kind for kind in others if not kind.is_apart and _is_strong(kind.fits, kind.mean)]
    sentences = []
    for fit in get_args(Fit):
        if some := [kind for kind in kinds if kind.fits == fit and kind not in others]:
            text = _UNTOLD.get(fit) or _said_of_gains(fit, some, variant)
            sentences.append(f"{text} ({_listed(some)})")
    for kind in others:
        what = "such a norm may differ from the trunk" if kind.is_apart else "such numbers may be learned"
        what = _LEFT_OUT if kind in left_out else what
        sentences.append(f"{kind.name} has mean {kind.mean:.2g} and fits {kind.fits}, unlike the others: {what}")
    for kind in kinds:
        if kind.others:
            sentences.append(f"of {kind.name}, {', '.join(kind.others[:_NAMES])} do not fit {kind.fits}: {_LEFT_OUT}")
    sentences += [_said_of_stuck(kind) for kind in kinds if _is_stuck(kind)]
    if not {*spoken} & {*_OFFSETS, "w + 2"}:
        return None, sentences
    if most is None or left_out or any(kind.others for kind in kinds):
        return False, sentences
    return (True if variant is None else _OFFSETS[most] == variant.scale_offset), sentences


def _listed(some: list[Kind]) -> str:
    names = [kind.name for kind in some]
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return f"{', '.join(names[:_NAMES])}{more}"


def _is_stuck(kind: Kind) -> bool:
    return kind.dtype in _STEPS and kind.stuck >= _STUCK and kind.fits in ("w", "unclear")


def _said_of_stuck(kind: Kind) -> str:
    below, above = _STEPS[kind.dtype]
    all_ = "all" if kind.stuck == 1 else f"{kind.stuck:.0%}"
    return (
        f"{all_} of the gains of {kind.name} are exactly 1, where {kind.dtype} moves by {below:.2g} or {above:.2g} at "
        "least, and smaller steps are lost: train gains in float32, or round stochastically"
    )


def _said_of_gains(fit: Fit, some: list[Kind], variant: Variant | None) -> str:
    """What gains say that fit w or 1 + w."""
    offset = _OFFSETS[fit]
    mean = sum(kind.mean * kind.count for kind in some) / sum(kind.count for kind in some)
    if variant is None:
        names = [name for name, preset in PRESETS.items() if preset.scale_offset == offset][:4]
        said = f"they fit {fit}, as in {', '.join(names)}"
    elif variant.scale_offset == offset:
        said = f"they fit {fit}, as {variant.name} has it"
    else:
        factor = abs((variant.scale_offset + mean) / (offset + mean))
        said = f"with {variant.name}'s offset {variant.scale_offset:g} every norm's y is {factor:.2g} times as large"
    return f"gains have mean {mean:.2g}: {said}"
