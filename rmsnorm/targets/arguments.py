"""What the arguments of a function, the parameters of a layer and those of its constructor mean, by their names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import Any, Final

_NAMES: Final = {
    "scale": ("weight", "scale", "gamma", "gain", "g", "w", "s", "weights", "new_std", "alpha"),
    "bias": ("bias", "beta", "b", "shift"),
    "gate": ("gate", "z"),
    "mask": ("mask",),
    "residual": ("residual", "skip"),
}
_XS: Final = ("x", "input", "inputs", "hidden_states", "hidden_state", "h", "tensor")
_WIDTHS: Final = (
    "dim", "hidden_size", "normalized_shape", "num_features", "features", "width", "d_model", "size", "channels",
    "num_channels", "embed_dim", "hidden_dim", "n", "d", "shape", "dims", "c_in", "hidden", "n_embd", "in_features",
    "input_size", "feature_dim", "head_dim",
)  # fmt: skip
_EPS: Final = ("eps", "epsilon", "variance_epsilon", "norm_eps", "layer_norm_eps", "rms_norm_eps")


class Unguessable(TypeError):
    """A required argument, ``argument``, with a name that does not say what it means; empty where it is none."""

    def __init__(self, message: str, argument: str = "") -> None:
        super().__init__(message)
        self.argument = argument


class FromCall(Enum):
    """A value that is known only when the function is called: the shape of the gain, or the width of x."""

    GAIN_SHAPE = "the shape of the gain"
    WIDTH = "the width of x"


def argument_named(name: str) -> str | None:
    """The argument (scale, bias, gate, mask or residual) with one of the usual names for it, None for another name.

    >>> argument_named("gamma"), argument_named("e_score_correction")
    ('scale', None)
    """
    word = name.lower().rsplit(".", 1)[-1].strip("_")
    for argument, names in _NAMES.items():
        if word in names or (len(word) > 3 and any(word.endswith("_" + entry) for entry in names if len(entry) > 3)):
            return argument
    return None


def arguments_of(
    function: Callable[..., Any], axis: Any = -1, others: Collection[str] = ()
) -> tuple[dict[str, str], dict[str, Any]]:
    """The function's own name of x and of each argument that it takes, and values for what else it requires.

    The name of a positional-only argument, and of an x that comes first, is empty. x is the first parameter, unless
    that is a gain or the like and a later one is named as x. An axis that it requires is ``axis``; ``others`` are left
    out.

    Raises:
        Unguessable: something else is required.

    Example:
        >>> arguments_of(lambda x, weight, eps=1e-6: x)
        ({'x': '', 'scale': 'weight'}, {})
        >>> arguments_of(lambda weight, x: x)
        ({'x': 'x', 'scale': 'weight'}, {})
    """
    every = parameters_of(function)
    if every is None:
        return {"x": ""}, {}
    parameters = [p for p in every if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not parameters:
        got = f"takes {inspect.Signature(every)}, which does not say what it takes" if every else "takes no argument"
        raise Unguessable(f"{got}, expected x")
    if argument_named(parameters[0].name) and parameters[0].kind is not inspect.Parameter.POSITIONAL_ONLY:
        parameters.sort(key=lambda parameter: parameter.name not in _XS)
    x = parameters[0]
    names = {"x": x.name if x.kind is x.KEYWORD_ONLY or x is not every[0] else ""}
    values: dict[str, Any] = {}
    for parameter in parameters[1:]:
        if parameter.name in others:
            continue
        argument, required = argument_named(parameter.name), parameter.default is parameter.empty
        if argument and argument not in names and (required or parameter.default is None):
            names[argument] = _key(parameter)
        elif required and parameter.name in _EPS:
            values[_key(parameter)] = 1e-6
        elif required and parameter.name == "normalized_shape":
            values[_key(parameter)] = FromCall.GAIN_SHAPE
        elif required and parameter.name in ("axis", "dim", "axes", "reduction_axes"):
            values[_key(parameter)] = axis
        elif required and parameter.name in _WIDTHS:
            values[_key(parameter)] = FromCall.WIDTH
        elif required:
            raise Unguessable(f"requires {parameter.name!r}, whose value cannot be guessed", parameter.name)
    return names, values


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Its parameters, None where they are not known. Those of an operator or a scripted function are in its schema."""
    one: Any = getattr(function, "_opoverload", getattr(function, "default", function))
    schema = getattr(one, "schema", None) or getattr(one, "_schema", None)
    arguments = getattr(schema, "arguments", None)
    if arguments is None:
        try:
            return list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # a built-in function, or what is not callable
            return None
    kinds = {False: inspect.Parameter.POSITIONAL_OR_KEYWORD, True: inspect.Parameter.KEYWORD_ONLY}
    defaults = [a.default_value if a.has_default_value() else inspect.Parameter.empty for a in arguments]
    pairs = zip(arguments, defaults, strict=True)
    return [inspect.Parameter(a.name, kinds[a.kwarg_only], default=d) for a, d in pairs]


