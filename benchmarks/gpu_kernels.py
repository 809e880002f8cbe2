"""The Triton kernels, compiled for cards that need not be there: the machine code, and what time that predicts.

    python benchmarks/gpu_kernels.py

Needs Triton, which brings an assembler, and no GPU. The first table has a row for each kernel, format and division of
rows: registers of a thread, bytes of them that did not fit (spilled), shared memory, the widest access in bytes, and
arithmetic operations an element in float64 and in 32 bits, conversions included. The second table holds what a kernel
has to move and to compute against the rates of some cards: the time that the slowest of these takes. It is a lower
bound, no measurement.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rmsnorm.gpu import triton_backward, triton_forward
from rmsnorm.gpu.plan import ADD_UP, Tiles, settings, tiles
from rmsnorm.parity import screen
from rmsnorm.specification.call import Spec, resolve
from rmsnorm.specification.variants import Variant

POINTERS = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "float64": "*fp64"}
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
WIDTHS = (64, 128, 768, 1024, 4096, 8192, 16384, 65536)


_LOOSE = r"\b(?:(?:mul|add|sub|fma|div|sqrt|rcp)\.(?!rn\.f)[\w.]*f(?:32|64)|[\w.]*(?:ftz|approx)[\w.]*)"


class Card(NamedTuple):
    """Rates a second, from the makers' data sheets: bytes from memory, and operations, of which an FMA is one."""

    bandwidth: float
    float32: float
    float64: float


CARDS = {
    "RTX 4090": Card(1.008e12, 41.3e12, 0.645e12),  # Ada whitepaper: 82.6 and 1.29 TFLOPS
    "A100 80GB": Card(2.039e12, 9.75e12, 4.85e12),  # A100 datasheet, SXM: 19.5 and 9.7 TFLOPS
    "H100 SXM": Card(3.35e12, 33.5e12, 17e12),  # H100 datasheet: 67 and 34 TFLOPS
    "H200": Card(4.8e12, 33.5e12, 17e12),  # H200 datasheet: 67 and 34 TFLOPS
}


class Compiled(NamedTuple):
    kernel: str
    dtype: str
    n: int
    capability: int
    tile: Tiles
    registers: int
    spilled: int
    shared: int
    access: int
    float64: int
    float32: int
    reads: int  # of an element: x, or h and dy; also the gain, if a tile is one row
    loose: tuple[str, ...]  # instructions that the assembler may contract, or that flush or approximate


