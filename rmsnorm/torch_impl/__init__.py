"""RMSNorm for PyTorch: functions on tensors."""

from rmsnorm.torch_impl.functional import rms_norm, rms_norm_jvp, rms_norm_vjp

__all__ = ["rms_norm", "rms_norm_jvp", "rms_norm_vjp"]