def argument_names(function: Callable[..., Any]) -> list[str] | None:
    """The names of all arguments, None where these are not known or where it takes any.

    >>> argument_names(lambda x, weight, eps=1e-6: x)
    ['x', 'weight', 'eps']
    """
    parameters = parameters_of(function)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters]


def optional_of(function: Callable[..., Any]) -> frozenset[str]:
    """The arguments (scale, bias, gate, mask, residual) that a function may be called without.

    >>> sorted(optional_of(lambda x, weight, bias=None: x))
    ['bias']
    """
    every = [p for p in parameters_of(function) or () if p.default is not p.empty]
    return frozenset(argument for p in every if (argument := argument_named(p.name)))


def requires_residual(call: Callable[..., Any]) -> bool:
    """Whether a function, or the call of a layer, takes no x without a residual.

    >>> requires_residual(lambda x, residual, weight: x), requires_residual(lambda x, weight, residual=None: x)
    (True, False)
    """
    return any(argument_named(p.name) == "residual" and p.default is p.empty for p in parameters_of(call) or ())


def _key(parameter: inspect.Parameter) -> str:
    return "" if parameter.kind is parameter.POSITIONAL_ONLY else parameter.name


def makes_layers(function: Callable[..., Any]) -> bool:
    """Whether a function makes layers: its first argument is a width, or it has no argument."""
    parameters = parameters_of(function)
    if not parameters:
        return parameters is not None
    return len(parameters[0].name) > 1 and parameters[0].name in _WIDTHS


def _signature(make: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    parameters = inspect.signature(make).parameters
    if isinstance(make, type) and all(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values()):
        build: Any = vars(make).get("__init__", object.__init__)  # its metaclass hides the signature
        return dict(list(inspect.signature(build).parameters.items())[1:])
    return parameters


def constructor_arguments(make: Callable[..., Any], init: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Keyword arguments for a constructor: those of ``init``, and values for the others that it requires.

    Raises:
        Unguessable: the name of a required one does not say its value, or ``init`` has one that it does not take.
    """
    try:
        parameters = _signature(make)
    except (TypeError, ValueError):
        return dict(init)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in init:
        if name not in parameters and not takes_any:
            raise Unguessable(f"takes no argument {name!r}, expected some of {', '.join(parameters)}")
    chosen = dict(init)
    for name, parameter in parameters.items():
        if name in chosen or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        required = parameter.default is parameter.empty
        if name == "rngs":
            from flax import nnx

            chosen[name] = nnx.Rngs(0)
        elif name in _WIDTHS and (required or (parameter.default is None and "int" in str(parameter.annotation))):
            chosen[name] = width
        elif required and name in _EPS:
            chosen[name] = 1e-6
        elif required and name in ("axis", "axes"):
            chosen[name] = -1
        elif required and name.startswith("create_"):  # Haiku and Sonnet: create_scale, create_offset
            chosen[name] = True
        elif required and name == "group_size":
            chosen[name] = max(1, width // 4)
        elif required and re.search("config|cfg|args", name):
            chosen[name] = Config(width)
        elif required:
            raise Unguessable(f"requires {name!r}, whose value cannot be guessed", name)
    return chosen


def width_argument(init: Mapping[str, Any]) -> str | None:
    """The name of the argument in ``init`` that is the width as a number, None where it has none."""
    return next((name for name, value in init.items() if name in _WIDTHS and isinstance(value, int)), None)


class Config:
    """Stands in for a model's configuration: it has sizes and eps, and nothing else."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __repr__(self) -> str:
        return f"a configuration of sizes {self._width} and eps 1e-06"

    def __getattr__(self, name: str) -> Any:
        if "eps" in name:
            return 1e-6
        if name in _WIDTHS or re.search("size|dim|rank", name):
            return self._width
        raise AttributeError(f"the configuration's {name!r} cannot be guessed")
