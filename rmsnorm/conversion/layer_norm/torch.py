"""Replaces LayerNorm by RMSNorm in PyTorch. A run of the model on sample inputs gives the graph."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from rmsnorm.conversion.layer_norm.convert import Model, Norms, Trace
from rmsnorm.conversion.layer_norm.result import first_names
from rmsnorm.conversion.layer_norm.streams import Axes, Node, Plan, Value
from rmsnorm.conversion.layer_norm.torch_rules import rule_of
from rmsnorm.conversion.replacement.torch import BACKEND, become_layer, is_float, probe_of
from rmsnorm.identify import Target, open_target
from rmsnorm.specification.variants import get_variant
from rmsnorm.targets.bridges import bridge

_SHAPES: Final = {
    "empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like",
}  # fmt: skip


class SampledModel(Model):
    """A module of PyTorch, which is copied.

    Example:
        >>> from rmsnorm.conversion import to_rms_norm
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.LayerNorm(4))
        >>> for layer in to_rms_norm(model, torch.ones(2, 3)).layers:
        ...     print(layer)
        1 (LayerNorm): now RMSNorm; eps 1e-05, centred 0.bias, 0.weight
        3 (LayerNorm): left; aten.relu in 2 is not linear
    """

    backend, eps = BACKEND, "eps"

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        return self.model.named_modules()

    def may_be_layer_norm(self, layer: nn.Module) -> bool:
        return not isinstance(layer, nn.LayerNorm) and super().may_be_layer_norm(layer)

    def opened(self, layer: nn.Module) -> Target:
        return open_target(probe_of(layer).double())

    def trace(self, recognised: Norms) -> Trace:
        return _Trace(copy.deepcopy(self.model).eval(), self.inputs, self.options, recognised)

    def changed(self, plan: Plan | None, recognised: Norms, *, wide: bool) -> tuple[nn.Module, list[str]]:
        result = copy.deepcopy(self.model)
        result = result.double() if wide else result
        return result, [] if plan is None else _apply(result, plan, recognised)

    def outputs(self, model: nn.Module, *, wide: bool) -> list[np.ndarray]:
        sample = self.inputs, self.options
        sample = tree_map(lambda value: value.double() if is_float(value) else value, sample) if wide else sample
        training = {module: module.training for module in model.modules()}
        try:
            return [bridge("torch").fetch(tensor) for tensor in _run(model.eval(), *sample)]
        finally:
            for module, mode in training.items():
                module.training = mode


class _Trace(Trace, TorchDispatchMode):
    """The graph of a run: every operation below autograd, and the module that is running."""

    fetched = staticmethod(bridge("torch").fetch)

    def __init__(self, model: nn.Module, inputs: Any, options: Any, recognised: Norms) -> None:
        super().__init__()
        self._recognised = recognised  # LayerNorms of other classes: each call is one operation
        self._xs: list[Tensor] = []  # x of the recognised one that is running
        self._with_more: set[str] = set()  # those that are called with more than x
        self._modules = dict(model.named_modules())
        self._slots = _slots(model)
        self._leaves: dict[str, Value] = {}
        self._views: dict[int, list[Tensor]] = defaultdict(list)  # by storage
        self._running: list[str] = []
        for tensor in [*model.parameters(), *model.buffers()]:
            self._views[_storage(tensor)].append(tensor)
        for tensor in filter(is_float, _tensors((inputs, options))):
            self._enter(tensor, Value(tuple(tensor.shape), "the model's input", obstacle="has a mean of its own"))
        for name, module in self._modules.items():
            module.register_forward_pre_hook(partial(self._begin, name), with_kwargs=True)
            module.register_forward_hook(self._end, always_call=True)
        for tensor in filter(is_float, _run(model, inputs, options, self)):
            self._value(tensor).is_output = True
        self._find_obstacles()

    def _find_obstacles(self) -> None:
        """Finds the layers that stay whatever they read."""
        reached = {node.norm.layer for node in self.nodes if node.norm}
        self.obstacles |= dict.fromkeys(
            reached, "it calls layer_norm, but does not compute what torch.nn.LayerNorm does"
        )
        for name, module in self._modules.items():
            if name in self._recognised or _computes_layer_norm(module):
                self.obstacles.pop(name, None)
                if name in self._with_more:
                    self.obstacles[name] = "it is called with more than x"
                elif name not in reached:
                    self.obstacles[name] = "the sample inputs do not reach it"
            elif "layernorm" in type(module).__name__.lower() and name not in reached and not list(module.children()):
                self.obstacles[name] = "it does not call layer_norm on the sample inputs"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._xs:
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        arguments = [tensor for tensor in tree_leaves((args, kwargs)) if is_float(tensor)]
        values = {id(tensor): self._value(tensor) for tensor in arguments}
        out = func(*args, **kwargs)
        written = _written(func, args, kwargs)
        results = {id(tensor): tensor for tensor in [*written, *tree_leaves(out)] if is_float(tensor)}
        if results and results.keys() <= values.keys() and not written:
            return out
        inputs = [] if name in _SHAPES else [values[id(tensor)] for tensor in arguments]
        outputs = [Value(tuple(tensor.shape), obstacle="is in no weight") for tensor in results.values()]
        where = f" in {self._running[-1]}" if self._running and self._running[-1] else ""
        if name in ("native_layer_norm", "layer_norm"):
            layer = self._running[-1] if self._running else ""
            x, sizes, weight, bias = (*args, None, None)[:4]
            norm = self._norm(layer, range(-len(sizes), 0), x.shape, weight, bias, values.get(id(bias)))
            self.nodes.append(Node(f"aten.{name}{where}", inputs, outputs[:1], norm=norm))
        else:
            rule = rule_of(func, args, kwargs, values, inputs, outputs)
            self.nodes.append(Node(f"aten.{name}{where}", inputs, outputs, rule))
        for tensor in written:
            for view in self._views[_storage(tensor)]:
                self._values[id(view)] = Value(tuple(view.shape), "an array", obstacle="is written to through a view")
        for tensor, value in zip(results.values(), outputs, strict=True):
            self._enter(tensor, value)
        return out

    def _begin(self, name: str, module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self._running.append(name)
        if isinstance(module, _DropoutNd) and module.p > 0 and args and is_float(args[0]):
            self.dropouts.append((name, self._value(args[0])))
        if name in self._recognised:
            x: Any = args[0] if args else named.get(self._recognised[name].x)
            if len(args) + len(named) == 1 and is_float(x):
                self._xs.append(x)
            else:
                self._with_more.add(name)

    def _end(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        name = self._running.pop()
        if self._xs and name in self._recognised:
            x = self._xs[-1]
            names = self._recognised[name].scale, self._recognised[name].bias
            weight, bias = (None if entry is None else getattr(module, entry) for entry in names)
            values = {id(tensor): self._value(tensor) for tensor in (x, weight, bias) if tensor is not None}
            y = Value(tuple(out.shape), obstacle="is in no weight")
            norm = self._norm(name, [-1], x.shape, weight, bias, values.get(id(bias)))
            self._xs.pop()
            self.nodes.append(Node(f"{type(module).__name__} {name}", list(values.values()), [y], norm=norm))
            self._enter(out, y)

    def _enter(self, tensor: Tensor, value: Value) -> None:
        super()._enter(tensor, value)
        self._views[_storage(tensor)].append(tensor)

    def _value(self, tensor: Tensor) -> Value:
        if id(tensor) not in self._values and id(tensor) in self._slots:
            return self._leaf(tensor)
        return super()._value(tensor)

    def _leaf(self, tensor: Tensor) -> Value:
        """The value of a parameter. A tied parameter has one value for each module that holds it."""
        slots = self._slots[id(tensor)]
        slot_of = {slot.rpartition(".")[0]: slot for slot in slots}
        owner = next((name for name in reversed(self._running) if name in slot_of), None)
        if owner is None and len(slots) > 1:
            for slot in slots:
                self._block(slot, tensor, "is tied, and used outside of the modules that hold it")
        slot = slots[0] if owner is None else slot_of[owner]
        if slot not in self._leaves:
            self._leaves[slot] = Value(tuple(tensor.shape), slot, parameter=slot)
            if tensor.dtype.itemsize < 4:
                self.coarse[slot] = str(tensor.dtype).removeprefix("torch.")
            module, _, name = slot.rpartition(".")
            if name in self._modules[module]._non_persistent_buffers_set:
                self._block(slot, tensor, "is a buffer that is not saved with the model")
            elif type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
                self._block(slot, tensor, f"is a {type(tensor).__name__}")
        return self._leaves[slot]

    def _block(self, slot: str, tensor: Tensor, obstacle: str) -> None:
        leaf = self._leaves.setdefault(slot, Value(tuple(tensor.shape), slot))
        leaf.parameter, leaf.obstacle = None, obstacle


def _apply(model: nn.Module, plan: Plan, recognised: Norms) -> list[str]:
    """Centres the parameters of the plan and turns its layers into RMSNorm, in place. Returns notes."""
    modules, slots, notes = dict(model.named_modules()), _slots(model), []
    centred: dict[tuple[int, Axes], list[str]] = defaultdict(list)
    for slot, axes in plan.centred.items():
        centred[id(_get(modules, slot)), axes].append(slot)
    for (key, axes), names in centred.items():
        tensor = _get(modules, names[0])
        wide = tensor.detach().double()
        value = (wide - wide.mean(tuple(axes), keepdim=True)).to(tensor.dtype)
        tied = [slot for slot in slots[key] if slot not in names]
        if not tied:
            with torch.no_grad():
                tensor.copy_(value)
        else:
            untied = nn.Parameter(value, tensor.requires_grad)
            for name in names:
                module, _, last = name.rpartition(".")
                setattr(modules[module], last, untied)
            notes.append(f"{first_names(names)}: no longer tied to {first_names(tied)}, which does not change")
            _forget_ties(modules)
    for name in plan.converted:
        layer: Any = modules[name]
        if name in recognised:
            BACKEND.become(layer, recognised[name])
            continue
        become_layer(layer, get_variant("to_rms_norm", "torch"), layer.eps)
    BACKEND.finish(model)
    return notes


def _computes_layer_norm(module: nn.Module) -> bool:
    """Whether it is torch.nn.LayerNorm, or a class of it with the same results."""
    if not isinstance(module, nn.LayerNorm) or "forward" in vars(module) or list(module.children()):
        return False
    if type(module).forward is nn.LayerNorm.forward:
        return True
    probe, random = copy.copy(module), torch.Generator().manual_seed(0)
    parameters = {name: None if p is None else torch.randn(p.shape, generator=random, dtype=torch.float64)
                  for name, p in module._parameters.items()}  # fmt: skip
    vars(probe).update(_parameters=parameters, _forward_hooks={}, _forward_pre_hooks={})
    for lead, training in product(((3,), (2, 3), (2, 3, 4)), (True, False)):
        x = torch.randn(*lead, *module.normalized_shape, generator=random, dtype=torch.float64)
        probe.training = training
        try:
            same = torch.equal(probe(x), nn.LayerNorm.forward(probe, x))
        except Exception:  # it takes other x than torch.nn.LayerNorm does
            same = False
        if not same:
            return False
    return True


def _forget_ties(modules: Mapping[str, nn.Module]) -> None:
    """Otherwise a model of transformers would tie its embeddings again when it is saved or loaded."""
    for module in modules.values():
        config: Any = getattr(module, "config", None)
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False


def _run(model: nn.Module, inputs: Any, options: Any, mode: Any = None) -> list[Tensor]:
    """Runs the model; returns all tensors of its result. Fused attention is off, as it supports LayerNorm only."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), torch.random.fork_rng(), mode or nullcontext():
            return list(_tensors(model(*inputs, **options)))
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def _slots(model: nn.Module) -> dict[int, list[str]]:
    """The names under which modules hold each floating-point parameter and buffer, by its id."""
    slots: dict[int, list[str]] = defaultdict(list)
    for module_name, module in model.named_modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and is_float(tensor):
                slots[id(tensor)].append(f"{module_name}.{name}" if module_name else name)
    return slots


def _get(modules: Mapping[str, nn.Module], slot: str) -> Tensor:
    module, _, name = slot.rpartition(".")
    return getattr(modules[module], name)


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


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    specs = func._schema.arguments
    arguments = list(zip(specs, args, strict=False))
    arguments += [(spec, kwargs[spec.name]) for spec in specs if spec.name in kwargs]
    written = [argument for spec, argument in arguments if spec.alias_info is not None and spec.alias_info.is_write]
    return [tensor for tensor in tree_leaves(written) if isinstance(tensor, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
