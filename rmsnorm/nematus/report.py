"""A description of a model for people, as rows of text."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rmsnorm.nematus.config import Config
from rmsnorm.nematus.forms import FORMS
from rmsnorm.nematus.model import Model
from rmsnorm.nematus.names import is_of_training
from rmsnorm.nematus.options import scope_of_zero
from rmsnorm.nematus.vocabulary import dictionaries, read_vocabulary
from rmsnorm.specification import errors

_ROWS_OF_THEIR_OWN = ("dialect", "norm", "norm_offset", "search", "model_type", "dim_per_factor", "options", "folder")


def facts(model: Model) -> Iterator[tuple[str, str]]:
    """Rows (topic, text) that describe a model that ``nematus.load`` returned."""
    config = model.config
    yield "model", f"{model.path}: {'RNNSearch' if config.model_type == 'rnn' else 'Transformer'}"
    yield "framework", FORMS[model.form][0]
    yield "version", _version(model)
    offsets = "with" if config.norm_offset else "without"
    rms = f"{'p' if config.norm == 'prms' else ''}RMSNorm, {offsets} offsets"
    yield "norm", {"none": "none", "layer": "LayerNorm"}.get(config.norm, rms)
    shown = [", ".join(map(str, sizes)) for sizes in (config.dim_per_factor, config.source_vocab_sizes)]
    factors = f", in factors of {shown[0]}" if len(config.dim_per_factor) > 1 else ""
    yield "sizes", f"embedding {config.embedding_size}{factors}, state {config.state_size}"
    options = [name for name in vars(config) if name not in _ROWS_OF_THEIR_OWN and hasattr(Config, name)]
    changed = [name for name in options if getattr(config, name) != getattr(Config, name)]  # the default
    if changed:
        yield "options", ", ".join(f"{name} {getattr(config, name)}" for name in changed)
    yield "vocabulary", f"source {shown[1]}, target {config.target_vocab_size}"
    for path, size in zip(dictionaries(config), (*config.source_vocab_sizes, config.target_vocab_size), strict=False):
        yield "", _dictionary(model, str(path), size)
    count = sum(math.prod(array.shape) for array in model.parameters.values())
    dtypes = ", ".join(sorted({array.dtype.name for array in model.parameters.values()}))
    averages = ", averages of exponential smoothing" if model.smoothed else ""
    yield "parameters", f"{count:,} in {len(model.parameters)} tensors, {dtypes}{averages}"
    for why, names in _left_out(model):
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        yield "left out", f"{', '.join(names[:2])}{more}: {why}"


def _version(model: Model) -> str:
    """The version whose rules the model follows, and the version of the names in its file if that is another one."""
    version = model.config.rules.version
    if model.config.rules.is_zero:
        return f"{version}, scope {scope_of_zero(model.config.options)}"
    if version == "master" and model.config.search == "costs":
        version = "v0.4"
    names = {"v0.1": "version 0.1", "theano": "Theano"}.get(model.names)
    return f"Nematus {version}" + (f", under the names of {names}" if names not in (None, version) else "")


def _dictionary(model: Model, path: str, size: int) -> str:
    try:
        vocabulary = read_vocabulary(path, size, 0, model.config.dialect)
    except (errors.InputError, OSError) as error:
        return str(error).removeprefix("vocabulary: ")
    return f"{path}: {len(vocabulary.ids)} words"


def _left_out(model: Model) -> Iterator[tuple[str, list[str]]]:
    """Reasons for leaving tensors out, with the names of these tensors."""
    constant = [name for name in model.left_out if name == "decoder_c_tt"]
    names = [name for name in model.left_out if name not in constant]
    trainer = [name for name in names if is_of_training(name.replace("_smooth", "")) or name.startswith("/")]
    others = [name for name in model.left_out if name not in trainer and name not in constant]
    for why, names in (
        ("of the trainer", trainer),
        ("it is added to every score of attention, and has no effect", constant),
        ("the averages are taken" if model.smoothed else "its options ask for no averages", others),
        ("biases of encoder transitions, which Nematus keeps but never adds", list(model.unused)),
    ):
        if names:
            yield why, names
