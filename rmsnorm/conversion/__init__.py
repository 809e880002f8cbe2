"""Models of any framework, made into models with RMSNorm. Loads no framework before it is used.

from rmsnorm.conversion import replace, to_rms_norm

replace(model)      # a model of PyTorch whose RMSNorm modules are somebody's: ours in their place, same weights
to_rms_norm(model)  # a model with LayerNorm: RMSNorm in its place, with the same outputs
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
