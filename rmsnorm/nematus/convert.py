"""A model of Nematus into another form, read back and held to the golden before anything is left on the disk."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.nematus.backends import Opened
from rmsnorm.nematus.centring import to_rms_norm
from rmsnorm.nematus.checkpoints.keras import save_keras
from rmsnorm.nematus.checkpoints.orbax import save_flax
from rmsnorm.nematus.checkpoints.safetensors import save_safetensors
from rmsnorm.nematus.checkpoints.tensorflow import save_tensorflow
from rmsnorm.nematus.checkpoints.theano import save_theano
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.model import Model, load
from rmsnorm.nematus.vocabulary import dictionaries


class Target(NamedTuple):
    """A form: the file in the folder, what writes it, and the wing whose model is held to the golden."""

    file: str
    save: Callable[[Path, Config, Mapping[str, Any]], None]
    wing: str


TARGETS: Final = {
    "torch": Target("model.safetensors", save_safetensors, "torch"),
    "keras": Target("model.keras", save_keras, "keras"),
    "flax": Target("model.orbax", save_flax, "flax"),
    "numpy": Target("model.safetensors", save_safetensors, "numpy"),
    "tf": Target("model.npz", save_tensorflow, "numpy"),
    "theano": Target("model.npz", save_theano, "numpy"),
}

# Two float64 computations of the same logits differ by their roundings, about 1e-13 of the largest. The least mistake
# that is known, a bias in the wrong place of a model that is not trained yet, moves them by 1e-7.
BOUND: Final = 1e-10
SENTENCES: Final = 4


@dataclass(frozen=True)
class Conversion:
    """What was converted, and how far the logits of random sentences moved; all logits are computed in float64.

    Attributes:
        model: the result, as it was read back.
        exact: greatest difference of a logit before the parameters were rounded to their dtype.
        error: likewise of what was written: another number only where RMSNorm was made of LayerNorm.
        largest: greatest logit.
        warnings: what the form cannot keep.
    """

    model: Model
    exact: float
    error: float
    largest: float
    warnings: tuple[str, ...]

    @property
    def held(self) -> bool:
        return self.exact <= BOUND * max(1.0, self.largest)


def convert(source: Model, folder: str | os.PathLike[str], to: str, *, rms_norm: bool = False) -> Conversion:
    """Write a model in another form, with its options and dictionaries, into a new folder if its logits are the same.

    Args:
        source: as ``nematus.load`` gives it.
        folder: made here, last of all, and only if the conversion held.
        to: a key of TARGETS.
        rms_norm: whether to make RMSNorm of LayerNorm, exactly.

    Raises:
        FileExistsError: the folder exists and is not empty.
        FileNotFoundError: it would be in a folder that does not exist.
        ModuleNotFoundError: the framework is not installed.
        ValueError: the model cannot take that form.
    """
    out, target = Path(folder), TARGETS[to]
    _check_place(out)
    config, parameters, wide = source.config, source.parameters, _wide(source.parameters)
    wanted = Opened("numpy", config, wide).logits(*_sentences(config))

    if rms_norm:
        config, wide = to_rms_norm(config, wide)
        dtype = next(iter(parameters.values())).dtype
        parameters = {name: array.astype(dtype) for name, array in wide.items()}
    temporary = out.parent / f".{out.name}.{os.getpid()}"
    temporary.mkdir()
    try:
        config = _with_dictionaries(source, config, temporary)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            target.save(temporary / target.file, config, parameters)
        result = load(temporary)
        for name, array in parameters.items():
            if not np.array_equal(result.parameters[name], array):
                raise ValueError(f"port: {name} was read back with other values, expected those written; try again")

        def moved(parameters: Mapping[str, Any]) -> float:
            return abs(Opened(target.wing, result.config, parameters).logits(*_sentences(config)) - wanted).max().item()

        error = moved(_wide(result.parameters))
        exact = moved(wide) if rms_norm else error
        conversion = Conversion(
            model=replace(result, path=out / target.file),
            exact=exact,
            error=error,
            largest=abs(wanted).max().item(),
            warnings=tuple(str(each.message) for each in caught if issubclass(each.category, UserWarning)),
        )
        if conversion.held:
            if out.exists():
                out.rmdir()
            temporary.rename(out)
        return conversion
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_place(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"port: {out} exists, expected a new or an empty folder; name another")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"port: {out.parent} is not a folder, expected one to make {out.name} in; make it")


def _wide(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: array.astype(np.float64) for name, array in parameters.items()}


def _sentences(config: Config) -> tuple[Any, Any, Any]:
    """Random ones, of several lengths in the source."""
    rng = np.random.default_rng(0)
    lengths = rng.permutation(2 * SENTENCES)[:SENTENCES] + 1
    mask = (np.arange(lengths.max())[:, None] < lengths).astype(np.float64)
    x = np.stack([rng.integers(size, size=mask.shape) for size in config.source_vocab_sizes])
    return x, mask, rng.integers(config.target_vocab_size, size=(6, SENTENCES))


def _with_dictionaries(source: Model, config: Config, folder: Path) -> Config:
    """The config with those dictionaries that there are, copied beside the model."""
    names = []
    for number, path in enumerate(dictionaries(source)):
        name = path.name if path.name not in names else f"{number}.{path.name}"
        names.append(name)
        if path.is_file():
            shutil.copyfile(path, folder / name)
    if not names:
        return config
    named = {"dictionaries": names, "source_dicts": names[:-1], "target_dict": names[-1]}
    return config.replace(options={**config.options, **named})
