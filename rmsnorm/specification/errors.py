"""Builds every error message: name, got, wanted and fix in one sentence. No array library."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Number
from typing import Any, Final

from rmsnorm.specification import dtypes

Shape = Sequence[int | None]
_SYNONYMS: Final = (  # what the frameworks and their users call the same argument
    {"eps", "epsilon", "variance_epsilon", "rms_norm_eps", "layer_norm_eps", "layernorm_epsilon"},
    {"scale", "weight", "weights", "gamma", "gain", "g", "elementwise_affine", "use_scale"},
    {"bias", "beta", "b", "use_bias"},
    {"normalized_shape", "num_features", "dim", "hidden_size", "d_model", "features", "width", "n", "size"},
    {"axis", "axes", "reduction_axes", "dim", "dims"},
    {"feature_axis", "feature_axes"},
    {"partial", "p", "p_rms", "partial_rmsnorm"},
    {"variant", "preset", "kind", "style"},
    {"out_dtype", "dtype", "output_dtype"},
    {"x", "input", "inputs", "hidden_states", "tensor"},
)
_REASONS: Final = 4  # in a message
_LONGEST: Final = 200  # characters of a value in a message


def describe(shape: Shape, dtype: str) -> str:
    """Describes an array as ``f32[4, 16]``; an unknown size is ``?``.

    >>> describe((4, None), "float32")
    'f32[4, ?]'
    """
    return f"{dtypes.short(dtype)}[{', '.join('?' if size is None else str(size) for size in shape)}]"


class InputError(Exception):
    """What came from a user or in a file is not valid. Any other error is a mistake of this package or of a library."""


class InputValueError(InputError, ValueError):
    """A value that is not valid."""

    __init__ = Exception.__init__  # TensorFlow's AutoGraph raises such a class again with its own text, no other


class InputTypeError(InputError, TypeError):
    """A value of a type that is not valid."""

    __init__ = Exception.__init__


class ShapeError(InputValueError, RuntimeError):
    """A shape that does not fit. It is a RuntimeError, too, as code around PyTorch's own layer catches that."""

    __init__ = Exception.__init__


class MissingFramework(InputError, ModuleNotFoundError):
    """A framework that is asked for and is not installed."""


def wrong_shape(op: str, name: str, got: Shape, want: Shape, why: str) -> ValueError:
    return ShapeError(f"{op}: {name} has shape {tuple(got)}, expected {tuple(want)} to match {why}")


def wrong_mask_shape(op: str, got: Shape, x: str) -> ValueError:
    return ShapeError(f"{op}: mask has shape {tuple(got)}, expected one that broadcasts to x {x}; reshape it")


def wrong_dtype(op: str, name: str, got: str, want: Iterable[str]) -> TypeError:
    wanted = _either(want)
    return InputTypeError(f"{op}: {name} has dtype {got}, expected {wanted}; cast it first")


def wrong_rank(op: str, name: str) -> ValueError:
    return ShapeError(f"{op}: {name} is 0-d, expected at least one axis to normalise; reshape it to (1,)")


def unknown_rank(op: str, name: str) -> ValueError:
    return InputValueError(f"{op}: {name} has an unknown rank, expected a known one; call set_shape on it first")


def unknown_size(op: str, name: str, axis: int) -> ValueError:
    return InputValueError(
        f"{op}: {name} axis {axis} has an unknown size, expected a known one; give it in the input shape"
    )


def axis_out_of_range(op: str, name: str, axis: int, x: str, rank: int) -> ValueError:
    return InputValueError(
        f"{op}: {name} is {axis}, expected between {-rank} and {rank - 1} for x {x}; count from the last"
    )


def axis_repeated(op: str, name: str, axes: Sequence[int], x: str) -> ValueError:
    return InputValueError(f"{op}: {name} {tuple(axes)} names an axis of x {x} twice, expected distinct ones; drop one")


def no_axis(op: str, name: str) -> ValueError:
    return InputValueError(f"{op}: {name} is empty, expected at least one axis; pass -1 for the last")


def wrong_type(op: str, name: str, got: Any, want: str, fix: str) -> TypeError:
    return InputTypeError(f"{op}: {name} is {shown(got)} ({type(got).__name__}), expected {want}; {fix}")


def out_of_domain(op: str, name: str, got: Any, want: str, fix: str) -> ValueError:
    return InputValueError(f"{op}: {name} is {shown(got)}, expected {want}; {fix}")


def nothing_compared(op: str, name: str, reasons: Iterable[str]) -> ValueError:
    why = "; ".join(list(reasons)[:_REASONS]) or "there is none"
    return InputValueError(
        f"{op}: {name} was compared in no case, expected at least one ({why}); ask for what it takes"
    )


def not_a_choice(op: str, name: str, got: Any, choices: Iterable[Any], near: str | None = None) -> ValueError:
    hint = f"; did you mean {near!r}?" if near else "; choose one of these"
    return InputValueError(f"{op}: {name} is {shown(got)}, expected {_either(map(repr, choices))}{hint}")


