"""The Pallas kernels as the primitives of rows.py have them lowered: for Nvidia's GPUs, or interpreted on the CPU.

    y = h / rho * (o + scale) + bias

They compute f16, bf16 and f32 without a mask and without a variance, on one device or on each device's own rows. All
else, and programs of jax.export, which may run with another version of XLA, are plain operations. The arithmetic is in
rmsnorm/gpu. Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final

import jax
from jax import numpy as jnp

from rmsnorm import gpu
from rmsnorm.call import Call

_OLDEST: Final = 8.0  # the first compute capability that XLA compiles Triton for


def supports(platform: str, call: Call, dtype: str, has_mask: bool) -> bool:
    """Whether the kernels compute a call on a platform, whose first operand has that dtype."""
    if has_mask or not gpu.supports(call, dtype):
        return False
    return gpu.is_interpreted() if platform == "cpu" else _is_usable()


def forward(platform: str, call: Call, h: jax.Array, scale: Any, bias: Any) -> Any:
    from rmsnorm.gpu.pallas_forward import forward

    with jax.enable_x64(True):
        return forward(call, h, scale, bias, is_interpreted=platform == "cpu")


def backward(
    platform: str, call: Call, wanted: tuple[str | None, ...],
    dy: jax.Array, h: jax.Array, inverse_rms: Any, scale: Any, dh: Any,
) -> Any:  # fmt: skip
    """Without 1 / rho this is computed again."""
    from rmsnorm.gpu.pallas_backward import backward
    from rmsnorm.gpu.pallas_forward import inverse_rms_of

    with jax.enable_x64(True):
        is_interpreted = platform == "cpu"
        if inverse_rms is None:
            inverse_rms = inverse_rms_of(call, h, is_interpreted=is_interpreted)
        return backward(call, wanted, dy, h, inverse_rms, scale, dh, is_interpreted=is_interpreted)


@contextmanager
def without_notice() -> Iterator[None]:
    """JAX 0.12 says at each call of Pallas that it will compile by Triton no longer. Then plain operations compute."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        yield


@lru_cache
def _is_usable() -> bool:
    """Whether JAX compiles the kernels for the GPUs. If it does not, a warning says why."""
    if gpu.is_switched_off():
        return False
    oldest = min((float(d.compute_capability) for d in _gpus()), default=_OLDEST)
    if oldest < _OLDEST:
        why = f"the compute capability of a GPU is {oldest}, and the kernels need {_OLDEST}"
    else:
        try:
            _compile_nothing()
            return True
        except Exception as error:  # JAX has no Pallas for GPUs, does not know this GPU, or compiles only where one is
            why = f"JAX does not compile kernels for it: {str(error).splitlines()[0]}"
    warnings.warn(f"rmsnorm: slower code computes the same results on the GPU: {why}", stacklevel=2)
    return False


def _compile_nothing() -> None:
    """Raises what a kernel would raise that is compiled for a GPU."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    import rmsnorm.gpu.pallas_backward  # noqa: F401

    def copy(x: Any, y: Any) -> None:
        y[...] = x[...]

    like = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    run = pl.pallas_call(copy, out_shape=like, compiler_params=triton.CompilerParams())
    with without_notice():
        jax.jit(run).trace(like).lower(lowering_platforms=("cuda",))


def _gpus() -> list[Any]:
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:  # there is none: the program is for another machine
        return []
