"""Opens a normalisation that somebody wrote, in any framework: it is called with NumPy arrays. Loads no framework."""

from rmsnorm.targets.open import open_target
from rmsnorm.targets.target import NoTarget, Target, TargetError

__all__ = ["NoTarget", "Target", "TargetError", "open_target"]
