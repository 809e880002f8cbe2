"""The gains of a checkpoint, by their names: which of its tensors they are, and their numbers."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rmsnorm import files
from rmsnorm.files import check_expansion, check_kind, check_regular, reading, tensors
from rmsnorm.specification import errors

Array = npt.NDArray[Any]
_OP: Final = "gains"
_WANTED: Final = (
    "a .safetensors, .gguf, .npz, .keras or .weights.h5 file, a folder of safetensors files or an Orbax checkpoint"
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

_READERS: Final[dict[str, Callable[[str, Path], tensors.Tensors]]] = {
    ".safetensors": tensors.safetensors,
    ".gguf": tensors.gguf,
    ".npz": tensors.npz,
    ".keras": tensors.keras,
    ".weights.h5": tensors.keras,
}


def read_gains(path: str | os.PathLike[str]) -> tuple[dict[str, Array], set[str]]:
    """The gains of a checkpoint by their names, and the names of those that have a bias beside them.

    Raises:
        FileNotFoundError, ValueError: as of ``identify_checkpoint``.
    """
    shapes, tensor = _read(Path(path))
    for name in filter(lambda name: not name.isprintable(), shapes):  # it would be printed
        raise errors.InputValueError(f"{_OP}: a tensor of {path} has the name {name!r:.80}, expected printable words")
    names = [name for name, shape in shapes.items() if _is_gain(name, shape, shapes)]
    with reading(_OP, Path(path), _WANTED):
        check_expansion(sum(8 * math.prod(shapes[name]) for name in names), _size(Path(path)))
    gains: dict[str, Array] = {}
    for name in names:
        values = tensor(name)
        if values.dtype.kind not in "fV":  # V: the formats that NumPy lacks
            continue
        if not np.isfinite(values.astype(np.float64)).all():
            raise errors.InputValueError(
                f"{_OP}: {name} has NaN or infinity, expected finite gains; take another checkpoint"
            )
        gains[name] = values
    if not gains:
        some = ", ".join(list(shapes)[:4]) or "none"
        raise errors.InputValueError(
            f"{_OP}: {path} has no gain of a norm among its {len(shapes)} tensors, expected a name such as "
            f"layers.0.input_layernorm.weight; its names are {some}"
        )
    return gains, {name for name in gains if _has_bias(name, shapes)}


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
