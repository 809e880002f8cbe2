"""What the gains of a checkpoint say of its norms: whether they multiply by w or by 1 + w.

A gain begins as the number with which the norm passes its rows on unchanged: w = 1, or w = 0 where the gain is 1 + w.
Training moves it, and what stays is a tendency. So each tensor speaks for

    w        if its mean is at least 0.7 and less than 1 % of it is negative;
    1 + w    if its mean is at most 0.3, on either side of 0, and at least 10 % of it is negative, or all of it is 0;

and for neither otherwise. Tensors of one kind, whose names differ in the numbers of the blocks around the norm alone,
are counted together. They fit what more than two thirds of those that speak for something speak for.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from rmsnorm import files
from rmsnorm.files import check_expansion, check_kind, check_regular, reading, tensors
from rmsnorm.specification import errors
from rmsnorm.specification.variants import PRESETS, Variant, get_variant

_OP: Final = "gains"
_WANTED: Final = (
    "a .safetensors, .npz, .keras or .weights.h5 file, a folder of safetensors files or an Orbax checkpoint"
)
_LARGEST: Final = 2**24  # elements of a gain
_AXES: Final = 5  # of a gain at most: (C, 1, 1, 1) in models of video, (1, C, 1, 1, 1) in others
_GAIN: Final = re.compile(r"^(weight|scale|gamma|gain|g|alpha)$|norm_(weight|scale|gamma)$|^new_std$|_ln_?s$")
_NORM: Final = re.compile(r"norm|(^|_)ln(_|\d|f|$)|^rms", re.IGNORECASE)
_OTHER: Final = re.compile(r"(batch|group|instance|weight|spectral)_?norm|^bn\d*$", re.IGNORECASE)
_MATRIX: Final = re.compile(r"(norm|ln).*(linear|dense|proj|fc|mlp|conv|qkv|emb|lora|modul)", re.IGNORECASE)
_TRAINER: Final = re.compile(r"^(optim\w*|opt_state|adam\w*|exp_avg\w*|momentum|velocity)$", re.IGNORECASE)
_MOMENTS: Final = ("m", "v", "mu", "nu")  # of a trainer where they come first; elsewhere v may be the values
_OF_BATCHES: Final = ("running_mean", "running_var", "moving_mean", "moving_variance", "mean", "var")
_BIASES: Final = {
    "weight": ("bias",), "scale": ("bias",), "gamma": ("beta", "bias"), "gain": ("bias",), "g": ("b",), "0": ("1",),
    "alpha": ("beta", "bias"),
}  # fmt: skip

Fit = Literal["w", "1 + w", "bias", "unclear"]
_NAMES: Final = 8  # in a sentence; the table has all
_READERS: Final[dict[str, Callable[[str, Path], tensors.Tensors]]] = {
    ".safetensors": tensors.safetensors,
    ".npz": tensors.npz,
    ".keras": tensors.keras,
    ".weights.h5": tensors.keras,
}
_OFFSETS: Final[Mapping[str, float]] = {"w": 0.0, "1 + w": 1.0}
_UNTOLD: Final[Mapping[str, str]] = {
    "unclear": "nothing shows whether they are w or 1 + w", "bias": "they have a bias beside them, as in a LayerNorm",
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """The gains whose names differ in the numbers of the blocks around the norm alone.

    Attributes:
        name: with a star for each such number.
        count: of tensors.
        shape: of each tensor; the shapes of all where they differ.
        mean: of all elements; ``least`` and ``most`` are the ends of their range.
        negative: share of the elements below 0.
        fits: ``w`` or ``1 + w``; ``bias`` for a norm with a bias, perhaps a LayerNorm; ``unclear``.
    """

    name: str
    count: int
    shape: str
    mean: float
    least: float
    most: float
    negative: float
    fits: Fit


@dataclass(frozen=True)
class Checkpoint:
    """The gains of a file, and what they say.

    Attributes:
        agrees: with the variant that was asked for; without one, whether they tell anything; None where they do not.
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
        path: a safetensors file or a folder of them, a NumPy archive, a file of Keras, a checkpoint of Orbax.
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
    shapes, tensor = _read(Path(path))
    for name in filter(lambda name: not name.isprintable(), shapes):  # it would be printed
        raise errors.InputValueError(f"{_OP}: a tensor of {path} has the name {name!r:.80}, expected printable words")
    names = [name for name, shape in shapes.items() if _is_gain(name, shape, shapes)]
    with reading(_OP, Path(path), _WANTED):
        check_expansion(sum(8 * math.prod(shapes[name]) for name in names), _size(Path(path)))
    groups: dict[str, list[_Summary]] = {}
    for name in names:
        values = tensor(name)
        if values.dtype.kind in "fV":  # V: the formats that NumPy lacks
            groups.setdefault(starred(name), []).append(_summary(name, values.astype(np.float64), shapes))
    if not groups:
        some = ", ".join(list(shapes)[:4]) or "none"
        raise errors.InputValueError(
            f"{_OP}: {path} has no gain of a norm among its {len(shapes)} tensors, expected a name such as "
            f"layers.0.input_layernorm.weight; its names are {some}"
        )
    kinds = tuple(_kind(name, members) for name, members in sorted(groups.items()))
    agrees, sentences = _conclusions(kinds, chosen)
    chosen_name = None if chosen is None else chosen.name
    return Checkpoint(str(path), chosen_name, kinds, agrees, "\n".join(sentences))


