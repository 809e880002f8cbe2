"""What the arguments of a function, the parameters of a layer and those of its constructor mean, by their names."""

from __future__ import annotations

import inspect
import re
from ast import literal_eval
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

_NAMES: Final = {
    "scale": ("weight", "scale", "gamma", "gain", "g", "w", "s", "weights", "new_std", "alpha"),
    "bias": ("bias", "beta", "b", "shift"),
    "gate": ("gate", "z"),
    "mask": ("mask",),
    "residual": ("residual", "skip", "residual_in", "residual_input", "res"),
}
_XS: Final = ("x", "input", "inputs", "hidden_states", "hidden_state", "h", "tensor", "inp", "hidden", "q", "query")
_WIDTHS: Final = (
    "dim", "hidden_size", "normalized_shape", "num_features", "features", "width", "d_model", "size", "channels",
    "num_channels", "embed_dim", "hidden_dim", "n", "d", "shape", "dims", "c_in", "hidden", "n_embd", "in_features",
    "input_size", "feature_dim", "head_dim", "n_cols", "num_cols", "cols",
)  # fmt: skip
_ROWS: Final = ("rows", "n_rows", "num_rows", "num_tokens", "n_tokens")
_EPS: Final = re.compile(r"(^|_)eps(ilon)?(_|$)")
_OFFSETS: Final = ("offset", "weight_bias", "weight_offset", "scale_offset", "gain_offset", "gamma_offset")
_CENTRED: Final = ("zero_centered_gamma", "zero_centered", "unit_offset", "add_unit_offset")  # flags of 1 + gain
_SWITCH: Final = re.compile(r"^(return|use|has|with|is|add|keep|store|apply|enable|do)_")
IN_PLACE: Final = "x as out, residual as h_out, weight, eps"  # an order of arguments, for sentences
BUFFERS: Final = {  # the arrays to which a function writes y, and x + residual
    "out": re.compile(r"(ln_)?out(put)?(_tensor|_ptr)?|result|dst"),
    "h_out": re.compile(r"(residual|res|h|sum)_out(put)?|out(put)?_(residual|h)"),
}


class Unguessable(TypeError):
    """A required argument, ``argument``, with a name that does not say what it means; empty where it is none."""

    def __init__(self, message: str, argument: str = "") -> None:
        super().__init__(message)
        self.argument = argument


class FromCall(Enum):
    """A value that is known only when the function is called."""

    GAIN_SHAPE = "the shape of the gain"
    WIDTH = "the width of x"
    ROWS = "the number of rows of x"
    EPS = "eps"
    OFFSET = "the number that is added to the gain"
    CENTRED = "whether 1 is added to the gain"


_AXES: Final = ("axis", "dim", "axes", "reduction_axes")
_FROM_CALL: Final = {
    **dict.fromkeys(_WIDTHS, FromCall.WIDTH), "normalized_shape": FromCall.GAIN_SHAPE,
    **dict.fromkeys(_ROWS, FromCall.ROWS), **dict.fromkeys(_OFFSETS, FromCall.OFFSET),
    **dict.fromkeys(_CENTRED, FromCall.CENTRED),
}  # fmt: skip


@dataclass(frozen=True)
class Slot:
    """A parameter of a function and what it gets.

    Attributes:
        key: its name, empty for one that is passed by its place.
        role: the name of an array (x, scale, bias, gate, mask, residual), of one that it writes to (out, h_out), or
            ``value``.
        value: of the role ``value``, a constant or what only a call knows.
        required: whether it must be passed.
        writes: out or h_out, where the function writes that to the array that has the role.
    """

    key: str
    role: str
    value: Any = None
    required: bool = True
    writes: str = ""


def argument_named(name: str) -> str | None:
    """The argument (scale, bias, gate, mask or residual) with one of the usual names for it, None for another name.

    >>> argument_named("gamma"), argument_named("e_score_correction"), argument_named("return_residual")
    ('scale', None, None)
    """
    word = name.lower().rsplit(".", 1)[-1].strip("_")
    if _SWITCH.match(word):
        return None
    for argument, names in _NAMES.items():
        if word in names or (len(word) > 3 and any(word.endswith("_" + entry) for entry in names if len(entry) > 3)):
            return argument
    return None


def means_eps(name: str) -> bool:
    """Whether a name is one of eps, as ``variance_epsilon`` is."""
    return bool(_EPS.search(name))


def takes_array(parameter: inspect.Parameter) -> bool:
    """Whether a parameter may be an array: one with a flag or a number as its default is none."""
    return parameter.default in (parameter.empty, None) and str(parameter.annotation) not in ("bool", "<class 'bool'>")


