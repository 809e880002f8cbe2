"""Reads a Nematus model: from a TensorFlow checkpoint or a Theano archive of any version, or from a converted form."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from rmsnorm.files import check_expansion, reading
from rmsnorm.nematus import forms
from rmsnorm.nematus.config import RMS, Config, Norm
from rmsnorm.nematus.dialects import LEGACY, Dialect, Rules, rules_of
from rmsnorm.nematus.files import Form, finite, locate, read_options
from rmsnorm.nematus.names import VERSIONS, is_of_training, match, unused, variables
from rmsnorm.nematus.options import dialect_of, read, scope_of_zero
from rmsnorm.specification import errors

_GAINS: Final = ("/new_std", "/scale", "_lns", "_ln_s")
_OFFSETS: Final = ("/new_mean", "/offset", "_lnb", "_ln_b")


@dataclass(frozen=True)
class Model:
    """A Nematus model that was read from files."""

    config: Config
    parameters: dict[str, np.ndarray[Any, Any]]  # by the names of Nematus master, in the dtype of the file
    path: Path  # the prefix of the checkpoint, or the file
    form: Form
    names: str  # the version whose names the file has: master, v0.3, v0.1 or theano
    smoothed: bool  # whether the parameters are the averages of exponential smoothing
    left_out: tuple[str, ...]  # tensors of the file that are not part of the model: those of the trainer
    unused: tuple[str, ...]  # biases of encoder transitions, which v0.3 keeps but never adds


def load(
    path: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    norm: Norm | None = None,
    dialect: Dialect | None = None,
) -> Model:
    """Read a model that Nematus wrote in TensorFlow (v0.3, v0.4, master) or Theano, or that was converted from it.

    Every tensor of the model is used exactly once and none may be missing; tensors of the trainer are left out. The
    norm follows from the names of the variables, the dialect from the form of the file and from the options. Only where
    Theano Nematus wrote offsets do the names not tell the norm: then it must be passed.

    Args:
        path: a directory, the prefix of a checkpoint, an archive, or a file of another form.
        config: the options, or the JSON file with them, if they are not in ``<path>.json`` or ``config.json``.
        norm: ``layer`` or ``rms`` for a model of Theano Nematus with offsets, whose names are the same for both;
            ``prms`` for pRMSNorm, whose names are those of RMSNorm, in a file of another program.
        dialect: replaces the dialect that follows from file and options.

    Raises:
        FileNotFoundError: there is no model, or there are no options.
        ModuleNotFoundError: the framework of the file is not installed.
        TypeError: a tensor of the model is not floating-point.
        ValueError: the files are damaged, do not fit each other, or contain NaN, or they do not tell the norm; the
            message says which and where.

    Example:
        >>> import tempfile
        >>> config = Config(embedding_size=2, state_size=2, source_vocab_sizes=(4,), target_vocab_size=3, norm="rms")
        >>> parameters = {row.name: np.ones(row.shape) for row in variables(config)}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     forms.save_theano(f"{directory}/model.npz", config, parameters)
        ...     model = load(directory)
        >>> model.config == config, model.names, model.left_out
        (True, 'theano', ('decoder_c_tt',))
    """
    location = locate(path)
    if isinstance(config, Mapping):
        options = dict(config)
    elif config is None and location.path.suffix == forms.KERAS:
        options = forms.options_in_keras(location.path)
    else:
        options = read_options(location.path, config)
    shapes, tensor = forms.FORMS[location.form][1](location.path)
    with reading("nematus.load", location.path, "names of variables"):
        for name in shapes:
            if not name.isprintable():  # it would be printed
                raise errors.InputValueError(f"a variable has the name {name!r:.80}")
    own = rules_of(dialect_of(options))
    if own.is_zero and location.form == "tensorflow":
        shapes, tensor = forms.renamed((shapes, tensor), partial(_without_scope, scope_of_zero(options)))
    others = [name for name in shapes if is_of_training(name) or name.endswith(own.average) or name.startswith("/")]
    of_model = shapes.keys() - set(others)
    if dialect is None and location.form == "theano" and not options.get("dialect"):
        dialect = "theano"
    settings = read(options, **_facts_from_names(options, {name: shapes[name] for name in of_model}, norm, dialect))
    if settings.layers > len(of_model):  # each has a tensor at least: to list the variables of millions takes hours
        want = f"{len(of_model)} layers at most, as the model has tensors"
        fix = "is it the config of another model?"
        raise errors.out_of_domain("nematus.load", "the depth", settings.layers, want, fix)
    rows = variables(settings)
    likely = "v0.3" if settings.search == "costs" else "master"  # with LayerNorm both have the same names

    def matches(index: int) -> tuple[int, bool]:
        return len(of_model & {row.names[index] for row in rows}), VERSIONS[index] == likely

    index = max(range(len(VERSIONS)), key=matches)
    wanted = {row.names[index] or row.name: row for row in rows}
    spare = of_model & unused(settings) - wanted.keys()
    match("nematus.load", str(location.path), wanted, {name: shapes[name] for name in of_model - spare})
    smoothed = settings.exponential_smoothing > 0
    if smoothed:
        wanted = {name + own.average: row for name, row in wanted.items()}
        shapes_of_wanted = {name: shape for name, shape in shapes.items() if name in wanted}
        match("nematus.load", f"{location.path}, smoothed,", wanted, shapes_of_wanted)
    with reading("nematus.load", location.path, "a model of the size of its file"):
        check_expansion(4 * sum(math.prod(row.shape) for row in wanted.values()), location.size)
    parameters = {row.name: finite("nematus.load", location.path, name, tensor(name)) for name, row in wanted.items()}
    left_out = tuple(sorted(shapes.keys() - wanted.keys() - spare))
    settings = settings.replace(folder=str(location.path.parent))
    return Model(settings, parameters, *location, VERSIONS[index], smoothed, left_out, tuple(sorted(spare)))


def _facts_from_names(
    options: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], norm: Norm | None, dialect: Dialect | None
) -> dict[str, Any]:
    """The fields of the config that follow from the names and shapes of the tensors."""
    facts: dict[str, Any] = {} if dialect is None else {"dialect": dialect}
    own = rules_of(dialect_of(options))
    if own.is_zero:
        return facts | _norm(options, shapes, norm, own) | _vocabularies_of_zero(shapes)
    facts |= _norm(options, shapes, norm, own if dialect is None else rules_of(dialect))
    if options.get("model_type") == "transformer":
        # Until 2020 tie_encoder_decoder_embeddings tied the projection, and tie_decoder_embeddings had no effect.
        untied = "transformer_model/softmax_projection_layer/embedding_table" in shapes
        if untied or options.get("tie_decoder_embeddings") or options.get("tie_encoder_decoder_embeddings"):
            facts["tie_decoder_embeddings"] = not untied
    return facts


def _norm(options: Mapping[str, Any], names: Collection[str], asked: Norm | None, own: Rules) -> dict[str, Any]:
    """The norm that the names leave possible, and of several the one that is asked for or that this package wrote down.

    If neither says which, it is the norm that the program with these names has. Theano Nematus can have either norm
    under the names of LayerNorm, so that it must be asked for.
    """
    has_gain, has_offset = (any(name.endswith(ends) for name in names) for ends in (_GAINS, _OFFSETS))
    of_layer = ("/layer_norm/",) if own.ambiguous_norm else ("/layer_norm/", "/new_mean")
    is_layer = any(part in name for name in names for part in of_layer)
    is_rms = any("/rms_norm/" in name or (name.endswith("/scale") and not own.is_zero) for name in names)
    possible: tuple[Norm, ...] = ("layer", *RMS)
    if not has_gain:
        possible = ("none",)
    elif is_layer or (own.is_zero and has_offset and not is_rms and options.get("norm") not in RMS):
        possible = ("layer",)
    elif is_rms or own.is_zero or not has_offset:
        possible = RMS
    spellings = ("rnn_layer_normalization", *LEGACY["rnn_layer_normalization"])
    option = next((name for name in spellings if options.get(name)), None)
    if option and asked is None and not has_gain and not own.is_zero:
        raise errors.InputValueError(
            f"nematus.load: the model has no gains, expected those of the norms, because its option {option} is set; "
            "Nematus's own conversion drops the gains of RMSNorm: load the original model, or pass norm='none'"
        )
    if asked not in (None, *possible):
        want = f"{' or '.join(possible)}, as its variables say"
        raise errors.out_of_domain("nematus.load", "norm", asked, want, "leave it out")
    kind = asked or options.get("norm")
    if kind not in possible:
        of_type = {"rmsnorm": "rms", "layernorm": "layer"}.get(str(options.get("layer_normalization_type")))
        kind = possible[0] if len(possible) < 3 else of_type
    if kind is None:
        why = "because Theano Nematus has the same names for LayerNorm and for RMSNorm with offsets"
        want = f"'layer' or 'rms', as the model was trained, {why}"
        fix = "pass norm=, in the commands --source-norm, or let rmsnorm port norms compare the two"
        raise errors.out_of_domain("nematus.load", "norm", asked, want, fix)
    return {"norm": kind, "norm_offset": has_offset}


def _vocabularies_of_zero(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The sizes of the vocabularies, which zero's options do not tell."""
    sizes = {name: shapes[name][0] for name in ("embedding", "src_embedding", "tgt_embedding") if shapes.get(name)}
    source, target = (sizes.get(name, sizes.get("embedding")) for name in ("src_embedding", "tgt_embedding"))
    if source is None or target is None:
        raise errors.InputValueError(
            "nematus.load: the model lacks src_embedding and tgt_embedding, or embedding, expected by its options; "
            "are they the options of another model, or is its scope_name another one?"
        )
    return {"source_vocab_sizes": (source,), "target_vocab_size": target}


def _without_scope(scope: str, name: str) -> str:
    """A name of zero without its scope. Others that are not of the trainer get a slash: they are left out, too."""
    if name.startswith(f"{scope}/"):
        return name.removeprefix(f"{scope}/")
    return name if is_of_training(name) else f"/{name}"
