"""The golden, in NumPy; ``rmsnorm.numpy_impl.fast`` has compiled kernels for the values and gradients."""

from rmsnorm.numpy_impl.functional import rms_norm, rms_norm_jvp, rms_norm_vjp
from rmsnorm.numpy_impl.quantised import rms_norm_quantised

__all__ = ["rms_norm", "rms_norm_jvp", "rms_norm_quantised", "rms_norm_vjp"]
