"""RMSNorm for PyTorch: functions on tensors and a module."""

from rmsnorm.specification.frameworks import imported

with imported("torch"):
    from rmsnorm.torch_impl.functional import rms_norm, rms_norm_vjp
    from rmsnorm.torch_impl.layers import RMSNorm

__all__ = ["RMSNorm", "rms_norm", "rms_norm_vjp"]
