"""RMSNorm for JAX and Flax: functions on arrays, and the layer RMSNorm (flax.nnx; for flax.linen see linen)."""

from typing import TYPE_CHECKING

from rmsnorm.specification.frameworks import imported, lazy

with imported("flax"):
    from rmsnorm.flax_impl.functional import rms_norm, rms_norm_vjp

if TYPE_CHECKING:
    from rmsnorm.flax_impl.layers import RMSNorm

__all__ = ["RMSNorm", "rms_norm", "rms_norm_vjp"]
__getattr__, __dir__ = lazy(__name__, {"RMSNorm": "layers"}, "flax")  # the functions need JAX alone
