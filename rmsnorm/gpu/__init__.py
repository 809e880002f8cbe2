"""RMSNorm on the GPU, compiled just in time: Triton kernels for PyTorch.

    plan                            how an array is divided between the programs of a GPU
    triton_pairs                    arithmetic in pairs of float32,
    triton_forward, _backward       and the kernels

On a machine without a GPU an interpreter runs the kernels on arrays of the CPU: RMSNORM_GPU_KERNELS=interpret does
that, in place of the kernels for the CPU. RMSNORM_GPU_KERNELS=0 switches them off.
"""

from __future__ import annotations

import os
import sys
import warnings
from functools import lru_cache
from importlib.util import find_spec

from rmsnorm.call import Call


def is_interpreted() -> bool:
    """Whether arrays of the CPU are computed by the kernels for GPUs, interpreted."""
    return os.environ.get("RMSNORM_GPU_KERNELS") == "interpret"


if is_interpreted():
    os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads when it is imported


def is_switched_off() -> bool:
    return os.environ.get("RMSNORM_GPU_KERNELS") == "0"


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton can be imported. If it cannot, a warning says so, unless the kernels are switched off."""
    if is_switched_off():
        return False
    if find_spec("triton") is None:
        why, fix = "triton is not installed", "pip install triton"
    elif "tensorflow" in sys.modules and "triton" not in sys.modules:  # seen with tensorflow 2.21 and triton 3.9
        why, fix = "tensorflow was imported before triton, which would end the process", "import triton first"
    else:
        return True
    warnings.warn(
        f"rmsnorm: {why}; on the GPU slower code computes the same results; "
        f"{fix}, or set RMSNORM_GPU_KERNELS=0 to hide this warning",
        stacklevel=2,
    )
    return False


def supports(call: Call, *formats: str | None) -> bool:
    """Whether the kernels can compute a call, once its axes are last, with more arrays of these dtypes.

    They have no float64 but for their sums, no mask and no variance; plain operations have all of these.
    """
    formats = (call.x, call.result, call.product, *formats)
    return (
        call.axes == call.feature_axes
        and all(name in (None, "float16", "bfloat16", "float32") for name in formats)
        and call.variant.statistic != "variance"
    )
