"""What the compiler makes of the Triton kernels, for cards that are not there. test_gpu.py runs this.

Triton brings an assembler; no GPU is needed.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

import rmsnorm.gpu
from rmsnorm.gpu import triton_backward, triton_forward
from rmsnorm.gpu.plan import has_fast_float64, settings, sum_tiles, tiles
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import Variant
from rmsnorm.torch_impl import gpu, kernels

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
ROWS = 4096
POINTERS = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "float64": "*fp64"}
SINGLE, SUMS = POINTERS["float32"], POINTERS["float64"]
REGISTERS = 128  # of a thread of backward, so that a program of 16 warps fits
KERNELS = {  # each function, whose tiles it has, and the parameters that say which formats it reads
    "forward": (triton_forward.forward, "forward", ("scale", "bias")),
    "backward": (triton_backward.backward, "backward", ("scale", "bias")),
    "parts of forward": (triton_forward.sum_parts, "forward", ("scale", "bias")),
    "parts of backward": (triton_backward.sum_parts, "backward", ("scale", "bias")),
    "add up": (triton_backward.add_up, "sums", ("total", "second")),
}
# What a compiler may contract, or what flushes, approximates or rounds in another way than to nearest; and those of
# these instructions that the kernels write on purpose: quotients cut off, and 20 bits from which Newton's steps start.
LOOSE = (
    r"\b(?:(?:mul|add|sub|fma|div|sqrt|rcp)\.(?!rn\.b?f)[\w.]*f(?:16|32|64)\w*|cvt\.(?!rn\.)r[\w.]*|"
    r"[\w.]*(?:ftz|approx)[\w.]*)"
)
ON_PURPOSE = {
    "fma.rz.f32", "mul.rz.f32", "mul.rz.f64", "cvt.rz.f32.f64", "rsqrt.approx.ftz.f64", "rsqrt.approx.ftz.f32",
}  # fmt: skip


def loose(ptx):
    return set(re.findall(LOOSE, ptx)) - ON_PURPOSE


def widest_access(ptx):
    """Of global memory, in bytes."""
    words = re.findall(r"[ls][dt]\.global(?:\.v(\d))?\.b(\d+)", ptx)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*?\], (0x\w+|\d+)", ptx)
    return max([int(vector or 1) * int(bits) // 8 for vector, bits in words] + [int(size, 0) for size in copies])


def compiled(name, dtype, n, capability=90, rows=ROWS, **options):
    """The PTX of a kernel with the arguments that torch_impl/gpu.py passes, specialised as Triton does it.

    Options are arguments by their names: POSITION, OFFSET, NORM, PRODUCT and RESULT are of the call.
    """
    function, kind, formats = KERNELS[name]
    tile = sum_tiles(n) if kind == "sums" else tiles(kind, rows, n)
    own, parts = POINTERS[dtype], SUMS if tile.chunks > 1 else None
    values = {
        "x": own, "residual": None, "scale": own, "bias": None, "parts": parts, "y": own, "h_out": None,
        "inverse_rms": SUMS, "h": own, "dy": own, "dh": None, "dx": own, "dscale": SUMS, "dbias": None,
        "rows": rows, "n": n, "groups": None, "x_step": n, "h_step": n, "CHUNKS": tile.chunks,
        "PROGRAMS": tile.programs, "sums": SUMS, "total": own, "second": None, "programs": tile.programs, **options,
    }  # fmt: skip
    position, offset = options.get("POSITION", "inside"), options.get("OFFSET", 0.0)
    variant = Variant(name="", eps=1e-6, eps_position=position, scale_offset=offset)
    call = replace(
        resolve("rms_norm", Spec((rows, n), dtype), variant=variant), norm_dtype=options.get("NORM"),
        product_dtype=options.get("PRODUCT", dtype), result_dtype=options.get("RESULT", dtype),
    )  # fmt: skip
    names = {pointer: name for name, pointer in POINTERS.items()}
    own_formats = tuple(names.get(values[name]) for name in formats)
    chosen = settings(function.__name__, call, tile, own_formats, values.pop("FLOAT64", has_fast_float64(capability)))
    values = chosen.arguments | values
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(function.arg_names):
        value, is_constant = values[name], function.params[i].is_constexpr
        if isinstance(value, str) and value.startswith("*"):
            signature[name], is_aligned = value, True
        elif type(value) is float and not is_constant:
            signature[name], is_aligned = "fp64", False
        elif type(value) is int and value != 1 and not is_constant:
            signature[name], is_aligned = "i32", value % 16 == 0
        else:
            signature[name], constants[(i,)], is_aligned = "constexpr", value, False
        if is_aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=attributes)
    limit = {"maxnreg": REGISTERS} if chosen.options.get("maxnreg", 0) is None else {}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=chosen.options | limit)
    assert made.asm["cubin"]
    return made.asm["ptx"]


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize(("kernel", "dtype", "n"), [
    *(("forward", "bfloat16", n) for n in (72, 127, 256, 4096, 8192, 65536)), ("forward", "float16", 8192),
    ("forward", "float32", 8192), *(("backward", "bfloat16", n) for n in (72, 127, 1024, 16384)),
    ("backward", "float32", 8192),
])  # fmt: skip
def test_each_division_of_rows_is_machine_code_of_every_card(kernel, dtype, n, capability):
    """Which reads and writes 16 bytes at once where rows allow it."""
    ptx = compiled(kernel, dtype, n, capability)
    assert not loose(ptx)
    assert widest_access(ptx) == 16 or n % 8


def test_only_what_is_written_on_purpose_may_be_loose():
    harmless = {"fma.rn.f32", "fma.rn.bf16x2", "mul.rn.f64", "add.s32", "cvt.rn.bf16x2.f32", *ON_PURPOSE}
    wrong = {"mul.f32", "add.f16x2", "fma.rz.f64", "cvt.rz.f16.f32", "cvt.rn.ftz.f32.f16", "div.full.f32",
             "rsqrt.approx.f64", "add.rz.f32", "sqrt.approx.f32"}  # fmt: skip
    assert {name for name in harmless | wrong if loose(f"\t{name} %r1, %r2;") == {name}} == wrong


MIXED = {"scale": SINGLE, "bias": SINGLE, "PRODUCT": "float32", "RESULT": "float32", "y": SINGLE}
BRANCHES = [  # each branch of a kernel, which the interpreter does not compile
    ("forward", "float16", 80, {"NORM": "float16", "bias": POINTERS["float16"]}),
    ("forward", "bfloat16", 80, {"residual": POINTERS["bfloat16"], "h_out": POINTERS["bfloat16"], "OFFSET": 1.0}),
    ("forward", "bfloat16", 80, {"NORM": "bfloat16", **MIXED}),
    ("forward", "float16", 80, {"POSITION": "outside", "OFFSET": 1.0, **MIXED}),
    ("forward", "float32", 80, {"POSITION": "clamp", "scale": None, "NORM": "float32"}),
    ("forward", "float32", 1, {"rows": 1}),
    ("forward", "bfloat16", 64, {"groups": 8}),
    ("backward", "bfloat16", 80, {"dh": POINTERS["bfloat16"], "dbias": SUMS, "dy": SINGLE, "scale": SINGLE}),
    ("backward", "float16", 80, {"POSITION": "outside", "OFFSET": 1.0}),
    ("backward", "float32", 80, {"POSITION": "clamp", "scale": None, "dscale": None}),
    ("backward", "float32", 1, {"rows": 1}),
    ("backward", "bfloat16", 64, {"groups": 8}),
]


@pytest.mark.parametrize("float64", [True, False])
@pytest.mark.parametrize(("kernel", "dtype", "n", "options"), BRANCHES)
def test_every_branch_is_machine_code(kernel, dtype, n, options, float64):
    ptx = compiled(kernel, dtype, n, FLOAT64=float64, **options)
    # The oldest flushes subnormal numbers in tl.div_rn, which divides numbers of a row: none is, or the row is special.
    assert not loose(ptx) or VERSION <= rmsnorm.gpu._OLDEST


@pytest.mark.parametrize(
    ("dtype", "n", "options"), [("float32", 65536, {}), ("bfloat16", 40000, {"OFFSET": 1.0, "groups": 3})]
)
def test_the_kernels_that_add_up_are_machine_code(dtype, n, options):
    for name in ("parts of forward", "parts of backward", "add up"):
        compiled(name, dtype, n, **options)
    compiled("add up", dtype, n, **options, second=POINTERS[dtype])


@pytest.mark.parametrize("position", ["inside", "outside", "clamp"])
def test_neither_width_nor_eps_compiles_a_kernel(position, monkeypatch):
    """Of widths with one tile, what Triton takes for the key of compiled code is the same."""
    keys, backend = [], make_backend(GPUTarget("cuda", 90, 32))

    def run(kernel, *arguments, grid, warmup, **options):
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, *key = binder(*arguments, **options)
        keys.append((kernel.__name__, str(key)))

    monkeypatch.setattr(triton.JITFunction, "run", run)
    monkeypatch.setattr(gpu, "platform_of", lambda device: "cuda")  # tensors of the CPU, which nothing reads here
    for n, eps in ((96, 1e-6), (112, 1e-5)):
        variant = Variant(name="", eps=eps, eps_position=position)
        call = resolve("rms_norm", Spec((64, n), "float32"), Spec((n,), "float32"), variant=variant)
        x, scale = torch.ones(64, n), torch.ones(n)
        kept = kernels.kept_on(x.device, call, "float32")
        inverse_rms = kept.forward(True, x, None, scale, None)[2]
        kept.backward((True, True, True), x, None, x, scale, None, inverse_rms)
    first, second = keys[:3], keys[3:]
    assert [name for name, _ in first] == ["forward", "backward", "add_up"]
    assert first == second
