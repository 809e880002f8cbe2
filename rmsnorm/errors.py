"""Builds every error message: name, got, wanted and fix in one sentence. No array library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rmsnorm import dtypes

Shape = Sequence[int | None]


def describe(shape: Shape, dtype: str) -> str:
    """Describes an array as ``f32[4, 16]``; an unknown size is ``?``.

    >>> describe((4, None), "float32")
    'f32[4, ?]'
    """
    return f"{dtypes.short(dtype)}[{', '.join('?' if size is None else str(size) for size in shape)}]"


class ShapeError(ValueError, RuntimeError):
    """A shape that does not fit. Both classes, as code around PyTorch's own layer catches RuntimeError."""

    __init__ = Exception.__init__  # TensorFlow's AutoGraph raises such a class again with its own text, no other


def wrong_shape(op: str, name: str, got: Shape, want: Shape, why: str) -> ValueError:
    return ShapeError(f"{op}: {name} has shape {tuple(got)}, expected {tuple(want)} to match {why}")


def wrong_mask_shape(op: str, got: Shape, x: str) -> ValueError:
    return ShapeError(f"{op}: mask has shape {tuple(got)}, expected one that broadcasts to x {x}; reshape it")


def wrong_dtype(op: str, name: str, got: str, want: Iterable[str]) -> TypeError:
    wanted = _either(want)
    return TypeError(f"{op}: {name} has dtype {got}, expected {wanted}; cast it first")


def wrong_rank(op: str, name: str) -> ValueError:
    return ShapeError(f"{op}: {name} is 0-d, expected at least one axis to normalise; reshape it to (1,)")


def unknown_rank(op: str, name: str) -> ValueError:
    return ValueError(f"{op}: {name} has an unknown rank, expected a known one; call set_shape on it first")


def unknown_size(op: str, name: str, axis: int) -> ValueError:
    return ValueError(f"{op}: {name} axis {axis} has an unknown size, expected a known one; give it in the input shape")


def axis_out_of_range(op: str, name: str, axis: int, x: str, rank: int) -> ValueError:
    return ValueError(f"{op}: {name} is {axis}, expected between {-rank} and {rank - 1} for x {x}; count from the last")


def axis_repeated(op: str, name: str, axes: Sequence[int], x: str) -> ValueError:
    return ValueError(f"{op}: {name} {tuple(axes)} names an axis of x {x} twice, expected distinct ones; drop one")


def no_axis(op: str, name: str) -> ValueError:
    return ValueError(f"{op}: {name} is empty, expected at least one axis; pass -1 for the last")


def wrong_type(op: str, name: str, got: Any, want: str, fix: str) -> TypeError:
    return TypeError(f"{op}: {name} is {got!r} ({type(got).__name__}), expected {want}; {fix}")


def out_of_domain(op: str, name: str, got: Any, want: str, fix: str) -> ValueError:
    return ValueError(f"{op}: {name} is {got!r}, expected {want}; {fix}")


def not_a_choice(op: str, name: str, got: Any, choices: Iterable[Any], near: str | None = None) -> ValueError:
    hint = f"; did you mean {near!r}?" if near else "; choose one of these"
    return ValueError(f"{op}: {name} is {got!r}, expected {_either(map(repr, choices))}{hint}")


def missing_primal(op: str, tangent: str) -> ValueError:
    primal = tangent.removeprefix("d")
    return ValueError(f"{op}: {tangent} is given without {primal}, expected both or neither; pass {primal} too")


def missing_framework(name: str, extra: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"rmsnorm: {name} is not installed, expected for this backend; pip install 'rmsnorm[{extra}]'"
    )


def damaged(op: str, path: object, reason: object, want: str) -> ValueError:
    return ValueError(f"{op}: {path} is damaged ({reason}), expected {want}; copy it again")


def no_memory(op: str, shape: Shape) -> ValueError:
    fix = "bring it back first, as FSDP's summon_full_params does"
    return ValueError(f"{op}: a tensor of shape {tuple(shape)} has no memory, as its storage was resized to 0; {fix}")


def not_scripted(op: str) -> TypeError:
    fix = "use torch.compile, torch.export, or torch.jit.trace, which writes down operations of PyTorch alone"
    return TypeError(f"{op}: torch.jit.script cannot compile this layer, as it chooses its way in Python; {fix}")


def _either(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
