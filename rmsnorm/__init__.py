"""RMSNorm: one specification, one golden with its gradients, the same numbers in every framework."""

from rmsnorm.variants import PRESETS, Variant

__all__ = ["PRESETS", "Variant", "__version__"]
__version__ = "0.1.0"
