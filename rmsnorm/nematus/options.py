"""The options of Nematus's programs and of zero as fields of Config, and back: the tables are in dialects.py.

Loads no array library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, Final

from rmsnorm.nematus.config import RMS, Config, together, wrong
from rmsnorm.nematus.dialects import LEGACY, PORTED, ZERO, Dialect, rules_of
from rmsnorm.specification import errors

# The fields that Nematus has no option for, or whose option is not read. This package writes down what is not usual.
_UNTOLD: Final = ("search", "eps", "masked_score", "beam_size", "normalization_alpha", "beam_temperature")
_OTHERS: Final = ("dialect", "norm", "norm_offset", "options", "folder", "relu_attention", *_UNTOLD)
_OPTIONS: Final = tuple(field.name for field in fields(Config) if field.name not in _OTHERS)
_OWN: Final = "rmsnorm"  # the option with what Nematus's options cannot say


def read(options: Mapping[str, Any], **known: Any) -> Config:
    """The config for the options of any version of Nematus, or of zero, in a JSON file.

    known: fields of Config that are known from another source, such as ``norm`` from the variable names.
    """
    dialect, refused = dialect_of(options), [*_not_ported(options)]
    fields_of = _fields_of_zero if rules_of(dialect).is_zero else _fields_of_nematus
    values = {"dialect": dialect} | fields_of(options, refused) | known
    for name in ("embedding_size", "state_size", "source_vocab_sizes", "target_vocab_size"):
        if not values.get(name):
            missing = f"Config: {' or '.join(_spellings(name))} is missing, expected in the options of a Nematus model"
            refused.append(errors.InputValueError(f"{missing}; add it"))
            values[name] = (1,) if name == "source_vocab_sizes" else 1  # so that the others are read
    try:
        config = Config(**values, options=dict(options))
    except errors.InputValueError as error:
        raise together([*refused, error]) from None
    if refused:
        raise together(refused)
    return config


def _fields_of_nematus(options: Mapping[str, Any], refused: list[ValueError]) -> dict[str, Any]:
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
    if "translation_strategy" not in options:
        values["search"] = rules_of(dialect_of(options)).old_search
    untold = options.get(_OWN, {})
    if not isinstance(untold, Mapping) or not untold.keys() <= set(_UNTOLD):
        refused.append(wrong(_OWN, untold, f"an object with some of {', '.join(_UNTOLD)}"))
        return values
    return values | dict(untold)


def _fields_of_zero(options: Mapping[str, Any], refused: list[ValueError]) -> dict[str, Any]:
    """Those that zero's options say; sizes of vocabularies and the norm are in none of them."""
    model = options["model_name"]
    values = {name: options.get(option, default) for name, (option, default) in _table_of_zero(model).items()}
    for name, value in values.items():
        if name == "masked_score":
            values[name] = -value if isinstance(value, int | float) else None
        elif name.endswith("_smoothing") or "_drop" in name:  # zero smooths, averages and drops only in (0, 1)
            is_off = value is None or (isinstance(value, int | float) and not 0 < value < 1)
            values[name] = 0.0 if is_off else value
    kind = "rnn" if model == "rnnsearch" else "transformer"
    return {"search": "zero", "model_type": kind, "relu_attention": model == "transformer_rela", **values}


def write(config: Config, *, theano: bool = False) -> dict[str, Any]:
    """The options for the JSON file beside a model, under the names that the program of the model uses.

    Options of the original file stay, unless they are another name of an option that is written here.

    theano: whether Theano Nematus will read the file. If the model has another dialect, the file says so.
    """
    # Where neither the options of the program nor the names of the variables say so.
    has_untold_norm = config.norm == "prms" or (config.norm == "rms" and config.norm_offset)
    untold_norm = {"norm": config.norm} if has_untold_norm else {}
    if config.rules.is_zero:
        return _written_for_zero(config) | untold_norm
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
    spellings = {"norm", _OWN, *(spelling for name in LEGACY for spelling in _spellings(name))}
    options = {
        "factors": len(config.dim_per_factor),
        **{name: value for name, value in config.options.items() if name not in spellings},
        **own,
        "model_version": 0.1 if version == "theano" else 0.2,
        "layer_normalization_type": "rmsnorm" if config.norm in RMS else "layernorm",
        **untold_norm,
    }
    if config.search == "sampler":
        options.setdefault("translation_strategy", "beam_search")
    else:
        options.pop("translation_strategy", None)
    again = read(options, norm=config.norm)
    untold = {name: values[name] for name in _UNTOLD if getattr(again, name) != values[name]}
    return options | ({_OWN: untold} if untold else {})


def _written_for_zero(config: Config) -> dict[str, Any]:
    model = "transformer_rela" if config.relu_attention else config.model_type.replace("rnn", "rnnsearch")
    own = {option: getattr(config, name) for name, (option, _) in _table_of_zero(model).items()}
    own |= {"model_name": model, "dtype_inf": -config.masked_score, "ema_decay": own["ema_decay"] or -1.0}
    required = {name: choices[0] for name, (choices, _) in PORTED.get(model, {}).items()}
    kept = {name: value for name, value in config.options.items() if name != "norm"}
    return {"scope_name": model} | required | kept | own


def _table_of_zero(model: str) -> dict[str, tuple[str, Any]]:
    """The rows of the options that a model of zero has."""
    others = "transformer_" if model == "rnnsearch" else "rnn_"
    return {name: row for name, row in ZERO.items() if not name.startswith(others)}


def scope_of_zero(options: Mapping[str, Any]) -> str:
    """The scope of the variables of a model of zero, which begins all of their names."""
    return options.get("scope_name", "rnnsearch") or "model"


def _spellings(name: str) -> tuple[str, ...]:
    return (name, *LEGACY.get(name, ()))


def _written(name: str, version: Dialect) -> str:
    """The name that an option of master has in the files of a version."""
    return _spellings(name)[{"theano": -1, "tensorflow-v0.3": int(name.startswith("rnn_"))}.get(version, 0)]


def dialect_of(options: Mapping[str, Any]) -> Dialect:
    """The dialect that the options of a model tell."""
    if "model_name" in options:
        return "zero"
    if options.get("dialect") is not None:  # written by this package where the names of the options do not show it
        return options["dialect"]
    if "embedding_size" not in options or options.get("theano_compat"):
        return "theano"
    new = {name for name in LEGACY if name.startswith("rnn_")}
    old = {spelling for name in new for spelling in LEGACY[name]}
    return "tensorflow-v0.3" if old & options.keys() and not new & options.keys() else "tensorflow"


def _not_ported(options: Mapping[str, Any]) -> Iterator[ValueError]:
    """An error for every option whose value makes a model that this package does not support."""
    model = options.get("model_name")
    program = "Theano Nematus" if model is None else "zero"
    of_model = PORTED["rnnsearch"] if model == "rnnsearch" else {}
    for name, (choices, default) in (PORTED[program] | of_model).items():
        if (got := options.get(name, default)) not in choices:
            want, fix = " or ".join(map(repr, choices)), f"this part of {program} is not ported"
            yield errors.out_of_domain("Config", name, got, want, fix)
    if program == "zero":
        return
    depth, both = options.get("enc_depth") or 1, options.get("enc_depth_bidirectional")
    if both is not None and both != depth:
        yield wrong("enc_depth_bidirectional", both, f"the enc_depth of {depth}")
    version = options.get("model_version")
    if "embedding_size" not in options and options.get("use_dropout") and not version:
        want = "0.1 or later where use_dropout is set (older models rescale at test time)"
        yield wrong("model_version", version, want)
