"""Replaces LayerNorm by RMSNorm in PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from rmsnorm.conversion.layer_norm.sampled import Array, Norms, Sampled, Values
from rmsnorm.conversion.layer_norm.search import first_names
from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.conversion.replacement.torch import BACKEND, become_layer, is_float
from rmsnorm.specification import errors
from rmsnorm.specification.variants import get_variant
from rmsnorm.targets.bridges import bridge

TORCH = bridge("torch")


class SampledModel(Sampled):
    backend, bridge, separator = BACKEND, TORCH, "."
    tree_map, is_float = staticmethod(tree_map), staticmethod(is_float)

    def __init__(self, model: nn.Module, inputs: Any, options: Any) -> None:
        super().__init__(model, inputs, options)
        for path, module in model.named_modules():
            for name, value in {**vars(module), **module._buffers}.items():
                if isinstance(value, Tensor) and not value.is_leaf:
                    want = "a tensor without a history of gradients, as no other one can be copied"
                    fix = "if torch.nn.utils.prune or weight_norm makes it, call its remove first; else detach it"
                    place = f"{path}.{name}".lstrip(".")
                    raise errors.out_of_domain("to_rms_norm", place, "made of other tensors", want, fix)

    def own(self, layer: Any) -> Norm | None:
        if type(layer).forward is not getattr(nn.LayerNorm, "forward") or "forward" in vars(layer):  # noqa: B009
            return None
        axes, names = tuple(range(-len(layer.normalized_shape), 0)), ("weight", "bias")
        scale, bias = (name if getattr(layer, name) is not None else None for name in names)
        return Norm(axes, axes, scale, bias, "input", get_variant("", "torch").replace(eps=layer.eps))

    def widen(self) -> None:
        self.copy = copy.deepcopy(self.model).double().eval()
        tensors = {slot: tensor for tensor, slots in _slots(self.copy) for slot in slots}
        self.devices = {slot: tensor.device for slot, tensor in tensors.items()}
        self.values = {slot: TORCH.fetch(tensor) for slot, tensor in tensors.items()}

    def like(self, array: Array, x: Any) -> Tensor:
        return torch.from_numpy(array).to(x.device)

    def run(self, tensors: Mapping[str, Tensor], sample: Any) -> list[Tensor]:
        placed = {slot: tensor.to(self.devices[slot]) for slot, tensor in tensors.items()}
        call = partial(torch.func.functional_call, self.copy, placed, tie_weights=False)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with _Wide():
                return _run(lambda *inputs, **options: call(inputs, options), sample)
        finally:
            torch.set_default_dtype(default)

    def gradients(self, *args: Any) -> dict[str, Array | None]:
        with torch.autograd.graph.allow_mutation_on_saved_tensors():  # by operations in place
            return super().gradients(*args)

    def outputs(self, model: nn.Module) -> list[Array]:
        with torch.no_grad():
            return [TORCH.fetch(y) for y in _run(copy.deepcopy(model).eval(), self.sample)]

    def become(self, layer: Any, norm: Norm) -> None:
        if isinstance(layer, nn.LayerNorm) and not norm.known.scale_offset:
            become_layer(layer, get_variant("", "torch"), norm.known.eps)
        else:
            BACKEND.become(layer, norm)

    def changed(self, centred: Values, norms: Norms) -> tuple[nn.Module, list[str]]:
        result = copy.deepcopy(self.model)
        modules, notes = dict(result.named_modules()), []
        for tensor, slots in _slots(result):
            edits: dict[bytes, list[str]] = {}  # the places of a tied parameter by the value that they need
            for slot in slots:
                edits.setdefault(centred[slot].tobytes() if slot in centred else b"", []).append(slot)
            for names in (edits[key] for key in edits if key):
                value = torch.from_numpy(centred[names[0]]).to(tensor.device, tensor.dtype)
                if len(edits) == 1:
                    tensor.data.copy_(value)
                    continue
                untied = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
                for module, _, name in (slot.rpartition(".") for slot in names):
                    setattr(modules[module], name, untied)
                others = first_names(slot for slot in slots if slot not in names)
                notes.append(f"{first_names(names)}: no longer tied to {others}")
        if notes:  # otherwise transformers would tie them again when it saves or loads the model
            for config in (getattr(module, "config", None) for module in modules.values()):
                if getattr(config, "tie_word_embeddings", False):
                    setattr(config, "tie_word_embeddings", False)  # noqa: B010
        if norms and hasattr(result, "from_pretrained"):
            notes.append("from_pretrained makes LayerNorms again, which compute the same with these weights")
        for name, norm in norms.items():
            self.become(modules[name], norm)
        BACKEND.finish(result)
        return result, notes


class _Wide(TorchFunctionMode):
    """Within it, what a model casts to a dtype of fewer bits gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        named = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **named)


def _widened(value: Any) -> Any:
    return torch.float64 if value in (torch.float32, torch.float16, torch.bfloat16) else value


def _run(model: Any, sample: Any) -> list[Tensor]:
    """All tensors of a model's result, which may be random in the same way each time and may write to its inputs."""
    inputs, options = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, sample)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return list(_tensors(model(*inputs, **options), set()))


def _slots(model: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Each parameter, and each buffer that is saved and no statistic of PyTorch's, with its places."""
    slots: dict[int, tuple[Any, list[str]]] = {}
    for path, module in model.named_modules():
        own = not type(module).__module__.startswith("torch.")
        saved = module._buffers.keys() - module._non_persistent_buffers_set if own else ()
        for name, tensor in {**module._parameters, **{name: module._buffers[name] for name in saved}}.items():
            if is_float(tensor) and type(tensor) in (Tensor, nn.Parameter, nn.Buffer):
                slots.setdefault(id(tensor), (tensor, []))[1].append(f"{path}.{name}".lstrip("."))
    return list(slots.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in a value: in containers, and in the attributes of objects such as caches."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen and not isinstance(value, (type, nn.Module)):
        seen.add(id(value))
        parts = value if isinstance(value, (list, tuple, set)) else getattr(value, "__dict__", {}).values()
        for part in value.values() if isinstance(value, Mapping) else parts:
            yield from _tensors(part, seen)
