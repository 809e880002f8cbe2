"""RMSNorm on the GPU, compiled just in time: Triton kernels for PyTorch.

    plan                            how an array is divided between the programs of a GPU
    triton_pairs                    arithmetic: pairs of numbers, numbers cut off, 1 / rho
    triton_quotient, _gradient      y and dx of a tile; triton_cancelled: dx of a row that cancels
    triton_forward, _backward       the kernels

On a machine without a GPU an interpreter runs the kernels on arrays of the CPU: RMSNORM_GPU_KERNELS=interpret and
Triton's own TRITON_INTERPRET=1 do that, in place of the kernels for the CPU. RMSNORM_GPU_KERNELS=0 switches them off.
"""

from __future__ import annotations

import os
import sys
import warnings
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from rmsnorm.specification import environment, errors
from rmsnorm.specification.call import Call

_WIDEST: Final = 2**26  # elements of a row: its chunks are summed in one tile
_OLDEST: Final = 3, 4  # Triton, which hands eps as a float32 to a kernel before
_OLDEST_CARD: Final = 80  # compute capability: the first that converts to bfloat16


@lru_cache(maxsize=1)
def is_interpreted() -> bool:
    """Whether arrays of the CPU are computed by the kernels for GPUs, interpreted."""
    if environment.read("RMSNORM_GPU_KERNELS") != "interpret":
        return False
    if os.environ.get("TRITON_INTERPRET") != "1":
        fix = "set both before Triton is imported"
        raise errors.out_of_domain("rmsnorm", "RMSNORM_GPU_KERNELS", "interpret", "TRITON_INTERPRET=1 beside it", fix)
    return True


def is_switched_off() -> bool:
    return environment.read("RMSNORM_GPU_KERNELS") == "0"


def has_triton() -> bool:
    """Whether Triton is imported, which this does. If it cannot, it warns, unless the kernels are switched off.

    Nothing is cached but what cannot change: TensorFlow may be imported between two calls.
    """
    if is_switched_off():
        return False
    if "triton" not in sys.modules:
        if not _is_installed():
            _warn("triton is not installed", "pip install triton")
            return False
        if "tensorflow" in sys.modules:  # seen with tensorflow 2.21 and triton 3.9
            _warn("tensorflow was imported before triton, which would end the process", "import triton first")
            return False
        import_module("triton")  # now, as TensorFlow may be imported before the first kernel runs
    version = getattr(sys.modules["triton"], "__version__", "0")
    if tuple(map(int, version.split(".")[:2])) < _OLDEST:
        _warn(f"triton {version} is older than 3.4", "install PyTorch 2.8 or newer, which brings one")
        return False
    return True


@lru_cache(maxsize=1)
def _is_installed() -> bool:
    return find_spec("triton") is not None


@lru_cache(maxsize=3)
def _warn(why: str, fix: str) -> None:
    """Once each."""
    warnings.warn(
        f"rmsnorm: {why}; on the GPU slower code computes the same results; "
        f"{fix}, or set RMSNORM_GPU_KERNELS=0 to hide this warning",
        stacklevel=3,
    )


def refusal(call: Call) -> str | None:
    """Why the kernels could not compute a call ``in_rows`` that those for CPUs could."""
    if call.k != call.n:
        return "the kernels for GPUs count all elements of a row"
    return "the kernels for GPUs do not compute such long rows" if call.n > _WIDEST else None


def missing(card: int | str | None) -> str | None:
    """Why there are no kernels for a card, of which its compute capability is given, 90 for 9.0; None if there are.

    A text says why there can be none, None that there is no such card. Each reason but the last is a warning, once.
    """
    if is_switched_off():
        return "RMSNORM_GPU_KERNELS=0 switches the kernels off"
    if card is None:
        return "the kernels for GPUs need a GPU of Nvidia"
    if isinstance(card, int) and card < _OLDEST_CARD:
        card = f"the compute capability of the GPU is {card / 10}, and the kernels need 8.0"
    if isinstance(card, str):
        _warn(card, "use another GPU")
        return card
    return None if has_triton() else "there is no Triton that the kernels can be compiled with"