def _read(path: Path) -> tensors.Tensors:
    if (path / "_CHECKPOINT_METADATA").is_file():
        return tensors.orbax(_OP, path, _size(path))
    if path.is_dir():
        paths = sorted(path.glob("*.safetensors"))
        for file in paths:
            check_regular(_OP, file, _WANTED)
        if paths:
            return _together([tensors.safetensors(_OP, file) for file in paths])
    else:
        check_regular(_OP, path, _WANTED)
        for suffix, read in _READERS.items():
            if path.name.endswith(suffix):
                return read(_OP, path)
        check_kind(_OP, path, _WANTED, files.ZIP, files.SAFETENSORS, files.HDF5, files.PICKLE)
    fix = "save it as one of these; files of pickle (.pt, .bin, .ckpt) are never read"
    raise errors.out_of_domain(_OP, "checkpoint", str(path), _WANTED, fix)


def _together(parts: list[tensors.Tensors]) -> tensors.Tensors:
    readers = {name: tensor for shapes, tensor in parts for name in shapes}
    every = {name: shape for shapes, _ in parts for name, shape in shapes.items()}
    return every, lambda name: readers[name](name)


def _size(path: Path) -> int:
    parts = path.rglob("*") if path.is_dir() else [path]
    return sum(part.stat().st_size for part in parts if part.is_file())


def starred(name: str) -> str:
    """The name of a tensor with a star for each number of a block; that in the norm's own name tells it from others.

    ``blocks.3.norm1.weight`` is of ``blocks.*.norm1.weight``; Keras counts all layers of a class, whatever they are.
    """
    *above, last = re.split(r"(?<=[./])", name)
    own = -2 if above[-1:] == ["vars/"] else -1
    return "".join([*(re.sub(r"\d+", "*", part) for part in above[:own]), *above[own:], last])


