"""Forward and backward of arrays on one GPU of Nvidia, by the Triton kernels, as programs of XLA call them.

    y = h / rho * (o + scale) + bias

The arithmetic is in rmsnorm/gpu. A kernel is compiled when a program is lowered, and XLA gets it as text for its own
assembler, in a call of the target that jaxlib has for such kernels.
Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from functools import lru_cache
from functools import partial as bind
from typing import Any, Final

import jax
from jax import ffi

from rmsnorm.flax_impl import private
from rmsnorm.flax_impl.rounding import with_x64
from rmsnorm.gpu.plan import Settings, Tiles, has_fast_float64, settings, sum_tiles, tiles
from rmsnorm.specification.call import Call

_TYPES: Final = {"bool": "*u8", "float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "float64": "*fp64"}


def capability() -> int | None:
    """The compute capability of this process's GPUs, 90 for 9.0; None if there are none, or several kinds."""
    try:
        numbers = {device.compute_capability for device in jax.local_devices(backend="cuda")}
    except (RuntimeError, AttributeError):
        return None
    return int(numbers.pop().replace(".", "")) if len(numbers) == 1 else None


def forward(call: Call, h: Any, scale: Any, bias: Any, mask: Any, steps: tuple[int, int] | None) -> list[Any]:
    """y, and 1 / rho in float64. ``steps``: of the mask to the next row and element."""
    from rmsnorm.gpu import triton_forward as kernels

    values, tile = _of_call(call, "forward", mask, steps)
    values |= {"x": h, "residual": None, "x_step": values["h_step"], "scale": scale, "bias": bias, "h_out": None}
    if tile.chunks > 1:
        values["parts"] = _sum_parts(kernels.sum_parts, call, tile, values)
    reduced = tuple(1 if axis in call.axes else size for axis, size in enumerate(call.shape))
    results = {"y": _array(call.shape, call.result), "inverse_rms": _array(reduced, "float64")}
    chosen = _settings("forward", call, tile, (_name(scale), _name(bias)))
    return _start(kernels.forward, (tile.programs * (values["groups"] or 1), tile.chunks), chosen, values, results)


def backward(
    call: Call, wanted: tuple[str | None, ...], dy: Any, h: Any, inverse_rms: Any, dh: Any, scale: Any, mask: Any,
    steps: tuple[int, int] | None,
) -> list[Any]:  # fmt: skip
    """Those of dx + dh, dscale and dbias whose dtype is given in ``wanted``."""
    from rmsnorm.gpu import triton_backward as kernels

    values, tile = _of_call(call, "backward", mask, steps)
    groups = values["groups"] or 1
    values |= {"h": h, "dy": dy, "dh": dh, "scale": scale, "inverse_rms": inverse_rms, "dscale": None, "dbias": None}
    if tile.chunks > 1:
        values["parts"] = _sum_parts(kernels.sum_parts, call, tile, values)
    width, names = values["n"] * groups, ("dscale", "dbias")
    sums = {
        name: _array((tile.programs, width), "float64")
        for name, dtype in zip(names, wanted[1:3], strict=True) if dtype is not None
    }  # fmt: skip
    results = {"dx": _array(h.shape, call.x), **sums}
    chosen = _settings("backward", call, tile)
    dx, *totals = _start(kernels.backward, (tile.programs * groups, tile.chunks), chosen, values, results)
    features = tuple(call.shape[axis] for axis in call.feature_axes)
    added = [dx] if wanted[0] is not None else []
    for total, dtype in zip(totals, (name for name in wanted[1:3] if name is not None), strict=True):
        values = {"sums": total, "second": None, "programs": tile.programs, "n": width}
        division = sum_tiles(width)
        chosen, grid = _settings("add_up", call, division, (dtype, None)), (division.chunks, 1)
        added += _start(kernels.add_up, grid, chosen, values, {"total": _array(features, dtype)})
    return added


def _of_call(call: Call, kind: str, mask: Any, steps: tuple[int, int] | None) -> tuple[dict[str, Any], Tiles]:
    """What the kernels of a kind of pass get beside its own arrays, by the names of their arguments."""
    first, shared = (len(call.shape) - len(axes) for axes in (call.axes, call.feature_axes))
    rows, groups = math.prod(call.shape[:shared]), math.prod(call.shape[shared:first])
    n, k = int(call.n or 0), call.k
    tile = tiles(kind, rows, n, groups)
    mask_step, mask_stride = steps or (0, 0)
    return {
        "mask": mask, "mask_step": mask_step, "mask_stride": mask_stride, "parts": None,
        "rows": rows, "n": n, "k": None if k == n else k, "groups": None if groups == 1 else groups,
        "h_step": n * groups, "PROGRAMS": tile.programs, "CHUNKS": tile.chunks,
    }, tile  # fmt: skip


