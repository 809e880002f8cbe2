"""Replaces LayerNorm by RMSNorm in PyTorch."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from rmsnorm.conversion.layer_norm.convert import Model, Study, rounded
from rmsnorm.conversion.layer_norm.result import first_names
from rmsnorm.conversion.layer_norm.streams import Array, Axes, centred
from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.conversion.replacement.torch import BACKEND, become_layer, is_float, probe_of
from rmsnorm.identify import Target, open_target
from rmsnorm.specification.variants import get_variant
from rmsnorm.targets.bridges import bridge

_FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
_CASTS: Final = (Tensor.float, Tensor.half, Tensor.bfloat16)


class SampledModel(Model):
    """A module of PyTorch, which is copied.

    Example:
        >>> from rmsnorm.conversion import to_rms_norm
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.LayerNorm(4))
        >>> for layer in to_rms_norm(model, torch.ones(2, 3)).layers:
        ...     print(layer.name, layer.converted)
        1 True
        3 False
    """

    backend = BACKEND

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        return self.model.named_modules()

    def own(self, layer: Any) -> Norm | str | None:
        if type(layer).forward is not getattr(nn.LayerNorm, "forward") or "forward" in vars(layer):  # noqa: B009
            return None
        axes, names = tuple(range(-len(layer.normalized_shape), 0)), ("weight", "bias")
        scale, bias = (name if getattr(layer, name) is not None else None for name in names)
        variant = get_variant("to_rms_norm", "torch").replace(eps=layer.eps)
        return Norm(axes, axes, scale, bias, "input", variant=variant)

    def opened(self, layer: nn.Module) -> Target:
        return open_target(probe_of(layer).double())

    def elements(self) -> int:
        return sum(tensor.numel() for tensor in self.model.parameters())

    def study(self, norms: Mapping[str, Norm]) -> Study:
        return _Study(self._wide(), self.inputs, self.options, norms)

    def changed(
        self, centre: Mapping[str, Sequence[Axes]], norms: Mapping[str, Norm], *, wide: bool
    ) -> tuple[nn.Module, list[str]]:
        result = self._wide() if wide else copy.deepcopy(self.model)
        return result, _apply(result, centre, norms)

    def outputs(self, model: nn.Module, *, wide: bool) -> list[np.ndarray]:
        training = {module: module.training for module in model.modules()}
        dtype = getattr(torch, self.dtype) if wide else None
        try:
            with torch.no_grad():
                return [bridge("torch").fetch(y) for y in _run(model.eval(), self.inputs, self.options, dtype)]
        finally:
            for module, mode in training.items():
                module.training = mode

    def _wide(self) -> nn.Module:
        copied = copy.deepcopy(self.model)
        return copied.double() if self.dtype == "float64" else copied.float()


class _Study(Study):
    operations, separator = torch, "."

    def __init__(self, model: nn.Module, inputs: Any, options: Any, norms: Mapping[str, Norm]) -> None:
        super().__init__()
        self.bridge, self.model, self.sample = bridge("torch"), model.eval(), (inputs, options)
        modules = dict(model.named_modules())
        self.places = {slot: modules[slot.rpartition(".")[0]] for slots in _slots(model).values() for slot in slots}
        tensors = {slot: _get(modules, slot).detach() for slot in self.places}
        self.values = {slot: tensor.cpu().numpy() for slot, tensor in tensors.items()}
        self.devices = {slot: tensor.device for slot, tensor in tensors.items()}
        self.dtype = next(iter(tensors.values())).dtype if tensors else torch.float64
        for name, module in modules.items():
            if name in norms:
                module.forward = partial(self._norm, name, module, norms[name], module.forward)
            elif isinstance(module, _DropoutNd) and module.p > 0:
                module.register_forward_pre_hook(partial(self._dropout, name))
        self.sample = tree_map(self._drawn, self.sample)

    def _drawn(self, value: Any) -> Any:
        """An input with random numbers, as the sample may have a mean of 0."""
        if not is_float(value):
            return value
        factor = torch.rand(value.shape, generator=torch.Generator().manual_seed(0)).to(value.device) / 2 + 0.5
        return (value * factor if value.any() else factor).to(value.dtype)

    def sent(self, name: str, value: Array) -> Tensor:
        return torch.from_numpy(np.array(value)).to(self.devices.get(name, "cpu"))

    def run(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        for slot, tensor in tensors.items():
            module, name = self.places[slot], slot.rpartition(".")[2]
            places: Any = module._parameters if name in module._parameters else module._buffers
            places[name] = tensor
        return _run(self.model, *self.sample, self.dtype)

    def gradients(self, *args: Any, **kwargs: Any) -> dict[str, Array | None]:
        with torch.autograd.graph.allow_mutation_on_saved_tensors():  # by operations in place
            return super().gradients(*args, **kwargs)

    def total(self, outputs: Sequence[Tensor], weights: Sequence[Array | None]) -> Tensor:
        pairs = [(y, w) for y, w in zip(outputs, weights, strict=True) if w is not None]
        sums = [(y.nan_to_num(0, 0, 0) * self.sent("", w).to(y)).sum().cpu() for y, w in pairs]
        return torch.stack([each.real for each in sums]).sum() if sums else torch.zeros(())

    def _norm(self, name: str, module: Any, norm: Norm, own: Any, *inputs: Any, **named: Any) -> Any:
        x: Any = inputs[0] if inputs else named.get(norm.x)
        if len(inputs) + len(named) != 1 or not is_float(x):
            self.seen.more.add(name)
            return own(*inputs, **named)
        mean, square = self.moments(x, norm.axes)
        self.seen.note(name, x.numel() // max(mean.numel(), 1), *(_numpy(each) for each in (mean, square)))
        scale, bias = (None if n is None else getattr(module, n) for n in (norm.scale, norm.bias))
        return self.normed(norm, x, 0 if name in self.rms else mean, scale, bias)

    def _dropout(self, name: str, module: Any, inputs: Any) -> None:
        if inputs and is_float(inputs[0]) and inputs[0].ndim:
            axis = 1 if type(module) is not nn.Dropout and inputs[0].ndim > 2 else -1
            x = inputs[0].detach()
            self.seen.note(name, 0, *(_numpy(each.mean(axis)) for each in (x, x.square())))


class _Wide(TorchFunctionMode):
    """Within it, what a model casts to a dtype of fewer bits gets the wide one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return args[0].to(self.dtype)
        args = [self._widened(value) for value in args]
        return func(*args, **{name: self._widened(value) for name, value in (kwargs or {}).items()})

    def _widened(self, value: Any) -> Any:
        return self.dtype if isinstance(value, torch.dtype) and value in _FLOATS else value


