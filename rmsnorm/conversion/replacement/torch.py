"""Replaces RMSNorm in PyTorch. A copy of each module shows what it computes, and that the replacement does the same."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.conversion.replacement.proof import decide
from rmsnorm.conversion.replacement.report import NoNorm, Replacement, Unproven, nothing
from rmsnorm.identify import Identity, Target, open_target
from rmsnorm.torch_impl.functional import rms_norm
from rmsnorm.torch_impl.layers import RMSNorm
from rmsnorm.variants import PRESETS, Variant

_COMPARABLE: Final = (bool, int, float, str, tuple, type(None), torch.dtype)


class Replaced:
    """The first base of a replaced module's class; the second one is the class that it had."""

    norm: Norm


def replace(model: nn.Module, chosen: Variant | None, *, dry_run: bool) -> tuple[Replacement, ...]:
    """Replaces the modules of a model in place; ``rmsnorm.conversion.replace`` says how."""
    known: dict[Any, tuple[Norm, Identity] | Unproven] = {}
    report: list[Replacement] = []
    changes: list[tuple[nn.Module, Norm]] = []
    replaced = 0
    for name, module in list(model.named_modules()):
        if isinstance(module, (RMSNorm, Replaced)):
            replaced += 1
            continue
        if not _is_candidate(module):
            continue
        kind, key = type(module).__name__, _key(module)
        if key not in known:
            try:
                known[key] = _decide(module)
            except Unproven as error:
                known[key] = error
        decision = known[key]
        if isinstance(decision, Unproven):
            if "norm" in kind.lower() or not isinstance(decision, NoNorm):
                report.append(Replacement(name, kind, None, str(decision)))
            continue
        norm, identity = decision
        differences = () if chosen is None else identity.differences(chosen)
        norm = norm if chosen is None else norm.with_variant(chosen)
        report.append(Replacement(name, kind, norm.variant, "; ".join(differences) or _remark(module)))
        changes.append((module, norm))
    if not dry_run:
        _change(changes)
    return tuple(report) or (nothing(type(model).__name__, replaced),)


def _is_candidate(module: nn.Module) -> bool:
    """Whether a module may be a norm: by its name, or as it has a gain at most and is not one of PyTorch's own."""
    if "norm" in type(module).__name__.lower():
        return True
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    own = type(module).__module__.startswith("torch.")
    return not own and 1 <= len(tensors) <= 2 and not list(module.children())


def _decide(module: nn.Module) -> tuple[Norm, Identity]:
    own = dict(module.named_parameters(recurse=False))
    if list(module.children()):
        raise Unproven("it has modules of its own")
    if "forward" in vars(module):
        raise Unproven("its forward is not that of its class")
    if module._compiled_call_impl is not None:
        raise Unproven("it is compiled; call replace before that")
    if any(type(parameter) is not nn.Parameter for parameter in own.values()):
        raise Unproven("its parameters are sharded or quantised; call replace before that")
    probe = _probe(module)
    before = copy.deepcopy(probe)
    target = open_target(probe)
    tensors = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    others = [name for name in tensors if name not in target.names.values()]
    if others:
        raise NoNorm(f"it holds {', '.join(tensors)}, expected a gain and perhaps a bias")

    def replacement(norm: Norm) -> Target:
        ours = copy.deepcopy(before)
        _become(ours, norm)
        return open_target(ours)

    with torch.random.fork_rng(devices=[]):
        decision = decide(target, _first_parameter(module), replacement)
    changed = _changed(before, probe)
    if changed:
        raise Unproven(f"a call changes its {', '.join(changed)}")
    return decision


def _probe(module: nn.Module) -> nn.Module:
    """A copy on the CPU without hooks; on the meta device, where nothing can be copied, with parameters of 1."""
    probe = copy.deepcopy(module)
    for name, hooks in vars(probe).items():
        if name.endswith("_hooks") and "state_dict" not in name:
            hooks.clear()
    if not any(tensor.is_meta for tensor in (*probe.parameters(), *probe.buffers())):
        return probe.cpu()
    if list(probe.buffers()):
        raise Unproven("it has buffers on the meta device, whose values are unknown")
    probe = probe.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.fill_(1)
    return probe


def _changed(before: nn.Module, after: nn.Module) -> list[str]:
    """The names of the tensors and attributes that the calls of a copy have changed."""
    tensors = dict(after.named_parameters()) | dict(after.named_buffers())
    names = [
        name
        for name, old in (*before.named_parameters(), *before.named_buffers())
        if not torch.equal(old, tensors[name])
    ]
    return names + sorted({name for name, _ in _attributes(before).items() ^ _attributes(after).items()})


