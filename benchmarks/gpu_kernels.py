"""The Triton kernels, compiled for cards that need not be there: the machine code, and what time that predicts.

    python benchmarks/gpu_kernels.py [--width 8192] [--limits]

Needs Triton, which brings an assembler, and no GPU. The first table has a row for each kernel, format, width and
compute capability: registers and bytes of stack of a thread, loads and stores of that stack in the usual path, shared
memory, the widest access in bytes, and instructions an element by pipe (machine_code.py counts them), in the usual path
of forward and in one turn of the loop over rows of backward.

The second table has the time on some cards, in microseconds: that of the pipe that is busy longest, or of memory. It is
a lower bound: every pipe is taken to be busy all the time, and launches, latency, caches and the arithmetic of the sums
of split rows are left out. The third table holds this against measured times. With --limits, only what
tests/gpu/triton_machine_code.py compares is printed, as Python. For capability 12.0 the assembler of Triton 3.6 writes
NOPs, which are counted as issued.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import triton
from gpu_cards import CARDS, EARLIER, LLAMA, MEASURED, MEASURED_CARD, PROCESSORS, Card
from machine_code import Counts, count, instructions, per_element, resources, spills, usual_blocks
from rich.console import Console
from rich.progress import track
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rmsnorm.gpu import triton_backward, triton_forward
from rmsnorm.gpu.plan import Tiles, has_fast_float64, settings, sum_tiles, tiles
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import Variant

POINTERS = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "float64": "*fp64"}
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
SHORT = {"forward": "fwd", "backward": "bwd", "float16": "f16", "bfloat16": "bf16", "float32": "f32"}
WIDTHS = (128, 1024, 8192, 65536)
REGISTERS = 128  # of a thread of backward, so that a program of 16 warps fits
ELEMENTS = 2**27  # of the predictions
CAPABILITIES = (80, 90, 100, 120)  # whose machine code is printed, and held to limits by a test
CODE = {103: 100}  # whose machine code stands for that of another, which Triton's disassembler cannot read

# What a compiler may contract, or what flushes, approximates or rounds in another way than to nearest; and those of
# these instructions that the kernels write on purpose: quotients cut off, and 20 bits from which Newton's steps start.
_LOOSE = (
    r"\b(?:(?:mul|add|sub|fma|div|sqrt|rcp)\.(?!rn\.b?f)[\w.]*f(?:16|32|64)\w*|cvt\.(?!rn\.)r[\w.]*|"
    r"[\w.]*(?:ftz|approx)[\w.]*)"
)
ON_PURPOSE = {
    "fma.rz.f32", "mul.rz.f32", "mul.rz.f64", "cvt.rz.f32.f64", "rsqrt.approx.ftz.f64", "rsqrt.approx.ftz.f32",
}  # fmt: skip

# What the test of the machine code compares: kernel, format, width, arguments of the kernel.
CASES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "forward bf16 8192": ("forward", "bfloat16", 8192, {}),
    "forward bf16 4096": ("forward", "bfloat16", 4096, {}),
    "forward bf16 128": ("forward", "bfloat16", 128, {}),
    "forward bf16 8192 LLaMA": ("forward", "bfloat16", 8192, LLAMA),
    "forward bf16 8192 Gemma": ("forward", "bfloat16", 8192, {"OFFSET": 1.0}),
    "forward bf16 256": ("forward", "bfloat16", 256, {}),
    "forward bf16 72": ("forward", "bfloat16", 72, {}),
    "forward bf16 127": ("forward", "bfloat16", 127, {}),
    "forward bf16 65536": ("forward", "bfloat16", 65536, {}),
    "forward f16 8192": ("forward", "float16", 8192, {}),
    "forward f32 8192": ("forward", "float32", 8192, {}),
    "backward bf16 8192": ("backward", "bfloat16", 8192, {}),
    "backward bf16 256": ("backward", "bfloat16", 256, {}),
    "backward bf16 72": ("backward", "bfloat16", 72, {}),
    "backward bf16 127": ("backward", "bfloat16", 127, {}),
    "backward bf16 16384": ("backward", "bfloat16", 16384, {}),
    "backward bf16 1024": ("backward", "bfloat16", 1024, {}),
    "backward f32 8192": ("backward", "float32", 8192, {}),
}


class Compiled(NamedTuple):
    kernel: str
    dtype: str
    n: int
    capability: int
    tile: Tiles
    registers: int
    stack: int
    spills: int  # instructions in the usual path
    shared: int
    access: int
    counts: Counts  # for an element
    loose: tuple[str, ...]  # instructions that the assembler may contract, or that flush or approximate


def compiled(
    kernel: str, dtype: str, n: int, capability: int = 90, rows: int = 4096, programs: int | None = None, **options: Any
) -> Compiled:
    """A kernel (forward or backward) of rows of n elements, with a gain, compiled; options are arguments of it."""
    tile = tiles(kernel, rows, n)
    tile = tile._replace(programs=programs or tile.programs)
    function = getattr({"forward": triton_forward, "backward": triton_backward}[kernel], kernel)
    made = _compile(function, dtype, n, capability, rows, tile, options)
    cubin, ptx = made.asm["cubin"], made.asm["ptx"]
    registers, stack = resources(cubin)
    has_loop = kernel == "backward" and rows > tile.rows  # over rows; else there is one turn at most
    path = [one for block in usual_blocks(instructions(cubin), has_loop) for one in block.instructions]
    elements = tile.rows * n // tile.chunks
    words = re.findall(r"[ls][dt]\.global(?:\.v(\d))?\.b(\d+)", ptx)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*?\], (0x\w+|\d+)", ptx)
    return Compiled(
        kernel, dtype, n, capability, tile, registers, stack, sum(spills(path)), made.metadata.shared,
        max([int(vector or 1) * int(bits) // 8 for vector, bits in words] + [int(size, 0) for size in copies]),
        per_element(count(path), 32 * tile.warps, elements), loose(ptx),
    )  # fmt: skip


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


def predicted(made: Compiled, rows: int, card: Card) -> tuple[dict[str, float], str]:
    """Seconds of so many rows by what takes them, were each pipe and memory always busy; and what takes longest."""
    elements = rows * made.n
    arrays = 2 if made.kernel == "forward" else 3
    if made.tile.chunks > 1:
        arrays += arrays - 1
    sums = 16 * made.tile.programs * made.n if made.kernel == "backward" else 0
    times = {"mem": (elements * arrays * BYTES[made.dtype] + sums) / card.bandwidth}
    lanes = PROCESSORS[card.capability]
    for pipe in ("issue", "fma", "alu", "fp64", "xu"):
        times[pipe] = elements * getattr(made.counts, pipe) / (getattr(lanes, pipe) * card.processors * card.clock)
    return times, max(times, key=times.__getitem__)


def _table(title: str, *columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def counts_table(done: Iterable[Compiled]) -> Table:
    table = _table("Instructions an element", "", "n", "sm", "tile", "warps", "regs", "stack", "spills", "shared",
                   "access", "issue", "fma", "alu", "fp64", "xu", "mem")  # fmt: skip
    for one in done:
        pipes = (one.counts.issue, one.counts.fma, one.counts.alu, one.counts.fp64, one.counts.xu, one.counts.memory)
        numbers = (one.tile.warps, one.registers, one.stack, one.spills, one.shared, one.access)
        table.add_row(
            f"{SHORT[one.kernel]} {SHORT[one.dtype]}", str(one.n), str(one.capability),
            f"{one.tile.rows}x{one.tile.block}", *map(str, numbers), *(f"{value:.2f}" for value in pipes),
        )  # fmt: skip
    return table


def cards_table(done: Iterable[Compiled]) -> Table:
    """Of kernels compiled for the capabilities of all cards."""
    table = _table("At least, in microseconds, by the model", "", "rows x n", *CARDS)
    rows: dict[tuple[str, str], dict[int, Compiled]] = {}
    for one in done:
        key = f"{SHORT[one.kernel]} {SHORT[one.dtype]}", f"{ELEMENTS // one.n}x{one.n}"
        rows.setdefault(key, {})[one.capability] = one
    for key, by_capability in rows.items():
        cells = []
        for card in CARDS.values():
            made = by_capability[CODE.get(card.capability, card.capability)]
            times, limit = predicted(made, ELEMENTS // made.n, card)
            fits = made.shared <= PROCESSORS[card.capability].shared
            cells.append(f"{1e6 * times[limit]:.0f} {limit}" if fits else "no room")
        table.add_row(*key, *cells)
    return table


def measured_table() -> Table:
    table = _table("Milliseconds on an H200 by the model, and measured", "", "rows x n", "mem", "issue", "fma", "alu",
                   "fp64", "xu", "limit", "measured", "model/measured")  # fmt: skip
    compared = []
    for kernel, dtype, rows, n, milliseconds, options in MEASURED:
        made = compiled(kernel, dtype, n, rows=rows, **options)
        compared.append(("LLaMA" if options == LLAMA else "", made, rows, milliseconds))
    for kernel, dtype, rows, n, milliseconds, programs, counts in EARLIER:
        tile = Tiles(1, n, 1, programs, 0)
        compared.append(("before", Compiled(kernel, dtype, n, 90, tile, 0, 0, 0, 0, 0, counts, ()), rows, milliseconds))
    for note, made, rows, milliseconds in compared:
        times, limit = predicted(made, rows, MEASURED_CARD)
        table.add_row(
            f"{SHORT[made.kernel]} {SHORT[made.dtype]} {note}".rstrip(), f"{rows}x{made.n}",
            *(f"{1e3 * seconds:.4f}" for seconds in times.values()), limit,
            f"{milliseconds:.4f}", f"{1e3 * times[limit] / milliseconds:.2f}",
        )  # fmt: skip
    return table


def print_limits() -> None:
    """Issue slots an element, registers and spills of each case, as tests/gpu/triton_machine_code.py has them."""
    print(f'    "{".".join(triton.__version__.split(".")[:2])}": {{')
    for name, (kernel, dtype, n, options) in _progress(CASES.items()):
        made = (compiled(kernel, dtype, n, capability, FLOAT64=True, **options) for capability in CAPABILITIES)
        numbers = (f"{one.capability}: ({one.counts.issue:.1f}, {one.registers}, {one.spills})" for one in made)
        print(f'        "{name}": {{{", ".join(numbers)}}},')
    print("    },")


def _progress(wanted: Iterable[Any]) -> Iterable[Any]:
    return track(list(wanted), "compiling", console=Console(stderr=True), transient=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--width", type=int, action="append", help=f"elements of a row; repeatable [{WIDTHS}]")
    parser.add_argument("--limits", action="store_true", help="print the table of the test of the machine code")
    arguments = parser.parse_args()
    if arguments.limits:
        return print_limits()
    wanted = [
        (kernel, dtype, n, capability, ELEMENTS // n)
        for kernel in ("forward", "backward") for dtype in ("bfloat16", "float32")
        for n in arguments.width or WIDTHS for capability in sorted(PROCESSORS.keys() - CODE.keys())
    ]  # fmt: skip
    done = [compiled(*one) for one in _progress(wanted)]
    for table in (counts_table(one for one in done if one.capability in CAPABILITIES), cards_table(done),
                  measured_table()):  # fmt: skip
        Console().print(table)


if __name__ == "__main__":
    main()
