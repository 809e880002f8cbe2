"""RMSNorm: one specification, one golden with its gradients, the same numbers in every framework."""

from importlib.metadata import version

from rmsnorm.variants import PRESETS, Variant

__all__ = ["PRESETS", "Variant", "__version__"]
__version__ = version("rmsnorm")
