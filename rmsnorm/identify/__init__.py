"""Whose RMSNorm is this? Recognises what a callable computes, as a black box. Loads no framework unasked."""

from rmsnorm.identify.identity import Finding, Identity
from rmsnorm.identify.solve import identify
from rmsnorm.targets import NoTarget, open_target
from rmsnorm.targets.target import Target, TargetError

__all__ = ["Finding", "Identity", "NoTarget", "Target", "TargetError", "identify", "open_target"]
