"""Gains that are w made gains that are 1 + w, or back, in a copy of a checkpoint: exactly, or not at all."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from rmsnorm.files import replacing, tensors
from rmsnorm.identify.checkpoint import OFFSETS, read_gains
from rmsnorm.specification import errors
from rmsnorm.specification.variants import Variant, get_variant

_OP: Final = "gains"


@dataclass(frozen=True)
class Rewritten:
    """What was done to the gains of a file.

    Attributes:
        path: of the new file.
        changed: how many tensors of each kind have another offset now, and that difference.
        kept: the kinds whose tensors are as they were, and why.
    """

    path: str
    changed: dict[str, tuple[int, float]]
    kept: dict[str, str]

    @property
    def text(self) -> str:
        lines = [f"{name}: {count} tensors, each {change:+g}" for name, (count, change) in self.changed.items()]
        lines += [f"{name}: as it was; {why}" for name, why in self.kept.items()]
        return "\n".join([*lines, f"written to {self.path}"])

    @property
    def json(self) -> dict[str, Any]:
        return asdict(self)


def rewrite_gains(
    path: str | os.PathLike[str], out: str | os.PathLike[str], to: str | Variant, variant: str | Variant | None = None
) -> Rewritten:
    """Copy a safetensors file with the gains that another variant has for the same y.

        o_to + w_to = o + w

    where o is ``scale_offset``: 0 where the norm multiplies by w, 1 where it multiplies by 1 + w. All other bytes are
    the same. Norms with a bias are LayerNorms, perhaps, and are copied.

    Args:
        path: a safetensors file.
        out: the new one.
        to: the variant that is to read it, such as ``gemma``.
        variant: the one that it was written for; None for what each kind of gains fits.

    Raises:
        FileNotFoundError: there is no such file, or no folder for the new one.
        ValueError: it is of another form; ``out`` is the file itself; its gains contradict ``variant``, or do not
            tell what they are and there is none; or a gain has no exact counterpart in its dtype.

    Example:
        >>> import tempfile
        >>> from safetensors.numpy import load_file, save_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file({"layers.0.norm.weight": np.full(4, 1.25, np.float32)}, f"{folder}/a.safetensors")
        ...     _ = rewrite_gains(f"{folder}/a.safetensors", f"{folder}/b.safetensors", "gemma")
        ...     load_file(f"{folder}/b.safetensors")["layers.0.norm.weight"]
        array([0.25, 0.25, 0.25, 0.25], dtype=float32)
    """
    source, target, wanted = Path(path), Path(out), get_variant(_OP, to)
    if source.is_dir() or source.suffix != ".safetensors":
        fix = "pass one file, or each file of a folder"
        raise errors.out_of_domain(_OP, "file", str(source), "a .safetensors file to rewrite", fix)
    if target.exists() and target.samefile(source):
        raise errors.out_of_domain(_OP, "out", str(target), "another file", "the file that is read is never written to")
    checkpoint, kind_of = read_gains(source, variant)
    if variant is not None and checkpoint.agrees is False:
        raise errors.InputValueError(f"{_OP}: {checkpoint.text}; name the variant that they were written for, or none")
    declared = None if variant is None else get_variant(_OP, variant).scale_offset
    changes, kept = {}, {}
    for kind in checkpoint.kinds:
        offset = OFFSETS.get(kind.fits, declared)
        if kind.fits == "bias":
            kept[kind.name] = "it has a bias beside it, as in a LayerNorm"
        elif offset is None:
            fix = "name the variant that the file was written for (--variant)"
            raise errors.InputValueError(f"{_OP}: nothing shows whether {kind.name} is w or 1 + w; {fix}")
        elif offset == wanted.scale_offset:
            kept[kind.name] = f"{wanted.name} has the same"
        else:
            changes[kind.name] = offset - wanted.scale_offset
    places, (_, tensor) = tensors.places_in_safetensors(_OP, source), tensors.safetensors(_OP, source)
    counts = dict.fromkeys(changes, 0)
    with replacing(target) as temporary:
        shutil.copyfile(source, temporary)
        with temporary.open("r+b") as file:
            for name, kind_name in kind_of.items():
                if kind_name in changes:
                    file.seek(places[name].start)
                    file.write(_shifted(name, tensor(name), changes[kind_name]).tobytes())
                    counts[kind_name] += 1
    return Rewritten(str(target), {name: (counts[name], change) for name, change in changes.items()}, kept)


def _shifted(name: str, gain: Any, change: float) -> Any:
    """The gain plus a number, in its dtype."""
    wide = gain.astype(np.float64)
    moved = (wide + change).astype(gain.dtype)
    lost = int(np.sum(moved.astype(np.float64) - change != wide))
    if lost:
        raise errors.InputValueError(
            f"{_OP}: {lost} of {math.prod(gain.shape)} elements of {name} have no exact counterpart in "
            f"{gain.dtype.name}, expected gains that lose no bit; save the gains in float32 first"
        )
    return moved
