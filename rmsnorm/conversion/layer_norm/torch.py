"""Replaces LayerNorm by RMSNorm in PyTorch. A run of the model on sample inputs gives the graph."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any, Final

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from rmsnorm.conversion.layer_norm.behaviour import own_norms
from rmsnorm.conversion.layer_norm.conversion import Conversion, Layer, difference, first_names, require_exact
from rmsnorm.conversion.layer_norm.streams import (
    Axes,
    Node,
    Norm,
    Plan,
    Value,
    make_plan,
)
from rmsnorm.conversion.layer_norm.torch_rules import is_float, rule_of
from rmsnorm.conversion.replacement.layout import Norm as Layout
from rmsnorm.conversion.replacement.proof import first_parameter
from rmsnorm.conversion.replacement.torch import become, become_layer, is_candidate, is_replaced, key_of
from rmsnorm.identify import Target, open_target
from rmsnorm.variants import get_variant

_SHAPES: Final = {
    "empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like",
}  # fmt: skip


def to_rms_norm(model: nn.Module, *inputs: Any, **options: Any) -> Conversion:
    """Copies a module and replaces every LayerNorm, whatever its class, by RMSNorm where that is exact.

    Args, raises: as ``rmsnorm.conversion.layer_norm.to_rms_norm``.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.LayerNorm(4))
        >>> for layer in to_rms_norm(model, torch.ones(2, 3)).layers:
        ...     print(layer)
        1 (LayerNorm): now RMSNorm; eps 1e-05, centred 0.bias, 0.weight
        3 (LayerNorm): left; aten.relu in 2 is not linear
    """
    own, left = own_norms(_candidates(model), key_of, _opened)
    trace = _Trace(copy.deepcopy(model).eval(), inputs, options, own)
    plan = make_plan(trace.nodes, {**trace.obstacles, **left})
    result = copy.deepcopy(model)
    layers = tuple(_layers(model, plan, own))
    if not plan.converted:
        return Conversion(result, layers, (), (), 0.0, 0.0)
    notes = (*_apply(result, plan, own), *trace.notes(plan))
    error = difference(_outputs(model, inputs, options), _outputs(result, inputs, options))
    inputs, options = tree_map(lambda value: value.double() if is_float(value) else value, (inputs, options))
    wide = copy.deepcopy(model).double()
    before = _outputs(wide, inputs, options)
    _apply(wide, plan, own)
    exact = require_exact(difference(before, _outputs(wide, inputs, options)))
    return Conversion(result, layers, tuple(sorted(plan.centred)), notes, exact, error)


class _Trace(TorchDispatchMode):
    """The graph of a run: every operation below autograd, and the module that is running."""

    def __init__(self, model: nn.Module, inputs: Any, options: Any, own: Mapping[str, Layout]) -> None:
        super().__init__()
        self._own = own  # LayerNorms of other classes: each call is one operation
        self._inside: list[Tensor] = []  # what the one that is running was called with
        self._otherwise: set[str] = set()  # those that are called with more than x
        self.nodes: list[Node] = []
        self.obstacles: dict[str, str] = {}
        self._modules = dict(model.named_modules())
        self._slots = _slots(model)
        self._leaves: dict[str, Value] = {}
        self._values: dict[int, Value] = {}
        # By storage. It also keeps the tensors alive, so that no id is used again.
        self._views: dict[int, list[Tensor]] = defaultdict(list)
        self._running: list[str] = []
        self._dropouts: list[tuple[str, Value]] = []
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

    def notes(self, plan: Plan) -> Iterator[str]:
        names = [name for name, value in self._dropouts if value in plan.values]
        if names:
            yield f"dropout in {first_names(names)}: its output is not centred; the models agree only in evaluation"

    def _find_obstacles(self) -> None:
        """Finds the layers that stay whatever they read."""
        reached = {node.norm.layer for node in self.nodes if node.norm}
        self.obstacles |= dict.fromkeys(
            reached, "it calls layer_norm, but does not compute what torch.nn.LayerNorm does"
        )
        for name, module in self._modules.items():
            if name in self._own or _computes_layer_norm(module):
                self.obstacles.pop(name, None)
                if name in self._otherwise:
                    self.obstacles[name] = "it is called with more than x"
                elif name not in reached:
                    self.obstacles[name] = "the sample inputs do not reach it"
            elif "layernorm" in type(module).__name__.lower() and name not in reached and not list(module.children()):
                self.obstacles[name] = "it does not call layer_norm on the sample inputs"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
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
            norm = _norm(layer, values, *args[:4])
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
            self._dropouts.append((name, self._value(args[0])))
        if name in self._own:
            x: Any = args[0] if args else named.get(self._own[name].x)
            if len(args) + len(named) == 1 and is_float(x):
                self._inside.append(x)
            else:
                self._otherwise.add(name)

    def _end(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        name = self._running.pop()
        if self._inside and name in self._own:
            x = self._inside.pop()
            names = self._own[name].scale, self._own[name].bias
            weight, bias = (None if entry is None else getattr(module, entry) for entry in names)
            values = {id(tensor): self._value(tensor) for tensor in (x, weight, bias) if tensor is not None}
            y = Value(tuple(out.shape), obstacle="is in no weight")
            norm = _norm(name, values, x, x.shape[-1:], weight, bias)
            self.nodes.append(Node(f"{type(module).__name__} {name}", list(values.values()), [y], norm=norm))
            self._enter(out, y)

    def _enter(self, tensor: Tensor, value: Value) -> None:
        self._values[id(tensor)] = value
        self._views[_storage(tensor)].append(tensor)

    def _value(self, tensor: Tensor) -> Value:
        if id(tensor) not in self._values and id(tensor) in self._slots:
            return self._leaf(tensor)
        if id(tensor) not in self._values:
            self._enter(tensor, Value(tuple(tensor.shape), "a constant", obstacle="is no parameter"))
        return self._values[id(tensor)]

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
            module, _, name = slot.rpartition(".")
            if name in self._modules[module]._non_persistent_buffers_set:
                self._block(slot, tensor, "is a buffer that is not saved with the model")
            elif type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
                self._block(slot, tensor, f"is a {type(tensor).__name__}")
        return self._leaves[slot]

    def _block(self, slot: str, tensor: Tensor, obstacle: str) -> None:
        leaf = self._leaves.setdefault(slot, Value(tuple(tensor.shape), slot))
        leaf.parameter, leaf.obstacle = None, obstacle


def _norm(layer: str, values: Mapping[int, Value], x: Tensor, sizes: Any, weight: Any = None, bias: Any = None) -> Norm:
    axes = frozenset(axis for axis in range(x.ndim - len(sizes), x.ndim) if x.shape[axis] > 1)
    constant = weight is None or bool((weight == weight.flatten()[0]).all())
    centred = bias is None or float(bias.double().mean()) == 0
    return Norm(layer, axes, constant, None if bias is None else values[id(bias)], centred)


def _apply(model: nn.Module, plan: Plan, own: Mapping[str, Layout]) -> list[str]:
    """Centres the parameters of the plan and turns its layers into RMSNorm, in place. Returns notes."""
    modules, slots, notes = dict(model.named_modules()), _slots(model), []
    centred: dict[tuple[int, Axes], list[str]] = defaultdict(list)
    for slot, axes in plan.centred.items():
        centred[id(_get(modules, slot)), axes].append(slot)
    coarse: dict[torch.dtype, list[str]] = defaultdict(list)
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
        if tensor.dtype.itemsize < 4:
            coarse[tensor.dtype] += names
    for dtype, names in coarse.items():
        notes.append(f"{first_names(sorted(names))}: rounded to {str(dtype).removeprefix('torch.')} once more")
    for name in plan.converted:
        layer: Any = modules[name]
        if name in own:
            become(layer, own[name])
            continue
        become_layer(layer, get_variant("to_rms_norm", "torch"), layer.eps)
    return notes


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that may be a LayerNorm of another class than PyTorch's."""
    for name, module in model.named_modules():
        plain = "forward" not in vars(module) and not list(module.children()) and not is_replaced(module)
        known = isinstance(module, nn.LayerNorm) or type(module).__module__.startswith("torch.")
        if plain and not known and is_candidate(module):
            yield name, module


