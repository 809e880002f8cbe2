"""RMSNorm for TensorFlow, functions on tensors, and for Keras, a layer that runs on every backend of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rmsnorm.frameworks import imported

if TYPE_CHECKING:
    from rmsnorm.tf_impl.functional import rms_norm, rms_norm_jvp, rms_norm_vjp
    from rmsnorm.tf_impl.layers import RMSNormalization

__all__ = ["RMSNormalization", "rms_norm", "rms_norm_jvp", "rms_norm_vjp"]


def __getattr__(name: str) -> Any:
    """Import on use: the functions need no Keras, and the layer no TensorFlow on another backend."""
    if name == "RMSNormalization":
        with imported("tf"):
            from rmsnorm.tf_impl import layers

        return layers.RMSNormalization
    if name in __all__:
        with imported("tf"):
            from rmsnorm.tf_impl import functional

        return getattr(functional, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
