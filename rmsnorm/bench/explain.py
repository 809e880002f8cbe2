"""Which code computes a call, and why no kernel does. The call itself is made once, and its kernels are noted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

from rmsnorm import cpu, errors
from rmsnorm.call import Call, Spec, resolve
from rmsnorm.frameworks import FRAMEWORKS, Framework
from rmsnorm.variants import derive

_ARRAYS = {"torch": "torch.Tensor", "tf": "a tf.Tensor", "flax": "a jax.Array", "numpy": "a NumPy array"}


def explain(x: Any, scale: Any = None, bias: Any = None, **options: Any) -> str:
    """What a call of ``rms_norm`` with these arguments runs: a kernel, or plain operations and why.

    The call is made once, as the framework makes it outside of a compiler; of NumPy ``fast`` is called. Kernels have
    the names that ``python -m rmsnorm.cpu.build --list`` prints.

    Args:
        x, scale, bias, options: those of ``rms_norm`` of the framework of x.

    Raises:
        TypeError: x is no array of a framework.
        TypeError, ValueError: what ``rms_norm`` raises.

    Example:
        >>> import numpy as np
        >>> explain(np.ones((4, 8), "float32"), axis=0)
        'NumPy: plain operations, as the normalised axes are not the last ones'
    """
    row = _framework(x)
    call = _call(row, x, scale, bias, options)
    kernels = _traced(x, scale, bias, options) if row.key == "flax" else _called(row, x, scale, bias, options)
    names = list(dict.fromkeys(kernels))
    if not names:
        present = {"bias": bias, **options}
        arrays = tuple(name for name in ("bias", "mask", "residual") if present.get(name) is not None)
        reason = (
            cpu.why_not(call, _dtype(options.get("gate")), arrays) or "an array is not in the memory of a CPU as it is"
        )
        return f"{row.title}: plain operations, as {reason}"
    beside = ""
    if options.get("gate") is not None and call.variant.gate_function not in names[0]:
        beside = ", and plain operations for the gate"
    return f"{row.title}: kernel {' and '.join(names)}{beside}"


def _framework(x: Any) -> Framework:
    for key in ("torch", "tf", "flax", "numpy"):
        packages = {base.__module__.partition(".")[0] for base in type(x).__mro__}
        if packages & {FRAMEWORKS[key].package, *(("jaxlib",) if key == "flax" else ())}:
            return FRAMEWORKS[key]
    raise errors.wrong_type("explain", "x", x, "an array of a framework", f"pass {', '.join(_ARRAYS.values())}")


def _dtype(array: Any) -> str | None:
    if array is None:
        return None
    name = getattr(array.dtype, "name", None) or str(array.dtype)
    return str(name).removeprefix("torch.")


def _call(row: Framework, x: Any, scale: Any, bias: Any, options: dict[str, Any]) -> Call:
    specs = {"x": x, "scale": scale, "bias": bias, **{name: options.get(name) for name in ("mask", "residual", "gate")}}
    found: dict[str, Any] = {
        name: None if array is None else Spec(tuple(array.shape), str(_dtype(array))) for name, array in specs.items()
    }
    variant = derive("explain", options.get("variant", "standard"), options.get("eps"), options.get("partial"))
    axes = {name: options[name] for name in ("axis", "feature_axis") if options.get(name) is not None}
    return resolve("explain", variant=variant, out_dtype=options.get("out_dtype"), **found, **axes)


def _called(row: Framework, x: Any, scale: Any, bias: Any, options: dict[str, Any]) -> list[str]:
    module = "numpy_impl.fast" if row.key == "numpy" else f"{row.folder}.functional"
    with _noted() as kernels:
        import_module(f"rmsnorm.{module}").rms_norm(x, scale, bias, **options)
    return kernels


@contextmanager
def _noted() -> Iterator[list[str]]:
    """The names of the kernels that run within, of every thread."""
    if not cpu.is_available():
        yield []
        return
    from rmsnorm.cpu import launch, machine_code

    names: list[str] = []

    def noted(run: Callable[..., None]) -> Callable[..., None]:
        def run_forward(plan: Any, threads: Any, owners: Any, *arguments: int) -> None:
            run(plan, threads, owners, *arguments)
            used = plan.forward_kernel(arguments)
            names.extend(name for name, address in machine_code.known().items() if address == used)

        return run_forward

    with patch.object(launch.Plan, "run_forward", noted(launch.Plan.run_forward)):
        yield names


def _traced(x: Any, scale: Any, bias: Any, options: dict[str, Any]) -> list[str]:
    """Of JAX: what the program that XLA gets calls."""
    import jax

    from rmsnorm.flax_impl.functional import rms_norm

    arrays = {name: value for name, value in options.items() if name in ("mask", "residual", "gate")}
    others = {name: value for name, value in options.items() if name not in arrays}
    program = jax.jit(lambda x, scale, bias, arrays: rms_norm(x, scale, bias, **arrays, **others))
    text = program.lower(x, scale, bias, arrays).as_text()
    if "custom_call @rmsnorm(" not in text:
        return []
    from rmsnorm.cpu import launch, machine_code

    call = _call(FRAMEWORKS["flax"], x, scale, bias, options)
    call = call.without_gate if call.gate is not None else call
    key = launch.kernel_key("forward", call, options.get("mask") is not None, False, bias is not None)
    return [machine_code.name_of(*key.function)]
