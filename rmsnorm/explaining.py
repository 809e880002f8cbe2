"""Which code computes a call, a kernel or the recipe, and why. The call is made once, and its kernels are noted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

from rmsnorm import cpu
from rmsnorm.engines import Prepared, prepare
from rmsnorm.specification import errors
from rmsnorm.specification.frameworks import FRAMEWORKS, Framework, framework_of

_ARRAYS: Final = {"torch": "torch.Tensor", "tf": "a tf.Tensor", "flax": "a jax.Array", "numpy": "a NumPy array"}


def explain(x: Any, scale: Any = None, bias: Any = None, **options: Any) -> str:
    """What a call of ``rms_norm`` or of a layer runs: a kernel, or the recipe in the framework's operations, and why.

    The call is made once, as the framework makes it outside of a compiler, of JAX as it compiles it; of NumPy ``fast``
    is called. The name of a kernel has the dtypes of x and y.

    Args:
        x, scale, bias, options: those of ``rms_norm`` of the framework of x. Or x is a layer, a model or any other
            function of a framework's arrays; what follows are then the arguments of its call, the first two of them by
            position. Of several kernels there is how often each is called.

    Raises:
        TypeError: x is no array of a framework, and cannot be called with one.
        TypeError, ValueError: what the call raises.

    Example:
        >>> import numpy as np
        >>> explain(np.ones((0, 8), "float32"))
        'NumPy: the golden, as x has no elements'
    """
    if callable(x) and framework_of(x) is None:
        return _explained_call(x, [array for array in (scale, bias) if array is not None], options)
    row = _framework(x)
    prepared = _prepared(x, scale, bias, options)
    arrays = {name: value for name, value in options.items() if name in ("mask", "residual", "gate")}
    if row.key == "flax":
        others = {name: value for name, value in options.items() if name not in arrays}
        rms_norm = _module(row).rms_norm
        names = _traced(lambda first, named: rms_norm(*first, **named, **others), (x, scale, bias), arrays)
    else:
        with _noted() as names:
            _module(row).rms_norm(x, scale, bias, **options)
    if not names:
        reason = _why_not(row)(prepared, (x, scale, bias, *map(options.get, ("mask", "residual", "gate"))))
        if reason is None:  # of the kernels for CPUs alone there are names
            return f"{row.title}: kernels for GPUs, in Triton"
        return f"{row.title}: {'the golden' if row.key == 'numpy' else 'the recipe'}, as {reason}"
    rest = "" if options.get("gate") is None else ", and operations for the gate"
    return f"{row.title}: kernel {' and '.join(dict.fromkeys(names))}{rest} (compiled for {_level()})"


def _explained_call(function: Any, arrays: list[Any], options: dict[str, Any]) -> str:
    """What a call of a layer, or of any function, runs."""
    of_a_framework = [value for value in (*arrays, *options.values()) if framework_of(value) is not None]
    if not of_a_framework:
        raise errors.wrong_type(
            "explain", "x", None, "an array of a framework", "which code runs depends on it: explain(layer, x)"
        )
    row = _framework(of_a_framework[0])
    if row.key == "flax":
        names = _traced(lambda first, named: function(*first, **named), arrays, options)
    else:
        with _noted() as names:
            function(*arrays, **options)
    if not names:
        return f"{row.title}: no kernel of rmsnorm was called; give the arrays of a norm in it to explain, to see why"
    counts = Counter(names)
    kernels = [name if count == 1 else f"{name} ({count} times)" for name, count in counts.items()]
    return f"{row.title}: kernel {' and '.join(kernels)} (compiled for {_level()})"


def _module(row: Framework) -> Any:
    """Where the functions of a framework are."""
    module = "numpy_impl.fast" if row.key == "numpy" else f"{row.folder}.functional"
    return import_module(f"rmsnorm.{module}")


def _why_not(row: Framework) -> Callable[[Prepared, Any], str | None]:
    """Why no kernel computes a call with these arrays: the function of a framework that decides it."""
    module = "numpy_impl.fast" if row.key == "numpy" else f"{row.folder}.kernels"
    function: Callable[[Prepared, Any], str | None] = import_module(f"rmsnorm.{module}").why_not
    return function


def _framework(x: Any) -> Framework:
    key = framework_of(x)
    if key is None:
        raise errors.wrong_type("explain", "x", x, "an array of a framework", f"pass {', '.join(_ARRAYS.values())}")
    return FRAMEWORKS[key]


def _prepared(x: Any, scale: Any, bias: Any, options: dict[str, Any]) -> Prepared:
    arrays = (options.get(name) for name in ("mask", "residual", "gate"))
    names = "eps", "partial", "axis", "feature_axis", "out_dtype"
    others: Any = (options.get(name, -1 if name == "axis" else None) for name in names)
    return prepare("explain", (options.get("variant", "standard"), *others), x, scale, bias, *arrays)


@contextmanager
def _noted() -> Iterator[list[str]]:
    """The names of the kernels that run within, of every thread."""
    if not cpu.is_available():
        yield []
        return
    from rmsnorm.cpu import launch

    with launch.noted() as names:
        yield names


def _traced(function: Callable[..., Any], arrays: Any, options: dict[str, Any]) -> list[str]:
    """The names of the kernels in the program of JAX's arrays that XLA gets."""
    import jax

    named = {name: value for name, value in options.items() if framework_of(value) is not None}
    others = {name: value for name, value in options.items() if name not in named}
    program = jax.jit(lambda arrays, named: function(arrays, {**named, **others}))
    with _noted() as names:
        program.lower(tuple(arrays), named)
    return names


def _level() -> str:
    """The processors that the kernels are compiled for."""
    from rmsnorm.cpu import launch

    return launch.level()
