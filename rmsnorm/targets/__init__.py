"""Somebody's normalisation, opened: whatever it is made of, it is called with NumPy arrays. Loads no framework."""

from rmsnorm.targets.open import open_target
from rmsnorm.targets.target import NoTarget, Target, TargetError

__all__ = ["NoTarget", "Target", "TargetError", "open_target"]
