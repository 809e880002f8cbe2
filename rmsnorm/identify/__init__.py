"""Finds out which normalisation a callable computes, as a black box. Loads no framework before a target needs it."""

from rmsnorm.identify.checkpoint import Checkpoint, identify_checkpoint
from rmsnorm.identify.findings import Finding
from rmsnorm.identify.identity import Identity
from rmsnorm.identify.search import identify
from rmsnorm.targets import NoTarget, open_target
from rmsnorm.targets.target import Target, TargetError

__all__ = [
    "Checkpoint", "Finding", "Identity", "NoTarget", "Target", "TargetError", "identify", "identify_checkpoint",
    "open_target",
]  # fmt: skip