def compiled(kernel: str, dtype: str, n: int, capability: int = 90, rows: int = 4096, **options: Any) -> Compiled:
    """A kernel (forward or backward) of rows of n elements, with a gain, compiled; options are arguments of it."""
    tile = tiles(kernel, rows, n)
    function = {"forward": triton_forward.forward, "backward": triton_backward.backward}[kernel]
    made = _compile(function, dtype, n, capability, rows, tile, options)
    registers, spilled = _resources(made.asm["cubin"])
    tile_text = f"{tile.rows}x{tile.block}x"
    usual = "\n".join(_usual_lines(made.asm["ttir"]))
    wide = re.findall(r"[ls][dt]\.global(?:\.v(\d))?\.b(\d+)", made.asm["ptx"])
    return Compiled(
        kernel, dtype, n, capability, tile, registers, spilled, made.metadata.shared,
        max(int(vector or 1) * int(bits) // 8 for vector, bits in wide),
        _operations(usual, tile_text + "f64"), _operations(usual, f"{tile_text}(?:f32|i32|f16|bf16)"),
        len(re.findall(rf"= tt\.load .*tensor<{tile_text}!tt.ptr", usual)),
        tuple(sorted(set(re.findall(_LOOSE, made.asm["ptx"])))),
    )  # fmt: skip


def compiled_sums(dtype: str, n: int, capability: int = 90, rows: int = 4096, **options: Any) -> list[Any]:
    """The kernels that add up: parts of a row, forward and backward, and what programs have summed for the gain."""
    forward, backward = tiles("forward", rows, n), tiles("backward", rows, n)
    return [
        _compile(triton_forward.sum_parts, dtype, n, capability, rows, forward, options),
        _compile(triton_backward.sum_parts, dtype, n, capability, rows, backward, options),
        _compile(triton_backward.add_up, dtype, n, capability, rows, ADD_UP, options),
        _compile(triton_backward.add_up, dtype, n, capability, rows, ADD_UP, {**options, "second": POINTERS[dtype]}),
    ]


def _compile(function: Any, dtype: str, n: int, capability: int, rows: int, tile: Tiles, options: Any) -> Any:
    """With the arguments that torch_impl/gpu.py passes, specialised as Triton does it: a 1 is a constant.

    Options are arguments by their names: POSITION, OFFSET, NORM, PRODUCT and RESULT are of the call.
    """
    own, parts = POINTERS[dtype], POINTERS["float64"] if tile.chunks > 1 else None
    values: dict[str, Any] = {
        "x": own, "residual": None, "scale": own, "bias": None, "parts": parts, "y": own, "h_out": None,
        "inverse_rms": POINTERS["float64"], "h": own, "dy": own, "dh": None, "dx": own,
        "dscale": POINTERS["float64"], "dbias": None,
        "rows": rows, "n": n, "k": None, "groups": None, "x_step": n, "h_step": n, "CHUNKS": tile.chunks,
        "mask": None, "mask_step": 0, "mask_stride": 0, "PROGRAMS": tile.programs,
        "sums": POINTERS["float64"], "total": own, "second": None, "programs": tile.programs,
    }  # fmt: skip
    values |= options
    variant = Variant(
        name="", eps=1e-6, eps_position=options.get("POSITION", "inside"), scale_offset=options.get("OFFSET", 0.0)
    )
    call = replace(
        resolve("rms_norm", Spec((rows, n), dtype), variant=variant), norm=options.get("NORM"),
        product=options.get("PRODUCT", dtype), result=options.get("RESULT", dtype),
    )  # fmt: skip
    names = {pointer: name for name, pointer in POINTERS.items()}
    formats = ("total", "second") if tile is ADD_UP else ("scale", "bias")
    chosen = settings(function.__name__, call, tile, tuple(names.get(values[name]) for name in formats))
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
    return triton.compile(source, target=target, options=chosen.options)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    if match is None:
        raise ValueError(f"cuobjdump printed {usage.stdout!r}, not the registers")
    return int(match[1]), int(match[2])


def _usual_lines(text: str) -> Iterator[str]:
    """The lines of a kernel outside of the branch for special rows, which is the one with a barrier."""
    lines = text.splitlines()
    barrier = next(i for i, line in enumerate(lines) if "barrier" in line)
    start = next(i for i in range(barrier, 0, -1) if "scf.if" in lines[i])
    depth = 0
    for end in range(start, len(lines)):
        depth += lines[end].count("{") - lines[end].count("}")
        if depth == 0:
            break
    yield from lines[:start]
    yield from lines[end + 1 :]


def _operations(text: str, tensor: str) -> int:
    """Operations of arithmetic whose result or operand is such a tensor, and sums of it, without comparisons."""
    arithmetic = r"(?:arith\.(?!constant|cmp|select|extui|ori|andi|xori)\w+|math\.\w+)"
    sums = len(re.findall(rf"\(tensor<{tensor}>\) -> ", text)) if tensor.endswith("f64") else 0
    return sums + len(re.findall(rf"= {arithmetic} .*tensor<{tensor}>", text))


def predicted(made: Compiled, rows: int, card: Card) -> tuple[float, str]:
    """Seconds for so many rows, at least, and what limits them."""
    elements = rows * made.n
    arrays = 2 if made.kernel == "forward" else 3
    if made.tile.chunks > 1:
        arrays += arrays - 1
    sums = 16 * made.tile.programs * made.n if made.kernel == "backward" else 0
    times = {
        "memory": (elements * arrays * BYTES[made.dtype] + sums) / card.bandwidth,
        "float32": elements * made.float32 / card.float32,
        "float64": elements * made.float64 / card.float64,
    }
    limit = max(times, key=times.__getitem__)
    return times[limit], limit


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--width", type=int, action="append", help=f"elements of a row; repeatable [{WIDTHS}]")
    parser.add_argument(
        "--capability", type=int, action="append", help="of the card, such as 90; repeatable [80 90 100]"
    )
    arguments = parser.parse_args()
    widths, capabilities = arguments.width or WIDTHS, arguments.capability or (80, 90, 100)
    wanted = [
        (kernel, dtype, n, capability)
        for kernel in ("forward", "backward") for dtype in ("bfloat16", "float32")
        for n in widths for capability in capabilities
    ]  # fmt: skip
    done = [compiled(*one) for one in track(wanted, "compiling", console=Console(stderr=True), transient=True)]
    table = Table("kernel", "dtype", "n", "capability", "tile", "warps", "registers", "spilled", "shared", "access",
                  "float64", "32 bits", box=None)  # fmt: skip
    for one in done:
        tile = f"{one.tile.rows} x {one.tile.block}" + (f", {one.tile.chunks} a row" if one.tile.chunks > 1 else "")
        numbers = (one.tile.warps, one.registers, one.spilled, one.shared, one.access, one.float64, one.float32)
        table.add_row(one.kernel, one.dtype, str(one.n), str(one.capability), tile, *map(str, numbers))
    screen.console().print(table)
    rows = 2**27
    predictions = Table(
        "kernel", "dtype", "rows", "n", *CARDS, box=None, title="At least, in milliseconds, by the model"
    )
    for one in done:
        if one.capability == capabilities[-1]:
            cells = (predicted(one, rows // one.n, card) for card in CARDS.values())
            predictions.add_row(
                one.kernel, one.dtype, str(rows // one.n), str(one.n),
                *(f"{1e3 * time:.2f} {limit}" for time, limit in cells),
            )  # fmt: skip
    screen.console().print(predictions)


if __name__ == "__main__":
    main()
