"""The lines that Inductor writes for the operators in a program: kernels, planned once for each shape.

PyTorch's dispatcher, and checks that were made when the program was traced, take several times as long as a small
kernel. The operators are called where a tensor has gaps or there is a mask or a residual; where Inductor writes C++;
and in versions of PyTorch whose Inductor writes the calls of every operator itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rmsnorm.torch_impl import kernels
from rmsnorm.torch_impl.private import has_inductor, is_used, write_in_programs
from rmsnorm.torch_impl.rounding import dtype_name


@lru_cache(maxsize=4096)
def _planned(device: torch.device, shape: torch.Size, key: str) -> kernels.Kept | None:
    """The call as the kernels of a device compute it; None if they cannot."""
    x, scale, bias, gate, *text = json.loads(key)
    names = x, scale and scale[1], bias and bias[1], gate  # the sizes tell programs on the disk apart
    dtypes = (None if name is None else getattr(torch, name) for name in names)
    run = kernels.planned(device, shape, *dtypes, *text)
    return run if isinstance(run, kernels.Kept) else None


def _forward(
    key: str, x: Tensor, scale: Tensor | None, bias: Tensor | None, gate: Tensor | None, with_inverse_rms: bool
) -> Any:
    """The results of the operator, in a compiled program that uses no h, and perhaps no 1 / rho."""
    plan = _planned(x.device, x.shape, key)
    if plan is None:
        return torch.ops.rmsnorm.forward(x, None, scale, bias, None, gate, *json.loads(key)[4:])
    return plan.forward(with_inverse_rms, x, None, scale, bias, None, gate)


def _backward(
    key: str, dy: Tensor, h: Tensor, inverse_rms: Tensor, scale: Tensor | None, bias: Tensor | None, gate: Tensor | None
) -> Any:
    """The results of the operator; None for the gradient of a parameter that is None."""
    plan = _planned(h.device, h.shape, key)
    if plan is None:
        return torch.ops.rmsnorm.backward(dy, None, h, inverse_rms, scale, bias, None, gate, *json.loads(key)[4:])
    return plan.backward(kernels.ALL, dy, None, h, scale, bias, None, gate, inverse_rms)


def _write_forward(node: Any, write_line: Callable[[str], None]) -> None:
    (x, residual, scale, bias, mask, gate, *text), _ = node.unflatten_args(node.inputs, node.constant_args)
    _, h, inverse_rms = _used(node)
    planned = residual is None and mask is None and not h and _have_no_gaps(x, scale, bias, gate)
    key = _key(x, scale, bias, gate, text)
    _write(node, write_line, planned and key, x, scale, bias, gate, inverse_rms)


def _write_backward(node: Any, write_line: Callable[[str], None]) -> None:
    (dy, dh, h, inverse_rms, scale, bias, mask, gate, *text), _ = node.unflatten_args(node.inputs, node.constant_args)
    _, *used = _used(node)
    planned = dh is None and mask is None and _have_no_gaps(dy, h, inverse_rms, scale, gate)
    planned = planned and all(is_used <= (t is not None) for is_used, t in zip(used, (scale, bias, gate), strict=True))
    planned = planned and (gate is None or _have_no_gaps(bias))  # whose numbers count then
    key = _key(h, scale, bias, gate, text)
    _write(node, write_line, planned and key, dy, h, inverse_rms, scale, bias, gate)


def _used(node: Any) -> tuple[bool, ...]:
    """Which results of the operator the program uses."""
    return tuple(map(is_used, node.outputs))


def _have_no_gaps(*tensors: Any) -> bool:
    for tensor in tensors:
        step = 1
        for size, stride in (
            () if tensor is None else zip(tensor.get_size()[::-1], tensor.get_stride()[::-1], strict=True)
        ):
            if size != 1 and stride != step:
                return False
            step *= size
    return True


def _key(x: Any, scale: Any, bias: Any, gate: Any, text: list[Any]) -> str | None:
    """The text from which ``_planned`` knows a call, apart from the shape of x; None if there are symbols in it."""
    try:
        parameters = [p and (list(map(int, p.get_size())), dtype_name(p.get_dtype())) for p in (scale, bias)]
        z = None if gate is None else dtype_name(gate.get_dtype())
        return json.dumps([dtype_name(x.get_dtype()), *parameters, z, *text])
    except TypeError:
        return None


def _write(node: Any, write_line: Callable[[str], None], key: Any, *arguments: Any) -> None:
    if key:
        function = f"{node.python_kernel_name}.in_program"
        texts = [repr(key), *(t.codegen_reference() if hasattr(t, "codegen_reference") else str(t) for t in arguments)]
    else:
        function, texts = node.python_kernel_name, [*node.codegen_args(), *node.codegen_kwargs()]
    write_line(f"{node.get_name()} = {function}({', '.join(texts)})")


def prepare(forward: Any, backward: Any) -> None:
    """Give the operators the names by which the written code calls these functions."""
    forward.in_program, backward.in_program = _forward, _backward


def register() -> None:
    """Let Inductor, once it is imported, write the calls of the operators so."""
    if has_inductor():
        _register()


@lru_cache
def _register() -> bool:
    operators = torch.ops.rmsnorm.forward.default, torch.ops.rmsnorm.backward.default
    return all(map(write_in_programs, operators, (_write_forward, _write_backward)))
