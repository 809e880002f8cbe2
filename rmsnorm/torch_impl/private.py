"""What this package needs of PyTorch and PyTorch has no public function for.

A version of PyTorch may lack such a private function. So each has a substitute, with which the results are the same but
take longer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import reduce
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

F = TypeVar("F", bound=Callable[..., Any])
CPU: Final = torch.device("cpu")  # named in every allocation: the default device may be another one


def _private(path: str, otherwise: Any) -> Any:
    """The object of this name below ``torch``."""
    owner: Any = torch
    return reduce(lambda owner, name: getattr(owner, name, None), path.split("."), owner) or otherwise


# Whether a function transform of torch.func is active.
is_in_transform: Final = _private("_C._are_functorch_transforms_active", lambda: True)
# Whether torch.jit.trace runs: without a look for scripts, which takes as long.
_is_traced: Final = _private("_C._is_tracing", torch.jit.is_tracing)
# How many modes see the operations, as those of make_fx and of selective checkpoints.
modes: Final = _private("_C._len_torch_dispatch_stack", lambda: 1)
# Whether autograd made a tensor of zeros that are not stored.
is_zero_tensor: Final = _private("Tensor._is_zerotensor", lambda tensor: not tensor.untyped_storage().nbytes())
# Whether Dynamo reads the program. It knows this function and answers itself.
is_dynamo_compiling: Final = torch.compiler.is_dynamo_compiling
# Whether a program is exported. A version that cannot be asked says it of a program that is compiled, too.
is_exporting: Final = _private("compiler.is_exporting", torch.compiler.is_compiling)
# The memory format in which PyTorch sees a tensor, also one with gaps. Without it every result is contiguous.
format_of: Final = _private("_prims_common.suggest_memory_format", lambda tensor: torch.contiguous_format)
# A tensor on the CPU from its sizes, strides and dtype, for half of what torch.empty takes.
empty_strided: Final = _private(
    "_C._dynamo.guards._empty_strided_cpu",
    lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype, device=CPU),
)

# The same on the current GPU.
empty_on_gpu: Final = _private(
    "_C._dynamo.guards._empty_strided_cuda",
    lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype, device="cuda"),
)
current_gpu: Final = _private("_C._cuda_getDevice", torch.cuda.current_device)
stream_of: Final = _private("_C._cuda_getCurrentRawStream", lambda i: torch.cuda.current_stream(i).cuda_stream)

_has_level: Final = hasattr(forward_ad, "_current_level")
# The transforms of torch.func that are active; None for none.
_transforms: Final = _private("_C._functorch.get_interpreter_stack", lambda: None)


def has_tangents() -> bool:
    """Whether forward mode is on, in which tensors may have tangents. If that is not known, they may.

    A program of Dynamo enters it below Python, where the transforms know it.
    """
    if not _has_level or forward_ad._current_level >= 0:
        return True
    return is_in_transform() and any(each.key().name == "Jvp" for each in _transforms() or ())


def is_differentiated(*tensors: Tensor | None) -> bool:
    if has_tangents():
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def is_exported() -> bool:
    """Whether torch.onnx.export or torch.jit.trace writes the operations down, for other runtimes."""
    if is_dynamo_compiling():  # it reads a backward pass, and cannot read the questions
        return False
    return _is_traced() or (is_exporting() and torch.onnx.is_in_onnx_export())


def is_transformed() -> bool:
    """Whether a compiler, a tracer or torch.func sees the operations."""
    return torch.compiler.is_compiling() or is_in_transform() or _is_traced()


def is_watched() -> bool:
    """Whether a compiler, torch.func, or a mode sees the operations."""
    return is_transformed() or modes() > 0


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Its ``apply`` without the look for torch.func, which takes a microsecond and a half."""
    base = super(torch.autograd.Function, function)
    return base.apply if hasattr(base, "apply") else function.apply


def untraced(function: F) -> F:
    """The function and all it calls run as they are, also in a program that torch.compile cannot trace as a whole.

    In another version parts of them are compiled. torch.compiler.disable takes a second here, to import Dynamo.
    """
    strategy = _private("_C._dynamo.eval_frame._FrameExecStrategy", None)
    if strategy is not None:
        skip = torch._C._dynamo.eval_frame._FrameAction.SKIP
        torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy(skip, skip))
    return function