def _is_gain(name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a tensor is the gain of a norm by its name and shape, among the names and shapes of the others."""
    parts = re.split(r"[./]", name)
    *above, last = parts
    prefix = name[: len(name) - len(last)]
    in_keras = above[-1:] == ["vars"]
    if in_keras:  # Keras numbers the weights of a layer
        above = above[:-1]
    if not (last == "0" if in_keras else _GAIN.search(last)):
        return False
    if any(_OTHER.search(part) or _TRAINER.search(part) for part in parts) or parts[0] in _MOMENTS:
        return False
    others = ("2", "3") if in_keras else _OF_BATCHES
    if any(prefix + other in shapes for other in others):
        return False
    if not 1 <= len(shape) <= _AXES or not 0 < math.prod(shape) <= _LARGEST:
        return False
    if last == "alpha" and (shape == (1,) or any(prefix + gain in shapes for gain in ("weight", "gamma", "scale"))):
        return False  # a factor: of LoRA, of dynamic tanh
    own = bool(re.search(r"norm_|^new_std$|_ln_?s$", last))
    layer = above[-1] if above else ""
    if layer.isdigit():  # in a list
        layer = above[-2] if len(above) > 1 else ""
    # the layer itself: norm.weight, norm.scale.value, layer_norm_weight, cell_lns
    if own or _NORM.search(layer):
        return own or len(shape) == 1 or not _is_matrix(layer, prefix, last, shape, shapes)
    # or the one around it, whose parts may also be matrices, as those of AdaLN are
    return len(shape) == 1 and any(_NORM.search(part) for part in above[-2:])


def _is_matrix(
    layer: str, prefix: str, last: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]
) -> bool:
    """Whether a tensor of several axes is the weight of a Linear or a Conv that has a norm in its name.

    A gain has a bias of its own shape. A layer that is a norm and a Linear in one has a gain beside the matrix.
    """
    if last not in ("weight", "0"):
        return False
    biases = [shapes[prefix + bias] for bias in _BIASES[last] if prefix + bias in shapes]
    is_named = bool(_MATRIX.search(layer)) and sum(size > 1 for size in shape) > 1
    return is_named or any(bias != shape for bias in biases) or f"{prefix}layer_norm_weight" in shapes


def _has_bias(name: str, shapes: Mapping[str, Any]) -> bool:
    last = re.split(r"[./]", name)[-1]
    prefix = name[: len(name) - len(last)]
    others = [*_BIASES.get(last, ()), last.replace("weight", "bias"), last.replace("lns", "lnb"), "new_mean"]
    return any(other != last and prefix + other in shapes for other in others)


class _Summary(NamedTuple):
    """A gain, and what it says."""

    values: np.ndarray[Any, Any]
    fits: Fit
    has_bias: bool


def _summary(name: str, values: np.ndarray[Any, Any], shapes: Mapping[str, Any]) -> _Summary:
    if not np.isfinite(values).all():
        raise errors.InputValueError(
            f"{_OP}: {name} has NaN or infinity, expected finite gains; take another checkpoint"
        )
    return _Summary(values, _speaks_for(values), _has_bias(name, shapes))


def _kind(name: str, members: list[_Summary]) -> Kind:
    spoken = [member.fits for member in members]
    plain, shifted = spoken.count("w"), spoken.count("1 + w")
    fits: Fit = "unclear"
    if any(member.has_bias for member in members):
        fits = "bias"
    elif 3 * plain > 2 * (plain + shifted):
        fits = "w"
    elif 3 * shifted > 2 * (plain + shifted):
        fits = "1 + w"
    shapes = dict.fromkeys("x".join(map(str, member.values.shape)) for member in members)
    every = np.concatenate([member.values.ravel() for member in members])
    mean, negative = float(every.mean()), float(np.mean(every < 0))
    ends = float(every.min()), float(every.max())
    return Kind(name, len(members), ", ".join(shapes), mean, *ends, negative, fits)


def _speaks_for(values: np.ndarray[Any, Any]) -> Fit:
    mean, negative = values.mean(), np.mean(values < 0)
    if mean >= 0.7 and negative < 0.01:
        return "w"
    return "1 + w" if not values.any() or (abs(mean) <= 0.3 and negative >= 0.1) else "unclear"


def _conclusions(kinds: tuple[Kind, ...], variant: Variant | None) -> tuple[bool | None, list[str]]:
    sentences = []
    for fit in ("w", "1 + w", "unclear", "bias"):
        some = [kind for kind in kinds if kind.fits == fit]
        if some:
            text = _UNTOLD.get(fit) or _said_of_gains(fit, some, variant)
            names = [kind.name for kind in some]
            more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
            sentences.append(f"{text} ({', '.join(names[:_NAMES])}{more})")
    offsets = {_OFFSETS[kind.fits] for kind in kinds if kind.fits in _OFFSETS}
    if not offsets:
        return None, sentences
    return (True if variant is None else offsets == {variant.scale_offset}), sentences


def _said_of_gains(fit: str, some: list[Kind], variant: Variant | None) -> str:
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
