"""The options of Nematus's programs as fields of Config, and back. Those of zero are in zero.py.

Loads no array library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, Final

from rmsnorm.nematus import zero
from rmsnorm.nematus.config import RMS, Config, together, wrong
from rmsnorm.nematus.dialects import Dialect, rules_of
from rmsnorm.specification import errors

_DROPPED: Final = ("embedding", "hidden", "source", "target")
# Other names of the options of Nematus master: in v0.3, in Theano, and before v0.4.
LEGACY: Final[dict[str, tuple[str, ...]]] = {
    "embedding_size": ("dim_word",),
    "state_size": ("dim",),
    "target_vocab_size": ("n_words",),
    "source_vocab_sizes": ("source_vocab_size", "n_words_src"),
    "rnn_enc_transition_depth": ("enc_recurrence_transition_depth",),
    "rnn_dec_base_transition_depth": ("dec_base_recurrence_transition_depth",),
    "rnn_dec_high_transition_depth": ("dec_high_recurrence_transition_depth",),
    "rnn_layer_normalization": ("use_layer_norm", "layer_normalisation"),
    "transformer_enc_depth": ("transformer_encoder_layers",),
    "transformer_dec_depth": ("transformer_decoder_layers",),
    **{f"rnn_{name}": (name,) for name in ("enc_depth", "dec_depth", "dec_deep_context", "lexical_model")},
    **{f"rnn_{name}": (name,) for name in ("use_dropout", *(f"dropout_{part}" for part in _DROPPED))},
}

# Options of Theano Nematus, with the values that this package supports. Other values make another model.
_THEANO_ONLY: Final[dict[str, tuple[Any, ...]]] = {
    "encoder": ("gru",), "decoder": ("gru_cond",), "decoder_deep": ("gru",), "weight_normalisation": (False,),
    "deep_fusion_lm": (None, "", False), "concatenate_lm_decoder": (False,),
}  # fmt: skip

# The fields that Nematus has no option for, or whose option is not read. This package writes down what is not usual.
_UNTOLD: Final = (
    *("search", "eps", "masked_score"),
    *("beam_size", "normalization_alpha", "beam_temperature", "beam_noise", "beam_seed"),
)
_OTHERS: Final = ("dialect", "norm", "norm_offset", "options", "folder", "relu_attention", *_UNTOLD)
_OPTIONS: Final = tuple(field.name for field in fields(Config) if field.name not in _OTHERS)
_OWN: Final = "rmsnorm"  # the option with what Nematus's options cannot say


def read(options: Mapping[str, Any], **known: Any) -> Config:
    """The config for the options of any version of Nematus, or of zero, in a JSON file.

    known: fields of Config that are known from another source, such as ``norm`` from the variable names.
    """
    own = rules_of(dialect_of(options))
    if own.is_zero:
        return _config([*zero.refused(options)], {**zero.fields(options), **known}, options)
    refused = [*_refused_of_theano(options)]
    values: dict[str, Any] = {}
    for name in (*_OPTIONS, "rnn_use_dropout"):  # None is nothing
        said = [value for own_name in _spellings(name) if (value := options.get(own_name)) is not None]
        values |= {name: said[0]} if said else {}
    if not values.pop("rnn_use_dropout", True):  # then the rates in the file have no effect
        values = {name: value for name, value in values.items() if not name.startswith("rnn_dropout_")}
    sizes, dims = values.get("source_vocab_sizes", ()), values.get("dim_per_factor", ())
    values["dim_per_factor"] = dims = (dims,) if isinstance(dims, int) else dims
    factors, most = options.get("factors") or 1, max(1, len(dims)) if isinstance(dims, list | tuple) else 1
    if not isinstance(factors, int) or factors > most:
        refused.append(wrong("factors", factors, f"{most}, as many as dim_per_factor has sizes"))
        factors = most
    values["source_vocab_sizes"] = (sizes,) * factors if isinstance(sizes, int) else sizes
    values["dialect"] = dialect_of(options)
    if "translation_strategy" not in options:
        values["search"] = own.old_search
    untold = options.get(_OWN, {})
    if not isinstance(untold, Mapping) or not untold.keys() <= set(_UNTOLD):
        refused.append(wrong(_OWN, untold, f"an object with some of {', '.join(_UNTOLD)}"))
        untold = {}
    values |= {**untold, **known}
    for name in ("embedding_size", "state_size", "source_vocab_sizes", "target_vocab_size"):
        if not values.get(name):
            missing = f"Config: {' or '.join(_spellings(name))} is missing, expected in the options of a Nematus model"
            refused.append(errors.InputValueError(f"{missing}; add it"))
            values[name] = (1,) if name == "source_vocab_sizes" else 1  # so that the others are read
    return _config(refused, values, options)


def _config(refused: list[ValueError], values: Mapping[str, Any], options: Mapping[str, Any]) -> Config:
    """The config of these values; an error that says all that is refused."""
    try:
        config = Config(**values, options=dict(options))
    except errors.InputValueError as error:
        raise together([*refused, error]) from None
    if refused:
        raise together(refused)
    return config


def write(config: Config, *, theano: bool = False) -> dict[str, Any]:
    """The options for the JSON file beside a model, under the names that the Nematus version of the model uses.

    Options of the original file stay, unless they are another name of an option that is written here.

    theano: whether Theano Nematus will read the file. If the model has another dialect, the file says so.
    """
    if rules_of(config.dialect).is_zero:
        return zero.options(vars(config))
    version: Dialect = "theano" if theano else config.dialect
    values = {
        **vars(config),
        "rnn_use_dropout": any(value for name, value in vars(config).items() if name.startswith("rnn_dropout")),
        "rnn_layer_normalization": config.model_type == "rnn" and config.norm != "none",
        "dim_per_factor": list(config.dim_per_factor),
        "source_vocab_sizes": list(config.source_vocab_sizes),
    }
    names = (*_OPTIONS, "rnn_use_dropout", "rnn_layer_normalization")
    own = {_written(name, version): values[name] for name in names}
    if version == "theano":
        own["n_words_src"] = config.source_vocab_sizes[0]
        own["dialect"] = config.dialect
        if len(set(config.source_vocab_sizes)) > 1:  # Theano Nematus has no option for different sizes
            own["source_vocab_sizes"] = values["source_vocab_sizes"]
    spellings = {"norm", *(spelling for name in LEGACY for spelling in _spellings(name))}
    options = {
        "factors": len(config.dim_per_factor),
        **{name: value for name, value in config.options.items() if name not in spellings},
        **own,
        "model_version": 0.1 if version == "theano" else 0.2,
        "layer_normalization_type": "rmsnorm" if config.norm in RMS else "layernorm",
        **zero.untold_norm(config.norm, has_offset=config.norm_offset),
    }
    if config.search == "sampler":
        options.setdefault("translation_strategy", "beam_search")
    else:
        options.pop("translation_strategy", None)
    options.pop(_OWN, None)
    again = read(options, norm=config.norm)
    untold = {name: values[name] for name in _UNTOLD if getattr(again, name) != values[name]}
    return options | ({_OWN: untold} if untold else {})


def _spellings(name: str) -> tuple[str, ...]:
    return (name, *LEGACY.get(name, ()))


def _written(name: str, version: Dialect) -> str:
    """The name that an option of master has in the files of a version."""
    return _spellings(name)[{"theano": -1, "tensorflow-v0.3": int(name.startswith("rnn_"))}.get(version, 0)]


def dialect_of(options: Mapping[str, Any]) -> Dialect:
    """The dialect that the options of a model tell."""
    if zero.is_zero(options):
        return "zero"
    if options.get("dialect") is not None:  # written by this package where the names of the options do not show it
        return options["dialect"]
    if "embedding_size" not in options or options.get("theano_compat"):
        return "theano"
    new = {name for name in LEGACY if name.startswith("rnn_")}
    old = {spelling for name in new for spelling in LEGACY[name]}
    return "tensorflow-v0.3" if old & options.keys() and not new & options.keys() else "tensorflow"


def _refused_of_theano(options: Mapping[str, Any]) -> Iterator[ValueError]:
    """An error for every option of a model of Theano Nematus that this package does not support."""
    for name, values in _THEANO_ONLY.items():
        if name in options and options[name] not in values:
            fix = "this part of Theano Nematus is not ported"
            yield errors.out_of_domain("Config", name, options[name], repr(values[0]), fix)
    depth, both = options.get("enc_depth") or 1, options.get("enc_depth_bidirectional")
    if both is not None and both != depth:
        yield wrong("enc_depth_bidirectional", both, f"the enc_depth of {depth}")
    version = options.get("model_version")
    if "embedding_size" not in options and options.get("use_dropout") and not version:
        want = "0.1 or later where use_dropout is set (older models rescale at test time)"
        yield wrong("model_version", version, want)