def is_autocast_on(device_type: str) -> bool:
    """Also of a device without autocast, as meta, where PyTorch 2.5 raises."""
    try:
        return torch.is_autocast_enabled(device_type)
    except RuntimeError:
        return False


# Whether y of torch.nn.RMSNorm has the dtype of x and the gain promoted, as in PyTorch 2.5 and 2.6. Where there is a
# fused operator, y has that of x, and the question would end in a warning.
promotes: Final[bool] = _private("_fused_rms_norm", None) is None and (
    torch.nn.functional.rms_norm(
        torch.ones(1, dtype=torch.float16, device=CPU), (1,), torch.ones(1, dtype=torch.float32, device=CPU)
    ).dtype
    == torch.float32
)
# Whether ``built_in_dtype`` must be asked in a call. A program has one condition for it in every version.
may_differ: Final[Callable[[str], bool]] = (lambda device_type: True) if promotes else is_autocast_on


def built_in_dtype(variant: str, x: Tensor, weight: Tensor | None, residual: Any) -> torch.dtype | None:
    """That of y of a layer where the built-in layer, or autocast in it, has another one than the variant; else None."""
    if variant != "torch":
        return None
    dtypes = [t.dtype for t in (x, residual) if isinstance(t, Tensor)]
    usual = dtype = reduce(torch.promote_types, dtypes)
    is_narrow = all(each in (torch.bfloat16, torch.float16) for each in dtypes)
    if is_narrow and is_autocast_on(x.device.type) and is_widened(x.device.type):
        dtype = torch.float32
    if promotes and weight is not None:
        dtype = torch.promote_types(dtype, weight.dtype)
    return None if dtype == usual else dtype


def is_widened(device_type: str) -> bool:
    """Whether torch.nn.RMSNorm has float32 results of 16-bit tensors of a device where autocast is on.

    It does where autocast casts what its operator takes, or what the square takes that PyTorch 2.5 has in 16 bits.
    """
    has_kernel = _private("_C._dispatch_has_kernel_for_dispatch_key", lambda *_: device_type in ("cuda", "xpu"))
    operator = "aten::rms_norm" if torch.__version__ >= (2, 6) else "aten::pow.Tensor_Scalar"
    with suppress(RuntimeError):  # there is no such key
        return bool(has_kernel(operator, f"Autocast{device_type.upper()}"))
    return False


# A constant of a program that Dynamo traces. torch.compiler.assume_constant_result imports Dynamo.
is_widened._dynamo_marked_constant = True  # type: ignore[attr-defined]


def current_device(x: Tensor) -> Any:
    """A context in which the device of x is the current one, on which Triton starts kernels."""
    return torch.cuda.device_of(x) if x.is_cuda and x.get_device() != current_gpu() else nullcontext()


def starter(compiled: Any, grid: tuple[int, int, int], constants: list[Any]) -> Callable[..., None] | None:
    """A function of addresses and numbers that starts a compiled kernel of Triton on the current GPU.

    None where it cannot be started so. Without a profiler's hooks the launcher is called itself, and without its look
    at the hooks: that takes half the time.
    """
    try:
        start = compiled[grid]
    except TypeError:  # the interpreter compiles nothing
        return None
    try:
        from triton import knobs

        runtime, launch, function, packed = knobs.runtime, compiled.run, compiled.function, compiled.packed_metadata
        _has_hooks(runtime)
    except (ImportError, AttributeError):
        return lambda *arguments: start(*arguments, *constants)
    width, height, depth = grid

    def run(*arguments: Any) -> None:
        if _has_hooks(runtime):
            start(*arguments, *constants)
        else:
            stream = stream_of(current_gpu())
            launch(width, height, depth, stream, function, packed, None, None, None, *arguments, *constants)

    return run


def _has_hooks(runtime: Any) -> bool:
    """Whether something is called before or after each launch of Triton; a chain of hooks may be empty."""
    before, after = runtime.launch_enter_hook, runtime.launch_exit_hook
    return not (
        (before is None or getattr(before, "calls", True) == [])
        and (after is None or getattr(after, "calls", True) == [])
    )
