"""Converts models of any framework into models with RMSNorm. A framework is imported only when it is used.

from rmsnorm.conversion import replace, to_rms_norm

replace(model)      # the model's own RMSNorm modules compute by rmsnorm, with the same weights
to_rms_norm(model)  # replaces LayerNorm by RMSNorm, with the same outputs

Both take models of PyTorch, Keras and Flax NNX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rmsnorm.conversion.layer_norm import to_rms_norm
    from rmsnorm.conversion.replacement import replace

__all__ = ["replace", "to_rms_norm"]


def __getattr__(name: str) -> Any:
    if name == "replace":
        from rmsnorm.conversion.replacement import replace

        return replace
    if name == "to_rms_norm":
        from rmsnorm.conversion.layer_norm import to_rms_norm

        return to_rms_norm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
