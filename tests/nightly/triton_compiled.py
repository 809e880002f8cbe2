"""The Triton kernels, compiled for cards that need not be there. Triton brings an assembler; no GPU is needed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rmsnorm.gpu import triton_backward, triton_forward
from rmsnorm.gpu.plan import Tiles, has_fast_float64, settings, sum_tiles, tiles
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import Variant

POINTERS = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "float64": "*fp64"}
REGISTERS = 128  # of a thread of backward, so that a program of 16 warps fits

# What a compiler may contract, or what flushes, approximates or rounds in another way than to nearest; and those of
# these instructions that the kernels write on purpose: quotients cut off, and 20 bits from which Newton's steps start.
_LOOSE = (
    r"\b(?:(?:mul|add|sub|fma|div|sqrt|rcp)\.(?!rn\.b?f)[\w.]*f(?:16|32|64)\w*|cvt\.(?!rn\.)r[\w.]*|"
    r"[\w.]*(?:ftz|approx)[\w.]*)"
)
ON_PURPOSE = {
    "fma.rz.f32", "mul.rz.f32", "mul.rz.f64", "cvt.rz.f32.f64", "rsqrt.approx.ftz.f64", "rsqrt.approx.ftz.f32",
}  # fmt: skip


class Compiled(NamedTuple):
    access: int  # the widest of global memory, in bytes
    loose: tuple[str, ...]  # instructions that the assembler may contract, or that flush or approximate


def compiled(kernel: str, dtype: str, n: int, capability: int = 90, rows: int = 4096, **options: Any) -> Compiled:
    """A kernel (forward or backward) of rows of n elements, with a gain, compiled; options are arguments of it."""
    function = getattr({"forward": triton_forward, "backward": triton_backward}[kernel], kernel)
    made = _compile(function, dtype, n, capability, rows, tiles(kernel, rows, n), options)
    assert made.asm["cubin"]
    words = re.findall(r"[ls][dt]\.global(?:\.v(\d))?\.b(\d+)", made.asm["ptx"])
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*?\], (0x\w+|\d+)", made.asm["ptx"])
    access = max([int(vector or 1) * int(bits) // 8 for vector, bits in words] + [int(size, 0) for size in copies])
    return Compiled(access, loose(made.asm["ptx"]))


def compiled_sums(dtype: str, n: int, capability: int = 90, rows: int = 4096, **options: Any) -> list[Any]:
    """The kernels that add up: parts of a row, forward and backward, and what programs have summed for the gain."""
    forward, backward = tiles("forward", rows, n), tiles("backward", rows, n)
    both = {**options, "second": POINTERS[dtype]}
    return [
        _compile(triton_forward.sum_parts, dtype, n, capability, rows, forward, options),
        _compile(triton_backward.sum_parts, dtype, n, capability, rows, backward, options),
        _compile(triton_backward.add_up, dtype, n, capability, rows, sum_tiles(n), options),
        _compile(triton_backward.add_up, dtype, n, capability, rows, sum_tiles(n), both),
    ]


def loose(ptx: str) -> tuple[str, ...]:
    return tuple(sorted(set(re.findall(_LOOSE, ptx)) - ON_PURPOSE))


def _compile(
    function: Any, dtype: str, n: int, capability: int, rows: int, tile: Tiles, options: dict[str, Any]
) -> Any:
    """With the arguments that torch_impl/gpu.py passes, specialised as Triton does it.

    Options are arguments by their names: POSITION, OFFSET, NORM, PRODUCT and RESULT are of the call.
    """
    own, parts = POINTERS[dtype], POINTERS["float64"] if tile.chunks > 1 else None
    values: dict[str, Any] = {
        "x": own, "residual": None, "scale": own, "bias": None, "parts": parts, "y": own, "h_out": None,
        "inverse_rms": POINTERS["float64"], "h": own, "dy": own, "dh": None, "dx": own,
        "dscale": POINTERS["float64"], "dbias": None,
        "rows": rows, "n": n, "groups": None, "x_step": n, "h_step": n, "CHUNKS": tile.chunks,
        "PROGRAMS": tile.programs,
        "sums": POINTERS["float64"], "total": own, "second": None, "programs": tile.programs,
    }  # fmt: skip
    values |= options
    variant = Variant(
        name="", eps=1e-6, eps_position=options.get("POSITION", "inside"), scale_offset=options.get("OFFSET", 0.0)
    )
    call = replace(
        resolve("rms_norm", Spec((rows, n), dtype), variant=variant), norm_dtype=options.get("NORM"),
        product_dtype=options.get("PRODUCT", dtype), result_dtype=options.get("RESULT", dtype),
    )  # fmt: skip
    names = {pointer: name for name, pointer in POINTERS.items()}
    formats = ("total", "second") if function is triton_backward.add_up else ("scale", "bias")
    own_formats = tuple(names.get(values[name]) for name in formats)
    chosen = settings(function.__name__, call, tile, own_formats, values.pop("FLOAT64", has_fast_float64(capability)))
    values = chosen.arguments | values
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(function.arg_names):
        value = values[name]
        is_pointer = isinstance(value, str) and value.startswith("*")
        if type(value) is float and not function.params[i].is_constexpr:
            signature[name] = "fp64"
        elif is_pointer or (type(value) is int and value != 1 and not function.params[i].is_constexpr):
            signature[name] = value if is_pointer else "i32"
            if is_pointer or value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name], constants[(i,)] = "constexpr", value
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    options = chosen.options
    if "maxnreg" in options and options["maxnreg"] is None:
        options = options | {"maxnreg": REGISTERS}
    return triton.compile(source, target=target, options=options)