def _opened(module: nn.Module) -> tuple[Target, str]:
    probe = copy.deepcopy(module).cpu().double()
    vars(probe).update(_forward_hooks={}, _forward_pre_hooks={})
    return open_target(probe), first_parameter(module.forward)


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


def _layers(model: nn.Module, plan: Plan, own: Mapping[str, Layout]) -> Iterator[Layer]:
    for name, module in model.named_modules():
        if name in plan.converted:
            weights = first_names(sorted(plan.converted[name]))
            eps = own[name].known.eps if name in own else module.eps
            yield Layer(name, type(module).__name__, True, f"eps {eps}, centred {weights or 'nothing'}")
        elif name in plan.left:
            yield Layer(name, type(module).__name__, False, plan.left[name])


def _run(model: nn.Module, inputs: Any, options: Any, mode: Any = None) -> list[Tensor]:
    """Runs the model; returns all tensors of its result. Fused attention is off, as it supports LayerNorm only."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), torch.random.fork_rng(), mode or nullcontext():
            return list(_tensors(model(*inputs, **options)))
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def _outputs(model: nn.Module, inputs: Any, options: Any) -> list[np.ndarray]:
    training = {module: module.training for module in model.modules()}
    try:
        return [_array(tensor) for tensor in _run(model.eval(), inputs, options)]
    finally:
        for module, mode in training.items():
            module.training = mode


def _array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


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