def _attributes(module: nn.Module) -> dict[str, str]:
    common = vars(nn.Module())
    return {name: repr(value) for name, value in vars(module).items()
            if name not in common and isinstance(value, _COMPARABLE)}  # fmt: skip


def _key(module: nn.Module) -> Any:
    """A key that is equal for modules that differ only in the values of their parameters."""
    common = vars(nn.Module())
    others = [(name, id(value)) for name, value in vars(module).items()
              if name not in common and not isinstance(value, _COMPARABLE)]  # fmt: skip
    parameters = [(name, parameter.shape, parameter.dtype) for name, parameter in module.named_parameters()]
    buffers = [id(buffer) for buffer in module.buffers()]
    compiled = module._compiled_call_impl is not None
    return type(module), tuple(_attributes(module).items()), tuple(others), tuple(parameters), tuple(buffers), compiled


def _first_parameter(module: nn.Module) -> str:
    return next(iter(inspect.signature(module.forward).parameters), "")


def _remark(module: nn.Module) -> str:
    others = list(inspect.signature(module.forward).parameters)[1:]
    return f"recognised; with {', '.join(others)} it runs its own code" if others else "recognised"


def _change(changes: Sequence[tuple[nn.Module, Norm]]) -> None:
    """Replaces all modules, or none if one fails."""
    before = [(module, type(module), dict(vars(module))) for module, _ in changes]
    try:
        for module, norm in changes:
            _become(module, norm)
    except BaseException:
        for module, kind, attributes in before:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
        raise


def _become(module: Any, norm: Norm) -> None:
    """Turns a module into one of rmsnorm. It stays the same object, with the same parameters, hooks and attributes."""
    if type(module) is not nn.RMSNorm:
        kind: Any = type(module)
        module.__class__ = _class_of(kind, norm)
        return
    preset = PRESETS.get(norm.known.name, norm.known)
    become(module, preset if preset.replace(eps=norm.known.eps) == norm.known else norm.known, norm.known.eps)


def become(module: Any, variant: Variant, eps: float | None) -> None:
    """Turns a module with a normalized_shape into rmsnorm.torch_impl.RMSNorm."""
    module.__class__ = RMSNorm
    module.variant, module.eps = variant, eps
    module._axes = tuple(range(-len(module.normalized_shape), 0))
    for name in ("weight", "bias"):
        if name not in module._parameters:
            module.register_parameter(name, None)


@functools.cache
def _class_of(kind: Any, norm: Norm) -> Any:
    """A class whose call with x alone is that of rms_norm; all else is inherited."""

    @functools.wraps(kind.forward)
    def forward(self: Any, *inputs: Any, **named: Any) -> Any:
        x: Any = inputs[0] if inputs else named.get(norm.x)
        alone = len(inputs) + len(named) == 1 and isinstance(x, Tensor) and x.ndim in norm.ranks
        if not alone or norm.width not in (None, math.prod(x.shape[axis] for axis in norm.axes)):
            return kind.forward(self, *inputs, **named)
        scale, bias = (_vector(self, name, x, norm) for name in (norm.scale, norm.bias))
        return rms_norm(x, scale, bias, variant=norm.known, axis=norm.axes, feature_axis=norm.gain_axes)

    def __reduce_ex__(self: Any, protocol: int) -> Any:
        state = self.__getstate__() if hasattr(self, "__getstate__") else vars(self)
        return _made_again, (kind, norm), state

    names = {"forward": forward, "__reduce_ex__": __reduce_ex__, "__module__": kind.__module__,
             "__qualname__": kind.__qualname__, "__doc__": kind.__doc__, "norm": norm}  # fmt: skip
    return type(kind.__name__, (Replaced, kind), names)


def _made_again(kind: type, norm: Norm) -> Any:
    made = _class_of(kind, norm)
    return made.__new__(made)


def _vector(module: Any, name: str | None, x: Tensor, norm: Norm) -> Tensor | None:
    """A parameter without its axes of size 1; one number at every element."""
    parameter = None if name is None else getattr(module, name)
    if parameter is None:
        return None
    if parameter.numel() == 1:
        return parameter.reshape([1] * len(norm.gain_axes)).expand([x.shape[axis] for axis in norm.gain_axes])
    return (
        parameter if parameter.ndim == len(norm.gain_axes) else parameter.reshape([s for s in parameter.shape if s > 1])
    )
