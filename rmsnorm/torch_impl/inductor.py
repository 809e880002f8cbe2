"""The line that Inductor writes for an operator in a program: a call of the kernels.

PyTorch's dispatcher, and checks that were made when the program was traced, take several times as long as a small
kernel. The operators are called where a tensor has gaps or there is a mask or a residual; where Inductor writes C++;
and in versions of PyTorch whose Inductor writes the calls of every operator itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import le
from typing import Any

import torch

from rmsnorm.torch_impl.private import has_inductor, is_used, write_in_programs
from rmsnorm.torch_impl.rounding import dtype_name


def _write_forward(node: Any, write_line: Callable[[str], None]) -> None:
    (x, residual, scale, bias, mask, gate, *text), _ = node.unflatten_args(node.inputs, node.constant_args)
    _, h, inverse_rms = _used(node)
    is_written = residual is None and mask is None and not h and _have_no_gaps(x, scale, bias, gate)
    key = _key(x, scale, bias, gate, *text)
    _write(node, write_line, is_written and key, x, scale, bias, gate, inverse_rms)


def _write_backward(node: Any, write_line: Callable[[str], None]) -> None:
    (dy, dh, h, inverse_rms, scale, bias, mask, gate, *text), _ = node.unflatten_args(node.inputs, node.constant_args)
    _, *used = _used(node)
    is_written = dh is None and mask is None and _have_no_gaps(dy, h, inverse_rms, scale, gate)
    exist = (primal is not None for primal in (scale, bias, gate))
    is_written = is_written and all(map(le, used, exist))
    is_written = is_written and (gate is None or _have_no_gaps(bias))  # whose numbers count then
    key = _key(h, scale, bias, gate, *text)
    _write(node, write_line, is_written and key, dy, h, inverse_rms, scale, bias, gate)


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


def _key(x: Any, scale: Any, bias: Any, gate: Any, text: str, k: Any) -> tuple[Any, ...] | None:
    """The key of ``kernels.run_of``, and sizes, which tell programs on the disk apart; None if a number is a symbol."""
    try:
        names = (None if t is None else dtype_name(t.get_dtype()) for t in (x, scale, bias, gate))
        sizes = (None if p is None else tuple(map(int, p.get_size())) for p in (scale, bias))
        return *names, text, None if k is None else int(k), *sizes
    except TypeError:
        return None


def _write(node: Any, write_line: Callable[[str], None], key: Any, *arguments: Any) -> None:
    if key:
        function = f"{node.python_kernel_name}.in_program"
        texts = [repr(key), *(t.codegen_reference() if hasattr(t, "codegen_reference") else str(t) for t in arguments)]
    else:
        function, texts = node.python_kernel_name, [*node.codegen_args(), *node.codegen_kwargs()]
    write_line(f"{node.get_name()} = {function}({', '.join(texts)})")


def register() -> None:
    """Let Inductor, once it is imported, write the calls of the operators so."""
    if has_inductor():
        _register()


@lru_cache
def _register() -> bool:
    operators = torch.ops.rmsnorm.forward.default, torch.ops.rmsnorm.backward.default
    return all(map(write_in_programs, operators, (_write_forward, _write_backward)))