def unknown_argument(op: str, name: str, known: Iterable[str], instead: Mapping[str, str] | None = None) -> TypeError:
    """For an argument that does not exist: the one that is meant, by its name elsewhere or by its spelling.

    >>> unknown_argument("rms_norm", "epsilon", ["x", "scale", "eps"]).args[0]
    "rms_norm: there is no argument 'epsilon', expected 'x', 'scale' or 'eps'; did you mean 'eps'?"
    """
    known = list(known)
    near = [other for other in known if any({name.lower(), other} <= names for names in _SYNONYMS)]
    near = near or difflib.get_close_matches(name.lower(), known, n=1)
    fix = (instead or {}).get(name) or (f"did you mean {near[0]!r}?" if near else "choose one of these")
    return InputTypeError(f"{op}: there is no argument {name!r}, expected {_either(map(repr, known))}; {fix}")


def family(op: str, name: str, norms: Iterable[tuple[str, float | None]]) -> ValueError:
    """For a family of models in the place of a variant; norms: what its norms compute, and their eps by default.

    >>> family("check", "qwen3", [("llama", 1e-6), ("llama", 1e-6)]).args[0]
    "check: variant is 'qwen3', a family of models, expected a name of a variant; its variant is llama, with eps 1e-06"
    """
    texts = dict.fromkeys(variant + ("" if eps is None else f", with eps {eps:g}") for variant, eps in norms)
    fix = f"its variant is {next(iter(texts))}"
    if len(texts) > 1:
        fix = f"its norms are {'; '.join(texts)} (`rmsnorm variants {name}` says which)"
    return InputValueError(f"{op}: variant is {name!r}, a family of models, expected a name of a variant; {fix}")


def dtype_named(op: str, name: str, dtype: Any, known: Sequence[str] = dtypes.FLOATS) -> str:
    """The name of a dtype: every option and argument that names one is read here.

    Raises:
        ValueError: it is none of the known ones.

    >>> dtype_named("check", "dtype", "bf16")
    'bfloat16'
    """
    spelled = dtypes.spelled(dtype)
    if spelled not in known:
        got = dtype if dtype is None or isinstance(dtype, (str, Number)) else spelled
        near = dtypes.meant(spelled)
        raise not_a_choice(op, name, got, known, near if near in known else None)
    return spelled


def wrong_layout(op: str, name: str, got: str, layout: str) -> TypeError:
    return InputTypeError(f"{op}: {name} {got} is {layout}, expected a dense tensor; call to_dense() first")


def wrong_device(op: str, name: str, got: str, want: str) -> ValueError:
    fix = "load its values first" if got == "meta" else f"move it there with .to({want!r})"
    return InputValueError(f"{op}: {name} is on the device {got}, expected {want}, where x is; {fix}")


def shown(value: Any) -> str:
    """A value in a message: an array by its dtype and shape, anything else written out if it is short.

    >>> shown("last"), len(shown("very " * 1000))
    ("'last'", 200)
    """
    try:
        shape, dtype = tuple(value.shape), getattr(value.dtype, "name", str(value.dtype)).removeprefix("torch.")
    except (AttributeError, TypeError, ValueError):  # no array, or of unknown rank
        shape, dtype = (), ""
    text = describe(shape, dtype) if shape else repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def printable(text: str) -> str:
    r"""Text from outside without what a terminal obeys, and what UTF-8 cannot have: escapes in their place.

    >>> printable("\x1b[31mred\ud800, 1 µs") == r"\x1b[31mred\ud800, 1 µs"
    True
    """
    if text.isprintable():
        return text
    parts = (c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return "".join(parts)


def missing_primal(op: str, tangent: str) -> ValueError:
    primal = tangent.removeprefix("d")
    return InputValueError(f"{op}: {tangent} is given without {primal}, expected both or neither; pass {primal} too")


def install(extra: str) -> str:
    """How an extra is installed, in every message; the package is not on PyPI yet.

    >>> install("torch")
    "from a checkout: pip install '.[torch]'"
    """
    return f"from a checkout: pip install '.[{extra}]'"


def missing_framework(name: str, extra: str, instead: str = "") -> ModuleNotFoundError:
    message = f"rmsnorm: {name} is not installed, expected for this backend; {install(extra)}{instead}"
    return MissingFramework(message, name=name)


def damaged(op: str, path: object, reason: object, want: str) -> ValueError:
    return InputValueError(f"{op}: {path} is damaged ({printable(str(reason))}), expected {want}; copy it again")


def of_system(op: str, error: OSError) -> str:
    """What the system said of a file; an OSError that this package raised is a sentence already.

    >>> of_system("rmsnorm", PermissionError(13, "Permission denied", "/data/a.json"))
    'rmsnorm: /data/a.json cannot be used, as the system says: Permission denied'
    """
    if error.strerror is None:
        return str(error)
    return f"{op}: {error.filename or 'standard output'} cannot be used, as the system says: {error.strerror}"


class AnotherKind(InputValueError):
    """A file that is whole, and of another kind than was asked for."""

    __init__ = Exception.__init__


def another_kind(op: str, path: object, kind: str, want: str, fix: str) -> ValueError:
    return AnotherKind(f"{op}: {path} is {kind}, expected {want}; {fix}")


def no_memory(op: str, shape: Shape) -> ValueError:
    fix = "bring it back first, as FSDP's summon_full_params does"
    return InputValueError(
        f"{op}: a tensor of shape {tuple(shape)} has no memory, as its storage was resized to 0; {fix}"
    )


def not_scripted(op: str) -> TypeError:
    fix = "use torch.compile, torch.export, or torch.jit.trace, which writes down operations of PyTorch alone"
    return InputTypeError(f"{op}: torch.jit.script cannot compile this layer, as it chooses its way in Python; {fix}")


def _either(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
