"""Puts RMSNorm in the place of a model's own RMSNorm modules, which are recognised by what they compute."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from rmsnorm.torch_impl.functional import rms_norm
from rmsnorm.torch_impl.layers import RMSNorm
from rmsnorm.variants import PRESETS, Variant, get_variant

_OTHERS: Final = {
    "none": "it computes something else",
    "layernorm": "it computes LayerNorm",
    "rms_scaling": "it divides by the variance",
    "rmsnorm": "it has a gate or groups, which the layer has not",
}


@dataclass(frozen=True)
class Replacement:
    """What became of one module.

    Attributes:
        name: as in ``named_modules``, the first one where it has several.
        kind: its class before.
        variant: of the layer that it is now, None where it was left alone.
        why: how it was recognised or what is different now; or why it was left alone.
    """

    name: str
    kind: str
    variant: Variant | None
    why: str

    def __str__(self) -> str:
        became = "left" if self.variant is None else f"now RMSNorm, variant {self.variant.name}, eps {self.variant.eps}"
        return f"{self.name or 'the model'} ({self.kind}): {became}; {self.why}"


def replace(model: nn.Module, variant: str | Variant | None = None) -> tuple[Replacement, ...]:
    """Turn every module of a model that computes RMSNorm into the layer RMSNorm, in place.

        y = h / rho * (o + weight) + bias,    rho = sqrt(mean(h_i^2) + eps)

    A module keeps its identity: the parameters, their names, devices and dtypes, its hooks, its mode and whoever refers
    to it. Only its class is another one, so that it comes before a model is compiled or sharded.

    Args:
        model: candidates in it are modules without modules of their own that have a weight and perhaps a bias, and
            torch.nn.RMSNorm. What they compute, with which eps, offset and rounding, is found out on a copy.
        variant: name of a preset or a Variant to make of all that are RMSNorm, with its eps; None for what each is.

    Returns:
        One entry for each candidate and whatever else is called a norm: its variant, or why it was left alone.

    Raises:
        TypeError, ValueError: there is no such variant.

    Example:
        >>> model = nn.Sequential(nn.RMSNorm(8, eps=1e-5), nn.LayerNorm(8))
        >>> for entry in replace(model):
        ...     print(entry)
        0 (RMSNorm): now RMSNorm, variant torch, eps 1e-05; recognised
        1 (LayerNorm): left; it computes LayerNorm
    """
    chosen = None if variant is None else get_variant("replace", variant)
    found: dict[Any, tuple[Variant | None, str]] = {}
    report = []
    for name, module in list(model.named_modules()):
        if isinstance(module, RMSNorm) or not _is_candidate(module):
            continue
        key = _key(module)
        if key not in found:
            found[key] = _recognised(module, chosen)
        new, why = found[key]
        report.append(Replacement(name, type(module).__name__, new, why))
        if new is not None:
            become(module, new)
    return tuple(report)


def _is_candidate(module: nn.Module) -> bool:
    own = [name for name, parameter in module.named_parameters(recurse=False) if parameter.ndim]
    vectors = all(parameter.ndim == 1 for parameter in module.parameters(recurse=False))
    called = "norm" in type(module).__name__.lower()
    return called or (vectors and 1 <= len(own) <= 2 and not list(module.children()))


def _recognised(module: nn.Module, chosen: Variant | None) -> tuple[Variant | None, str]:
    """The variant that a module is to have and a remark, or None and why it has none."""
    parameters = dict(module.named_parameters(recurse=False))
    if list(module.children()):
        return None, "it has modules of its own"
    if "forward" in vars(module):
        return None, "its forward is not that of its class"
    if not set(parameters) <= {"weight", "bias"} or list(module.buffers()):
        return None, f"it holds {', '.join(module.state_dict())}, expected weight and perhaps bias"
    if any(type(each) is not nn.Parameter for each in parameters.values()):
        return None, "its parameters are sharded or quantised; replace comes first"
    if not _sizes(module):
        return None, "nothing says which sizes it normalises"
    from rmsnorm.identify import identify  # which opens layers of this wing, too: the one import upwards

    probe = _probe(module)
    try:
        identity = identify(probe, gradients=False, time_limit=600)
    except ValueError as error:
        return None, str(error)
    if not identity.plain or identity.variant is None:
        return None, "; ".join(identity.defects) or _OTHERS[identity.kind]
    if not _is_over_the_last_axes(probe, identity.variant):
        return None, "it normalises other axes than those of its weight"
    differences = () if chosen is None else identity.differences(chosen)
    return chosen or _named(identity.variant), "; ".join(differences) or "recognised"


def _sizes(module: nn.Module) -> tuple[int, ...]:
    weight = getattr(module, "weight", None)
    return tuple(getattr(module, "normalized_shape", ()) if weight is None else weight.shape)


def _probe(module: nn.Module) -> nn.Module:
    """A copy in memory, without hooks, whose parameters are ordinary numbers."""
    twin = copy.deepcopy(module)
    for hooks in (twin._forward_hooks, twin._forward_pre_hooks):
        hooks.clear()
    twin = twin.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.fill_(1)
    return twin.eval()


def _is_over_the_last_axes(probe: nn.Module, variant: Variant) -> bool:
    """Whether that is so for x of more axes, too, from which a wrong axis differs by far more than any rounding."""
    sizes = _sizes(probe)
    weight = next(probe.parameters(), torch.ones(()))
    x = torch.linspace(-1, 2, 6 * math.prod(sizes)).square().reshape(2, 3, *sizes).to(weight.dtype)
    with torch.no_grad():
        try:
            y = probe(x)
        except (RuntimeError, ValueError):  # it counts axes from the first
            return False
        axes = tuple(range(-len(sizes), 0))
        want = rms_norm(x, probe.weight, getattr(probe, "bias", None), variant=variant, axis=axes)
    return y.shape == x.shape and torch.allclose(y.float(), want.float(), rtol=0.05, atol=0.05)


def _named(variant: Variant) -> Variant:
    """Under the name of a preset that differs in eps at most, of PyTorch's own if it can be."""
    for preset in (PRESETS["torch"], *PRESETS.values()):
        words = {"name": preset.name, "bias": preset.bias, "scale_name": preset.scale_name, "source": preset.source}
        if variant.replace(**words) == preset.replace(eps=variant.eps):
            return variant.replace(**words)
    return variant


def _key(module: nn.Module) -> Any:
    """Equal for modules that compute the same, but for the values of their parameters."""
    ordinary = vars(nn.Module())
    plain = (bool, int, float, str, tuple, type(None), torch.dtype)
    attributes = {
        name: repr(value) if isinstance(value, plain) else id(value)
        for name, value in vars(module).items()
        if name not in ordinary
    }
    parameters = [(name, each.shape, each.dtype) for name, each in module.named_parameters()]
    return type(module), tuple(attributes.items()), tuple(parameters)


def become(module: Any, variant: Variant) -> None:
    """Make ours of a module that has the parameters of ours; hooks and whatever else it holds stay."""
    sizes = _sizes(module)
    module.__class__ = RMSNorm
    module.normalized_shape, module.variant, module.eps = sizes, variant, variant.eps
    module._axes = tuple(range(-len(sizes), 0))
    for name in ("weight", "bias"):
        if name not in module._parameters:
            module.register_parameter(name, None)
    module.elementwise_affine = module.weight is not None