def _sum_parts(kernel: Any, call: Call, tile: Tiles, values: dict[str, Any]) -> Any:
    """Sums over parts of split rows: of products and, with a mask, of the elements that count."""
    rows = values["rows"] * (values["groups"] or 1)
    shape = 1 if values["mask"] is None else 2, rows, tile.chunks
    chosen = _settings("sum_parts", call, tile)
    return _start(kernel, (rows, tile.chunks), chosen, values, {"parts": _array(shape, "float64")})[0]


def _settings(kernel: str, call: Call, tile: Tiles, formats: tuple[str | None, ...] = (None, None)) -> Settings:
    """Those for this process's GPUs."""
    return settings(kernel, call, tile, formats, has_fast_float64(capability() or 0))


def _name(array: Any) -> str | None:
    return None if array is None else str(array.dtype.name)


def _array(shape: tuple[int, ...], dtype: str) -> Any:
    return jax.core.ShapedArray(shape, jax.numpy.dtype(dtype))


@with_x64
def _start(
    kernel: Any, grid: tuple[int, int], chosen: Settings, values: dict[str, Any], results: dict[str, Any]
) -> list[Any]:
    """The arrays that a kernel writes, in the order of its arguments. ``values`` may have more names than these.

    None and 1 are constants, and the other numbers are arguments, as where Triton starts a kernel itself: so both
    compile the same kernels. XLA's arrays begin at multiples of 16 bytes, which each call checks.
    """
    calls = private.triton_calls()
    values = {**chosen.arguments, **values, **results}
    signature, constants, aligned, parameters = {}, {}, [], []
    arrays = [name for name in kernel.arg_names if hasattr(values[name], "dtype")]
    if arrays[len(arrays) - len(results) :] != [name for name in arrays if name in results]:
        raise AssertionError(f"XLA passes results behind operands, {kernel.__name__} takes {arrays}")
    for i, name in enumerate(kernel.arg_names):
        value = values[name]
        if kernel.params[i].is_constexpr or value is None or (type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif name in arrays:
            signature[name] = _TYPES[value.dtype.name]
            parameters.append(calls.create_array_parameter(0, 16))
        else:
            signature[name] = "fp64" if type(value) is float else "i32" if value < 2**31 else "i64"
            parameters.append(calls.create_scalar_parameter(value, signature[name]))
        if name in arrays or (name not in constants and type(value) is int and value % 16 == 0):
            aligned.append(i)
    number, options = capability() or 0, (*chosen.options.items(),)
    name, shared, code = _compiled(kernel, (*signature.items(),), (*constants.items(),), (*aligned,), options, number)
    made = calls.TritonKernel(name, chosen.options["num_warps"], 1, shared, code, "", number)
    text = calls.TritonKernelCall(made, *grid, 1, parameters).to_proto(name, b"")
    types = [jax.ShapeDtypeStruct(values[name].shape, values[name].dtype) for name in arrays if name in results]
    operands = [values[name] for name in arrays if name not in results]
    return call_of(types, zlib.compress(text))(*operands)


def call_of(types: list[Any], text: bytes) -> Callable[..., Any]:
    """The call of a kernel. jaxlib's older target triton_kernel_call would be in no CUDA graph of XLA."""
    return bind(ffi.ffi_call("triton_kernel_call_ffi", types), opaque=text)


@lru_cache
def _compiled(
    kernel: Any, signature: tuple[tuple[str, str], ...], constants: tuple[tuple[str, Any], ...],
    aligned: tuple[int, ...], options: tuple[tuple[str, Any], ...], number: int,
) -> tuple[str, int, str]:  # fmt: skip
    """The name of a kernel, the bytes of its shared memory, and its code for the assembler."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    by_position = {(kernel.arg_names.index(name),): value for name, value in constants}
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, signature=dict(signature), constexprs=by_position, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", number, 32), options=dict(options))
    return made.metadata.name, made.metadata.shared, made.asm["ptx"]
