"""RMSNorm for TensorFlow, functions on tensors, and for Keras, a layer that runs on every backend of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmsnorm.specification.frameworks import lazy

if TYPE_CHECKING:
    from rmsnorm.tf_impl.functional import rms_norm, rms_norm_vjp
    from rmsnorm.tf_impl.layers import RMSNormalization

__all__ = ["RMSNormalization", "rms_norm", "rms_norm_vjp"]
# The functions need no Keras, and the layer no TensorFlow on another backend.
__getattr__, __dir__ = lazy(
    __name__,
    {"RMSNormalization": "layers", **dict.fromkeys(("rms_norm", "rms_norm_vjp"), "functional")},
    "tf",
)
