"""Replaces RMSNorm in PyTorch. A copy of each module shows what it computes, and that the replacement does the same."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from rmsnorm.conversion.replacement.backend import Backend
from rmsnorm.conversion.replacement.change import Replaced, axes_of, called_with, in_groups, subclass
from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.conversion.replacement.proof import Proof, changed, decide, require_no_arrays
from rmsnorm.conversion.replacement.report import NoNorm, Unproven
from rmsnorm.identify import Target, open_target
from rmsnorm.specification.variants import PRESETS, Variant
from rmsnorm.torch_impl.autograd import repeat
from rmsnorm.torch_impl.calls import compute
from rmsnorm.torch_impl.functional import rms_norm
from rmsnorm.torch_impl.layers import RMSNorm
from rmsnorm.torch_impl.private import has_tangents, is_watched

_COMPARABLE: Final = (bool, int, float, str, tuple, type(None), torch.dtype)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """On a few rows several threads gain little; where other programs use the cores, they wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def probe_of(module: nn.Module) -> nn.Module:
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


def _everything(module: nn.Module) -> dict[str, Any]:
    """The parameters, buffers and own attributes of a module."""
    return _own(module) | dict(module.named_parameters()) | dict(module.named_buffers())


def _own(module: nn.Module) -> dict[str, Any]:
    common = vars(nn.Module())
    return {name: value for name, value in vars(module).items() if name not in common}


def _contents(buffer: Tensor) -> Any:
    """Equal for buffers of equal numbers, such as a gain of 1 in every layer of a model."""
    if type(buffer) is not Tensor or buffer.is_meta or buffer.is_quantized or buffer.layout is not torch.strided:
        return id(buffer)
    return buffer.dtype, buffer.shape, buffer.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def _attributes(module: nn.Module) -> dict[str, str]:
    return {name: repr(value) for name, value in _own(module).items() if isinstance(value, _COMPARABLE)}


def become_layer(module: Any, variant: Variant, eps: float | None) -> None:
    """Turns a module with a normalized_shape into rmsnorm.torch_impl.RMSNorm."""
    module.__class__ = RMSNorm
    module.variant, module.eps, module._is_replaced = variant, eps, True
    for name in ("weight", "bias"):
        if name not in module._parameters:
            module.register_parameter(name, None)


@functools.cache
def class_of(kind: Any, norm: Norm) -> Any:
    """A class whose call with x alone, or with x and a gate, is that of rms_norm; all else is inherited."""
    settings, names, axes = (norm.known.eps, norm.known), (norm.scale, norm.bias), axes_of(norm)

    def forward(self: Any, *inputs: Any, **named: Any) -> Any:
        x, gate = called_with(norm, is_float, inputs, named)
        if not isinstance(x, Tensor):
            return kind.forward(self, *inputs, **named)
        shape, parameters = x.shape, [None if name is None else getattr(self, name) for name in names]
        if any(p is None and name is not None for p, name in zip(parameters, names, strict=True)):
            return kind.forward(self, *inputs, **named)
        if norm.group is not None and not norm.takes(shape):
            return kind.forward(self, *inputs, **named)
        rows, scale, bias, z = in_groups(torch, norm, shape, x, *parameters, gate)
        alone = type(x) is Tensor and not is_watched() and not has_tangents()
        # as in rmsnorm.torch_impl.RMSNorm
        is_kept = alone and z is None
        y = repeat(self.__dict__.get("_kept", ()), settings, rows, None, scale, bias) if is_kept else None
        if y is None:
            if not norm.takes(shape):
                return kind.forward(self, *inputs, **named)
            if alone:
                options = norm.known, None, None, *axes, None
                y = compute(options, False, rows, scale, bias, None, None, z, layer=self, attributes=settings)
            else:
                y = rms_norm(rows, scale, bias, variant=norm.known, axis=axes[0], feature_axis=axes[1], gate=z)
        return y if norm.group is None else y.reshape(shape)

    def extra_repr(self: Any) -> str:
        return ", ".join(filter(None, [kind.extra_repr(self), "computed by rmsnorm"]))

    return subclass(class_of, kind, norm, forward=forward, extra_repr=extra_repr)


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class Torch(Backend):
    package, call = "torch.", "forward"

    def modules(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        return model.named_modules()

    def is_replaced(self, module: nn.Module) -> bool:
        return isinstance(module, (RMSNorm, Replaced))

    def tensors(self, module: nn.Module) -> list[str]:
        return [name for name, _ in (*module.named_parameters(), *module.named_buffers())]

    def has_inner(self, module: nn.Module) -> bool:
        return bool(list(module.children()))

    @_one_thread()
    def prove(self, module: nn.Module) -> Proof:
        if self.has_inner(module):
            raise Unproven("it has modules of its own")
        if "forward" in vars(module):
            raise Unproven("its forward is not that of its class")
        if module._compiled_call_impl is not None:
            raise Unproven("it is compiled; call replace before that")
        if any(not parameter.numel() for parameter in module.parameters()):
            raise NoNorm("its parameters have no elements, as those of ZeRO-3 between calls; gather them first")
        if any(type(parameter) is not nn.Parameter for parameter in module.parameters()):
            raise Unproven("its parameters are sharded or quantised; call replace before that")
        require_no_arrays(_own(module))  # which may be none that can be copied
        probe = probe_of(module)
        before = copy.deepcopy(probe)
        target = open_target(probe)

        def replacement(norm: Norm) -> Target:
            ours = copy.deepcopy(before)
            self.become(ours, norm)
            return open_target(ours)

        proof = decide(target, module.forward, self.tensors(module), _own(module), replacement)
        touched = changed(_everything(before), _everything(target.probe))
        if touched:
            raise Unproven(f"a call changes its {', '.join(touched)}")
        return proof

    def key_of(self, module: nn.Module) -> Any:
        others = [(name, id(value)) for name, value in _own(module).items() if not isinstance(value, _COMPARABLE)]
        parameters = [(name, parameter.shape, parameter.dtype) for name, parameter in module.named_parameters()]
        buffers = [_contents(buffer) for buffer in module.buffers()]
        compiled = module._compiled_call_impl is not None
        return type(module), *map(tuple, (_attributes(module).items(), others, parameters, buffers)), compiled

    def become(self, module: Any, norm: Norm) -> None:
        if type(module) is not nn.RMSNorm:
            kind: Any = type(module)
            module.__class__ = class_of(kind, norm)
            return
        preset = PRESETS.get(norm.known.name, norm.known)
        variant = preset if preset.replace(eps=norm.known.eps) == norm.known else norm.known
        become_layer(module, variant, norm.known.eps)

    def finish(self, model: nn.Module) -> None:
        """A norm that changed its class in place becomes an attribute anew, as the layer looks at where it is then."""
        for parent in model.modules():
            for name, child in list(parent.named_children()):
                if isinstance(child, RMSNorm):
                    setattr(parent, name, child)


BACKEND: Final = Torch()
