"""Compares the gains of a checkpoint with what its config.json says of its norms: w or 1 + w.

In a GGUF file all gains must be w, as llama.cpp's converter adds the 1, and its norms multiply by w.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

from rmsnorm.identify.checkpoint import OFFSETS, Kind, identify_checkpoint
from rmsnorm.identify.config import ConfigNorm
from rmsnorm.specification.variants import PRESETS

_AROUND: Final = {
    "w": "around 1, as of a norm that multiplies by w",
    "1 + w": "around 0, as of a norm that multiplies by 1 + w",
    "unclear": "neither around 0 nor around 1",
    "bias": "a bias is beside it, as in a LayerNorm",
}


class Weighed(NamedTuple):
    """The gains of one kind beside the norms of the configuration.

    Attributes:
        kind: the gains.
        norms: the rows of the configuration for norms of that name; for all norms where no name is known, as in GGUF.
        offset: what these norms add to w; None where they differ, or there are none.
        in_gguf: whether a converter has added it already.
    """

    kind: Kind
    norms: tuple[ConfigNorm, ...]
    offset: float | None
    in_gguf: bool = False

    @property
    def agrees(self) -> bool | None:
        """Whether the gains are what the norms multiply by; None where one of them does not tell."""
        own = OFFSETS.get(self.kind.fits)
        return None if own is None or self.offset is None else own == (0.0 if self.in_gguf else self.offset)

    @property
    def json(self) -> dict[str, Any]:
        return asdict(self.kind) | {"variants": self._variants, "offset": self.offset, "agrees": self.agrees}

    def __str__(self) -> str:
        kind, said = self.kind, "config.json says nothing of it"
        if self.offset is not None:
            said = f"config.json says {'1 + w' if self.offset else 'w'} ({', '.join(self._variants)})"
            said += ", whose 1 is in the gains of a GGUF file" * bool(self.offset and self.in_gguf)
        elif self.norms:
            said = f"config.json has norms of that name of both sorts ({', '.join(self._variants)})"
        numbers = f"min {kind.least:.3g}, median {kind.median:.3g}, max {kind.most:.3g}"
        return f"{kind.name}: {kind.count} of shape {kind.shape}; {numbers}: {_AROUND[kind.fits]}; {said}"

    @property
    def warning(self) -> str:
        """What is wrong where they do not agree, with what may mend it."""
        own, other = OFFSETS[self.kind.fits], 0.0 if self.in_gguf else self.offset or 0.0
        factor = abs((other + self.kind.mean) / (own + self.kind.mean))
        who = "that of a GGUF file" if self.in_gguf else self._variants[0]
        return (
            f"{self.kind.name} has the gains of a norm that multiplies by {self.kind.fits}, and "
            f"{who} multiplies by {'1 + w' if other else 'w'}: every y would be {factor:.2g} times as large; the "
            f"model needs a variant that multiplies by {self.kind.fits}, or gains that rmsnorm gains FILE OUT --to "
            "VARIANT writes"
        )

    @property
    def _variants(self) -> list[str]:
        return list(dict.fromkeys(norm.norm.computes for norm in self.norms))


def weigh(folder: str | Path, norms: Sequence[ConfigNorm]) -> list[Weighed]:
    """Each kind of gains in the files beside a config.json, with the norms that this says.

    Files of safetensors or GGUF are read: of these the header, and then each tensor with the name of a norm's gain.

    Args:
        folder: the folder, or a file in it.
        norms: what ``identify_config`` returned for it.

    Raises:
        ValueError: no checkpoint is there that can be read, or no tensor has the name of a norm's gain.
    """
    path = Path(folder) if Path(folder).is_dir() else Path(folder).parent
    kinds = identify_checkpoint(path).kinds
    named = [_rows_of(kind, norms) for kind in kinds]
    in_gguf = not any(path.glob("*.safetensors")) and any(path.glob("*.gguf"))
    return [_weighed(kind, rows if any(named) else norms, in_gguf) for kind, rows in zip(kinds, named, strict=True)]


def _rows_of(kind: Kind, norms: Sequence[ConfigNorm]) -> list[ConfigNorm]:
    """The rows with the longest role that ends the name of the module, whose numbers of blocks do not count."""
    parts = [part for part in re.split(r"[./]", kind.name)[:-1] if part != "*"]
    name = "." + ".".join(parts)
    lengths = [max((len(role) for role in norm.norm.roles if name.endswith(f".{role}")), default=0) for norm in norms]
    longest = max(lengths, default=0)
    return [norm for norm, length in zip(norms, lengths, strict=True) if length == longest > 0]


def _weighed(kind: Kind, norms: Sequence[ConfigNorm], in_gguf: bool) -> Weighed:
    presets = [norm.norm.variant for norm in norms]
    offsets = {None if preset is None else PRESETS[preset].scale_offset for preset in presets}
    return Weighed(kind, tuple(norms), offsets.pop() if len(offsets) == 1 else None, in_gguf)
