"""Replaces a model's own RMSNorm modules by rmsnorm.torch_impl.RMSNorm. It recognises them by what they compute."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from rmsnorm.identify import identify
from rmsnorm.torch_impl.functional import rms_norm
from rmsnorm.torch_impl.layers import RMSNorm
from rmsnorm.variants import PRESETS, Variant, get_variant

_REASONS: Final = {
    "none": "it computes something else",
    "layernorm": "it computes LayerNorm",
    "rms_scaling": "it divides by the variance",
    "rmsnorm": "it has a gate or groups, which RMSNorm does not support",
}


@dataclass(frozen=True)
class Replacement:
    """What happened to one module.

    Attributes:
        name: the module's name in ``named_modules``; the first one if it has several.
        kind: the name of its class before.
        variant: the variant of the new layer, or None if the module was not replaced.
        why: "recognised", or what differs now; or the reason why the module was not replaced.
    """

    name: str
    kind: str
    variant: Variant | None
    why: str

    def __str__(self) -> str:
        result = "left" if self.variant is None else f"now RMSNorm, variant {self.variant.name}, eps {self.variant.eps}"
        return f"{self.name or 'the model'} ({self.kind}): {result}; {self.why}"


def replace(model: nn.Module, variant: str | Variant | None = None) -> tuple[Replacement, ...]:
    """Turn every module of a model that computes RMSNorm into the layer RMSNorm, in place.

        y = h / rho * (o + weight) + bias,    rho = sqrt(mean(h_i^2) + eps)

    Each module stays the same object: its parameters, their names, devices and dtypes, its hooks, its mode and all
    references to it stay valid. Only its class changes, so call this before the model is compiled or sharded.

    Args:
        model: the model. Candidates are torch.nn.RMSNorm, and modules that contain no other module and that have a
            weight and perhaps a bias. Runs on a copy show what a candidate computes, with which eps, offset and
            rounding.
        variant: name of a preset, or a Variant, which every replaced module gets, together with its eps. None keeps
            the variant that each module computes.

    Returns:
        One entry for each candidate and for every other module with "norm" in the name of its class: its variant, or
        why it was not replaced.

    Raises:
        TypeError, ValueError: the variant does not exist.

    Example:
        >>> model = nn.Sequential(nn.RMSNorm(8, eps=1e-5), nn.LayerNorm(8))
        >>> for entry in replace(model):
        ...     print(entry)
        0 (RMSNorm): now RMSNorm, variant torch, eps 1e-05; recognised
        1 (LayerNorm): left; it computes LayerNorm
    """
    chosen = None if variant is None else get_variant("replace", variant)
    recognised: dict[Any, tuple[Variant | None, str]] = {}
    report = []
    for name, module in list(model.named_modules()):
        if isinstance(module, RMSNorm) or not _is_candidate(module):
            continue
        key = _key(module)
        if key not in recognised:
            recognised[key] = _recognise(module, chosen)
        new, why = recognised[key]
        report.append(Replacement(name, type(module).__name__, new, why))
        if new is not None:
            become(module, new)
    return tuple(report)


def _is_candidate(module: nn.Module) -> bool:
    own = [name for name, parameter in module.named_parameters(recurse=False) if parameter.ndim]
    vectors = all(parameter.ndim == 1 for parameter in module.parameters(recurse=False))
    called = "norm" in type(module).__name__.lower()
    return called or (vectors and 1 <= len(own) <= 2 and not list(module.children()))


def _recognise(module: nn.Module, chosen: Variant | None) -> tuple[Variant | None, str]:
    """Returns the variant that the module gets and a remark, or None and the reason."""
    parameters = dict(module.named_parameters(recurse=False))
    if list(module.children()):
        return None, "it has modules of its own"
    if "forward" in vars(module):
        return None, "its forward is not that of its class"
    if not set(parameters) <= {"weight", "bias"} or list(module.buffers()):
        return None, f"it holds {', '.join(module.state_dict())}, expected weight and perhaps bias"
    if any(type(parameter) is not nn.Parameter for parameter in parameters.values()):
        return None, "its parameters are sharded or quantised; call replace before that"
    if not _sizes(module):
        return None, "it has neither a weight nor normalized_shape, so its sizes are unknown"
    probe = _probe(module)
    try:
        identity = identify(probe, gradients=False, time_limit=600)
    except ValueError as error:
        return None, str(error)
    if not identity.plain or identity.variant is None:
        return None, "; ".join(identity.defects) or _REASONS[identity.kind]
    if not _is_over_the_last_axes(probe, identity.variant):
        return None, "it normalises other axes than those of its weight"
    differences = () if chosen is None else identity.differences(chosen)
    return chosen or _named(identity.variant), "; ".join(differences) or "recognised"


def _sizes(module: nn.Module) -> tuple[int, ...]:
    weight = getattr(module, "weight", None)
    return tuple(getattr(module, "normalized_shape", ()) if weight is None else weight.shape)


def _probe(module: nn.Module) -> nn.Module:
    """A copy on the CPU without hooks, whose parameters are all 1."""
    probe = copy.deepcopy(module)
    for hooks in (probe._forward_hooks, probe._forward_pre_hooks):
        hooks.clear()
    probe = probe.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.fill_(1)
    return probe.eval()


def _is_over_the_last_axes(probe: nn.Module, variant: Variant) -> bool:
    """Whether the probe normalises the last axes, also if x has more. A wrong axis is off by more than rounding."""
    sizes = _sizes(probe)
    weight = next(probe.parameters(), torch.ones(()))
    x = torch.linspace(-1, 2, 6 * math.prod(sizes)).square().reshape(2, 3, *sizes).to(weight.dtype)
    with torch.no_grad():
        try:
            y = probe(x)
        except (RuntimeError, ValueError):  # it counts axes from the front
            return False
        axes = tuple(range(-len(sizes), 0))
        want = rms_norm(x, probe.weight, getattr(probe, "bias", None), variant=variant, axis=axes)
    return y.shape == x.shape and torch.allclose(y.float(), want.float(), rtol=0.05, atol=0.05)


def _named(variant: Variant) -> Variant:
    """The variant with the name of a preset that differs at most in eps; the preset "torch" comes first."""
    for preset in (PRESETS["torch"], *PRESETS.values()):
        labels = {"name": preset.name, "bias": preset.bias, "scale_name": preset.scale_name, "source": preset.source}
        if variant.replace(**labels) == preset.replace(eps=variant.eps):
            return variant.replace(**labels)
    return variant


def _key(module: nn.Module) -> Any:
    """A key that is equal for modules that differ only in the values of their parameters."""
    common = vars(nn.Module())
    comparable = (bool, int, float, str, tuple, type(None), torch.dtype)
    attributes = {
        name: repr(value) if isinstance(value, comparable) else id(value)
        for name, value in vars(module).items()
        if name not in common
    }
    parameters = [(name, parameter.shape, parameter.dtype) for name, parameter in module.named_parameters()]
    return type(module), tuple(attributes.items()), tuple(parameters)


def become(module: Any, variant: Variant) -> None:
    """Turns a module with the right parameters into rmsnorm.torch_impl.RMSNorm. Its hooks and other attributes stay."""
    sizes = _sizes(module)
    module.__class__ = RMSNorm
    module.normalized_shape, module.variant, module.eps = sizes, variant, variant.eps
    module._axes = tuple(range(-len(sizes), 0))
    for name in ("weight", "bias"):
        if name not in module._parameters:
            module.register_parameter(name, None)
    module.elementwise_affine = module.weight is not None
