"""Conversion of a Nematus model into another form; the result is read back and compared with the golden first."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.nematus import proof
from rmsnorm.nematus.backends import ArrayModel
from rmsnorm.nematus.centring import to_rms_norm
from rmsnorm.nematus.checkpoints.converted import save_flax, save_keras, save_safetensors
from rmsnorm.nematus.checkpoints.original import save_tensorflow, save_theano
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.dialects import rules
from rmsnorm.nematus.model import Model, load
from rmsnorm.nematus.proof import BOUND, wide
from rmsnorm.nematus.vocabulary import require_dictionaries


class Target(NamedTuple):
    """A form of a model: the name of its file, what writes it, and the framework that is compared with the golden."""

    file: str
    save: Callable[[Path, Config, Mapping[str, Any]], None]
    framework: str


TARGETS: Final = {
    "torch": Target("model.safetensors", save_safetensors, "torch"),
    "keras": Target("model.keras", save_keras, "tf"),
    "flax": Target("model.orbax", save_flax, "flax"),
    "numpy": Target("model.safetensors", save_safetensors, "numpy"),
    "tf": Target("model.npz", save_tensorflow, "numpy"),
    "theano": Target("model.npz", save_theano, "numpy"),
}

SENTENCES: Final = 4


@dataclass(frozen=True)
class Conversion:
    """The model that was read back, and warnings of what its form cannot keep.

    ``exact`` is the largest change of a logit of random sentences, computed in float64, and ``error`` that with the
    parameters rounded to their dtype: only where RMSNorm was made from LayerNorm it is another one. ``largest`` is the
    largest absolute logit.
    """

    model: Model
    exact: float
    error: float
    largest: float
    warnings: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Whether the logits are the same but for rounding."""
        return self.exact <= BOUND * max(1.0, self.largest)


def convert(source: Model, folder: str | os.PathLike[str], to: str, *, rms_norm: bool = False) -> Conversion:
    """Write a model in another form, with its options and dictionaries, into a new folder if its logits stay the same.

    ``to`` is a key of TARGETS. With rms_norm LayerNorm becomes RMSNorm, exactly.

    Raises:
        ValueError: a dictionary of the model has too few words for it, or that of the source and of the target are
            exchanged; or what ``load`` and the form raise.
    """
    out, target = Path(folder), TARGETS[to]
    target = target._replace(file=target.file.replace("model.npz", rules(source.config).checkpoint))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"port: {out} exists, expected a new or an empty folder; name another")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"port: {out.parent} is not a folder, expected one to make {out.name} in; make it")
    require_dictionaries(source)
    config, parameters, exact = source.config, source.parameters, wide(source.parameters)
    wanted = ArrayModel("numpy", config, exact).logits(*_sentences(config))
    if rms_norm:
        config, exact = to_rms_norm(config, exact)
        dtype = next(iter(parameters.values())).dtype
        parameters = {name: array.astype(dtype) for name, array in exact.items()}
    temporary = out.parent / f".{out.name}.{os.getpid()}"
    temporary.mkdir()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            target.save(temporary / target.file, config, parameters)
        result = load(temporary)
        for name, array in parameters.items():
            if not np.array_equal(result.parameters[name], array):
                raise RuntimeError(f"port: {name} was read back with other values, expected those written")

        def change(parameters: Mapping[str, Any]) -> float:
            logits = ArrayModel(target.framework, result.config, parameters).logits(*_sentences(config))
            return abs(logits - wanted).max().item()

        error = change(wide(result.parameters))
        largest = change(exact) if rms_norm else error
        lost = tuple(str(w.message) for w in caught if issubclass(w.category, UserWarning))
        there = replace(result, config=result.config.replace(folder=str(out)), path=out / target.file)
        conversion = Conversion(there, largest, error, abs(wanted).max().item(), lost)
        if conversion.is_exact:
            x, mask, y = _sentences(config)
            proof.write(temporary, result.config, result.parameters, x[:, mask[:, 0] > 0, :1], y[:, :1])
            if out.exists():
                out.rmdir()
            temporary.rename(out)
        return conversion
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sentences(config: Config) -> tuple[Any, Any, Any]:
    """Random source sentences of several lengths, their mask, and random target words."""
    rng = np.random.default_rng(0)
    lengths = rng.permutation(2 * SENTENCES)[:SENTENCES] + 1
    mask = (np.arange(lengths.max())[:, None] < lengths).astype(np.float64)
    x = np.stack([rng.integers(size, size=mask.shape) for size in config.source_vocab_sizes])
    return x, mask, rng.integers(config.target_vocab_size, size=(6, SENTENCES))
