"""RMSNorm for JAX and Flax: functions on arrays, and the layer RMSNorm (flax.nnx; for flax.linen see linen)."""

from typing import TYPE_CHECKING, Any

from rmsnorm.frameworks import imported

with imported("flax"):
    from rmsnorm.flax_impl.functional import rms_norm, rms_norm_jvp, rms_norm_vjp

if TYPE_CHECKING:
    from rmsnorm.flax_impl.layers import RMSNorm

__all__ = ["RMSNorm", "rms_norm", "rms_norm_jvp", "rms_norm_vjp"]


def __getattr__(name: str) -> Any:  # the functions need JAX alone
    if name == "RMSNorm":
        with imported("flax"):
            from rmsnorm.flax_impl.layers import RMSNorm

        return RMSNorm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
