"""The golden, in NumPy; the same functions at the speed of memory are in ``rmsnorm.numpy_impl.fast``."""

from rmsnorm.numpy_impl.functional import rms_norm, rms_norm_jvp, rms_norm_vjp

__all__ = ["rms_norm", "rms_norm_jvp", "rms_norm_vjp"]
