"""LayerNorm and RMSNorm as an experiment computes them: ``--operations``. Like is compared with like.

separate: both norms as separate operations of the framework, as in the paper's programs.
framework: both norms as the framework ships them. It has no pRMSNorm.
ours: RMSNorm and pRMSNorm by this package, LayerNorm as the framework ships it.

A function takes (x, gain, offset, eps), rms_norm also the fraction of the elements in its statistic, or None. The last
axis is normalised. The offset may be None.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from rmsnorm.specification import errors

KINDS: Final = ("ours", "framework", "separate")


class Norms(NamedTuple):
    """The two functions."""

    layer_norm: Callable[..., Any]
    rms_norm: Callable[..., Any]


def has(kind: str, norm: str) -> bool:
    """Whether there is such a norm."""
    return not (kind == "framework" and norm.startswith("prms"))


def norms(framework: str, kind: str) -> Norms:
    """The functions of ``torch`` or ``flax``.

    Raises:
        ModuleNotFoundError: the framework is not installed.
    """
    shipped = {"torch": _torch, "flax": _flax}[framework]
    if kind == "ours":
        operations = import_module(f"rmsnorm.nematus.{framework}_operations")
        return Norms(shipped().layer_norm, operations.rms_norm)
    return shipped() if kind == "framework" else _separate(framework)


def used(framework: str, kind: str) -> AbstractContextManager[Any]:
    """Within it, the models of rmsnorm.nematus compute their norms so. A model without a norm needs none."""
    if kind == "ours" and framework == "torch":  # they do so anyway
        return nullcontext()
    operations = import_module(f"rmsnorm.nematus.{framework}_operations")
    return patch.multiple(operations, **norms(framework, kind)._asdict())


def _separate(framework: str) -> Norms:
    if framework == "torch":
        import torch

        rsqrt: Any = torch.rsqrt

        def mean(x: Any) -> Any:
            return x.mean(-1, keepdim=True)

    else:
        from jax import lax

        rsqrt = lax.rsqrt

        def mean(x: Any) -> Any:
            return x.mean(-1, keepdims=True)

    def scaled(x: Any, squares: Any, gain: Any, offset: Any, eps: float) -> Any:
        y = x * rsqrt(squares + eps) * gain
        return y if offset is None else y + offset

    def layer_norm(x: Any, gain: Any, offset: Any, eps: float) -> Any:
        centred = x - mean(x)
        return scaled(centred, mean(centred * centred), gain, offset, eps)

    def rms_norm(x: Any, gain: Any, offset: Any, eps: float, partial: float | None) -> Any:
        counted = x if partial is None else x[..., : math.ceil(x.shape[-1] * partial)]
        return scaled(x, mean(counted * counted), gain, offset, eps)

    return Norms(layer_norm, rms_norm)


def _whole(partial: float | None) -> None:
    if partial is not None:
        raise errors.not_a_choice("experiments", "norm", "prms", ("layer", "rms"))


def _torch() -> Norms:
    from torch.nn import functional

    def layer_norm(x: Any, gain: Any, offset: Any, eps: float) -> Any:
        return functional.layer_norm(x, x.shape[-1:], gain, offset, eps)

    def rms_norm(x: Any, gain: Any, offset: Any, eps: float, partial: float | None) -> Any:
        _whole(partial)
        y = functional.rms_norm(x, x.shape[-1:], gain, eps)
        return y if offset is None else y + offset

    return Norms(layer_norm, rms_norm)


def _flax() -> Norms:
    from flax import linen

    def layer_norm(x: Any, gain: Any, offset: Any, eps: float) -> Any:
        parameters = {"scale": gain} if offset is None else {"scale": gain, "bias": offset}
        layer = linen.LayerNorm(epsilon=eps, use_bias=offset is not None)
        return layer.apply({"params": parameters}, x)

    def rms_norm(x: Any, gain: Any, offset: Any, eps: float, partial: float | None) -> Any:
        _whole(partial)
        y: Any = linen.RMSNorm(epsilon=eps).apply({"params": {"scale": gain}}, x)
        return y if offset is None else y + offset

    return Norms(layer_norm, rms_norm)