def arguments_of(function: Callable[..., Any], axis: Any = -1, order: str | None = None) -> tuple[Slot, ...]:
    """The parameters of a function, in their order, that get something.

    x is the first parameter, unless that is a gain, the array for the result or the like, and a later one is named as
    x. An axis that it requires is ``axis``. ``order`` has the arguments by their place, for a function that does not
    show its own, or that writes its results to x or the residual.

    Raises:
        Unguessable: something else is required.

    Example:
        >>> [(slot.key, slot.role) for slot in arguments_of(lambda x, weight, eps: x)]
        [('', 'x'), ('weight', 'scale'), ('eps', 'value')]
        >>> [slot.role for slot in arguments_of(max, order="out, x, weight, 1e-5")]
        ['out', 'x', 'scale', 'value']
        >>> [(slot.role, slot.writes) for slot in arguments_of(max, order="x as out, residual as h_out")]
        [('x', 'out'), ('residual', 'h_out')]
    """
    every, keys, writes = (parameters_of(function), {}, {}) if order is None else _written(order)
    if every is None:
        return (Slot("", "x"),)
    parameters = [p for p in every if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not parameters:
        got = f"takes {inspect.Signature(every)}, which does not say what it takes" if every else "takes no argument"
        raise Unguessable(f"{got}, expected x")
    roles = _roles(parameters)
    meant = next((p.name for p in parameters if p.name.lower() in _XS and p.name not in roles), None)
    unread = parameters[0].name
    if meant is not None and roles.get(unread) == "x" and unread.lower() not in _XS:
        raise Unguessable(f"requires {unread!r} before {meant!r}, whose value cannot be guessed")
    slots = []
    for parameter in parameters:
        required, role = parameter.default is parameter.empty, roles.get(parameter.name)
        first = role == "x" and parameter is every[0] and parameter.kind is not parameter.KEYWORD_ONLY
        key = "" if first or parameter.kind is parameter.POSITIONAL_ONLY else keys.get(parameter.name, parameter.name)
        if role:
            slots.append(Slot(key, role, required=required, writes=writes.get(parameter.name, "")))
        elif isinstance(parameter.default, _Literal):
            slots.append(Slot(key, "value", parameter.default.value))
        elif means_eps(parameter.name.lower()):
            slots.append(Slot(key, "value", FromCall.EPS, required))
        elif required:
            slots.append(Slot(key, "value", _value(parameter, axis)))
    return tuple(slots)


def _roles(parameters: list[inspect.Parameter]) -> dict[str, str]:
    """The role of each parameter that gets an array, by its name."""
    arrays = {p.name: p.name.lower().strip("_") for p in parameters if takes_array(p)}
    required = {p.name for p in parameters if p.default is p.empty}
    roles: dict[str, str] = {}

    def give(role: str, name: str) -> None:
        if name in arrays and name not in roles and role not in roles.values():
            roles[name] = role

    buffers = {
        name: role for name, word in arrays.items() for role, names in BUFFERS.items()
        if name in required and names.fullmatch(word)
    }  # fmt: skip
    first, named_x = parameters[0], [name for name in required if arrays.get(name) in _XS]
    other = buffers.get(first.name) or argument_named(first.name) or first.name.lower() in ("y", "o")
    x = next((p.name for p in parameters if p.name in named_x), first.name) if other else first.name
    arrays.setdefault(x, x)
    give("x", x)
    if first.name.lower() in ("y", "o") and first.name != x:
        give("out", first.name)
    for name, role in buffers.items():
        give(role, name)
    names = [name for name in arrays if name not in roles and arrays[name] not in (*_OFFSETS, *_CENTRED)]
    several = sum(argument_named(name) == "scale" for name in names) > 1
    for name in names:
        if several and arrays[name] == "g":
            give("gate", name)  # beside a weight
        elif argument := argument_named(name):
            give(argument, name)
        elif arrays[name] in ("y", "o") and name in required:  # y next to x is added
            give("out" if "scale" in roles.values() or arrays[name] == "o" else "residual", name)
    for parameter in parameters:
        if parameter.name in arrays and arrays[parameter.name] == "offset" and _is_bias(parameter):
            give("bias", parameter.name)
    return roles


def _is_bias(parameter: inspect.Parameter) -> bool:
    """Whether an ``offset`` is added to y, as in tokamax, and not to the gain."""
    return parameter.default is None or bool(re.search("Array|Tensor|Float\\[", str(parameter.annotation)))


def _value(parameter: inspect.Parameter, axis: Any) -> Any:
    """What a required parameter that is no array gets."""
    name = parameter.name
    if name in _AXES:
        return axis
    if name not in _FROM_CALL:
        raise Unguessable(f"requires {name!r}, whose value cannot be guessed", name)
    is_flag = name in _OFFSETS and "bool" in str(parameter.annotation)
    return FromCall.CENTRED if is_flag else _FROM_CALL[name]


@dataclass(frozen=True)
class _Literal:
    """The default of a parameter that was written as a value."""

    value: Any


def _written(order: str) -> tuple[list[inspect.Parameter], dict[str, str], dict[str, str]]:
    """The parameters of ``out, x, weight, eps``, by their place, the keys of those as ``epsilon=eps``, and what is
    written to those as ``x as out``.

    A value in place of a word is a constant.
    """
    parameters: list[inspect.Parameter] = []
    keys: dict[str, str] = {}
    writes: dict[str, str] = {}
    for place, text in enumerate(order.split(",")):
        key, named, words = (part.strip() for part in text.rpartition("="))
        name, _, buffer = (part.strip() for part in words.partition(" as "))
        default: Any = inspect.Parameter.empty
        try:
            if not name.isidentifier() or name in ("None", "True", "False"):
                name, default = f"value_{place}", _Literal(literal_eval(name))
            if buffer not in ("", *BUFFERS):
                raise ValueError(buffer)
        except (ValueError, SyntaxError):
            want = f"the arguments in their order, such as 'out, x, weight, eps' or {IN_PLACE!r}"
            raise Unguessable(f"has call {order!r}, expected {want}") from None
        kind = inspect.Parameter.KEYWORD_ONLY if named else inspect.Parameter.POSITIONAL_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default))
        keys[name], writes[name] = key or name, buffer
    return parameters, keys, writes


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Its parameters, None where they are not known. Those of an operator or a scripted function are in its schema."""
    one: Any = getattr(function, "_opoverload", getattr(function, "default", function))
    schema = getattr(one, "schema", None) or getattr(one, "_schema", None)
    arguments = getattr(schema, "arguments", None)
    if arguments is None:
        sizes = str(getattr(function, "signature", None)).partition("->")  # of a generalised ufunc, as (n),(n)->(n)
        try:
            every = list(inspect.signature(function).parameters.values())
            return every[: sizes[0].count("(")] if sizes[2] else every
        except (TypeError, ValueError):  # a built-in function, or what is not callable
            return None
    kinds = {False: inspect.Parameter.POSITIONAL_OR_KEYWORD, True: inspect.Parameter.KEYWORD_ONLY}
    return [
        inspect.Parameter(
            a.name, kinds[a.kwarg_only],
            default=a.default_value if a.has_default_value() else inspect.Parameter.empty,
        )
        for a in arguments
    ]  # fmt: skip


def argument_names(function: Callable[..., Any]) -> list[str] | None:
    """The names of all arguments, None where these are not known or where it takes any.

    >>> argument_names(lambda x, weight, eps=1e-6: x)
    ['x', 'weight', 'eps']
    """
    parameters = parameters_of(function)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters]


def eps_argument(make: Callable[..., Any]) -> tuple[str, bool] | None:
    """The name of eps among the arguments of a constructor, and whether it requires it; None where it takes none."""
    try:
        parameters = _signature(make)
    except (TypeError, ValueError):
        return None
    return next(((name, p.default is p.empty) for name, p in parameters.items() if means_eps(name)), None)


def required_options(call: Callable[..., Any]) -> frozenset[str]:
    """Which of residual and mask a function, or the call of a layer, takes no x without.

    >>> required_options(lambda x, residual, weight: x), required_options(lambda x, weight, residual=None: x)
    (frozenset({'residual'}), frozenset())
    """
    needed = {argument_named(p.name) for p in parameters_of(call) or () if p.default is p.empty}
    return frozenset({"residual", "mask"} & needed)


def makes_layers(function: Callable[..., Any], init: Collection[str] = ()) -> bool:
    """Whether a function makes layers: it requires nothing beside ``init``.

    >>> makes_layers(lambda dim: None), makes_layers(lambda dim: None, ["dim"]), makes_layers(lambda dim=2: None)
    (False, True, True)
    """
    parameters = parameters_of(function)
    return parameters is not None and all(
        p.default is not p.empty or p.name in init or p.kind is p.VAR_KEYWORD for p in parameters
    )


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
        elif required and means_eps(name):
            chosen[name] = 1e-6
        elif required and name in ("axis", "axes"):
            chosen[name] = -1
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
