"""Converts models of any framework into models with RMSNorm. A framework is imported only when it is used.

from rmsnorm.conversion import replace, to_rms_norm

replace(model)      # the model's own RMSNorm modules compute by rmsnorm, with the same weights
to_rms_norm(model)  # replaces LayerNorm by RMSNorm, with the same outputs

Both take models of PyTorch, Keras and Flax NNX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmsnorm.specification.frameworks import lazy

if TYPE_CHECKING:
    from rmsnorm.conversion.layer_norm import to_rms_norm
    from rmsnorm.conversion.replacement import replace

__all__ = ["replace", "to_rms_norm"]
__getattr__, __dir__ = lazy(__name__, {"replace": "replacement", "to_rms_norm": "layer_norm"})