def _apply(model: nn.Module, centre: Mapping[str, Sequence[Axes]], norms: Mapping[str, Norm]) -> list[str]:
    """Centres parameters and turns norms into RMSNorm, in place. Returns notes."""
    modules, slots, notes = dict(model.named_modules()), _slots(model), []
    coarse: dict[Any, list[str]] = defaultdict(list)
    edits: dict[tuple[int, tuple[Axes, ...]], list[str]] = defaultdict(list)
    for slot, axes in centre.items():
        edits[id(_get(modules, slot)), tuple(axes)].append(slot)
    for (key, each), names in edits.items():
        tensor = _get(modules, names[0])
        value = centred(tensor.detach().double().cpu().numpy(), each)
        value = torch.from_numpy(value).to(tensor.device, tensor.dtype)
        tied = [slot for slot in slots[key] if slot not in names]
        if tensor.dtype.itemsize < 4:
            coarse[str(tensor.dtype).removeprefix("torch.")] += names
        if not tied:
            with torch.no_grad():
                tensor.copy_(value)
            continue
        untied = nn.Parameter(value, tensor.requires_grad)
        for name in names:
            module, _, last = name.rpartition(".")
            setattr(modules[module], last, untied)
        notes.append(f"{first_names(names)}: no longer tied to {first_names(tied)}, which does not change")
        for module in modules.values():  # otherwise transformers would tie them again when it saves or loads the model
            config: Any = getattr(module, "config", None)
            if getattr(config, "tie_word_embeddings", False):
                config.tie_word_embeddings = False
    notes += rounded(coarse)
    for name, norm in norms.items():
        layer: Any = modules[name]
        if isinstance(layer, nn.LayerNorm) and not norm.known.scale_offset:
            become_layer(layer, get_variant("to_rms_norm", "torch"), norm.known.eps)
        else:
            BACKEND.become(layer, norm)
    BACKEND.finish(model)
    return notes


@contextlib.contextmanager
def _wide_casts(dtype: torch.dtype | None) -> Iterator[None]:
    if dtype is None:
        yield
        return
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _Wide(dtype):
            yield
    finally:
        torch.set_default_dtype(default)


def _run(model: nn.Module, inputs: Any, options: Any, dtype: torch.dtype | None) -> list[Tensor]:
    """All tensors of a model's result. Fused attention is off, as it supports LayerNorm only."""
    inputs, options = tree_map(lambda v: v.to(dtype or v.dtype, copy=True) if is_float(v) else v, (inputs, options))
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.random.fork_rng(), _wide_casts(dtype):
            torch.manual_seed(0)
            return list(_tensors(model(*inputs, **options)))
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def _slots(model: nn.Module) -> dict[int, list[str]]:
    """The places of each parameter, and of each buffer that is saved and no statistic of PyTorch's, by its id."""
    slots: dict[int, list[str]] = defaultdict(list)
    for path, module in model.named_modules():
        names = module._buffers.keys() - module._non_persistent_buffers_set
        own = not type(module).__module__.startswith("torch.")
        buffers = {name: module._buffers[name] for name in names} if own else {}
        for name, tensor in (module._parameters | buffers).items():
            if is_float(tensor) and type(tensor) in (Tensor, nn.Parameter, nn.Buffer):
                slots[id(tensor)].append(f"{path}.{name}" if path else name)
    return slots


def _get(modules: Mapping[str, nn.Module], slot: str) -> Tensor:
    module, _, name = slot.rpartition(".")
    return getattr(modules[module], name)


def _numpy(tensor: Tensor) -> Array:
    return tensor.detach().double().cpu().numpy()


def _tensors(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """The tensors in a value: in containers, and in the attributes of objects such as caches."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, (str, bytes, int, float, type, nn.Module)):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for element in value.values():
            yield from _tensors(element, seen)
    elif isinstance(value, (list, tuple, set)):
        for element in value:
            yield from _tensors(element, seen)
    else:
        for attribute in vars(value).values() if hasattr(value, "__dict__") else ():
            yield from _tensors(attribute, seen)
