"""How the kernels divide an array between the programs of a GPU: from its shape alone, not from the card.

So every card adds in the same order, and gives the same bits in every run. A program is what GPUs call a block of
threads. It computes a tile of some rows by ``block`` elements in registers, and then the next one:

    rows     n up to                   elements of a tile    of a thread
    several  128, a multiple of 8      4096; 2048            16; 8, as backward keeps sums
    several  1024; 512                 1024; 512             32; 16, of one warp
    one      16384; backward 8192      a row, in registers   32; 16, or 8 up to 1024
    split    more                      8192                  as with one; programs share a row: one kernel adds up,
                                                             the next reads x again

Source of the sizes: times on an H200 (docs/performance.md) and, from 256 to 512 and for widths that 8 does not divide,
the machine code: where eight warps share few rows, or elements are read one by one, the compiler gives each thread
elements of many rows, and computes 1 / rho for all of them.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from rmsnorm.specification import environment
from rmsnorm.specification.call import Call


class _Limits(NamedTuple):
    a_thread: int  # elements of a row that a thread has in registers, where the threads suffice
    widest: int  # elements of a row that a program has in registers
    chunk: int  # elements of a tile where a row is wider
    fewest_warps: int  # of a program with one row that one warp does not compute
    a_warp: int  # elements of a tile that one warp computes
    a_warp_one_by_one: int  # where 8 does not divide the width, so elements are not read in words of 16 bytes
    narrow: int  # elements of a tile of several rows, which eight warps compute


_LIMITS: Final = {
    "forward": _Limits(32, 2**14, 2**13, 1, 2**10, 2**10, 2**12),
    "backward": _Limits(16, 2**13, 2**13, 4, 2**9, 2**8, 2**11),
}
_WARP: Final = 32  # threads
_NARROW: Final = 2**7  # elements of a row that shares a tile of several warps
_NARROW_WARPS: Final = 8
_MOST_ROWS: Final = 32  # of a tile
# Programs of the backward pass: enough for several on each processor of the largest card, and so few that their sums
# of the gain's gradient, 8 bytes an element to write and to read, are a small part of what is read and written.
_PROGRAMS: Final = ((2**7, 264), (2**9, 1056), (2**11, 528), (2**12, 264), (2**20, 132))
# Bytes of shared memory that tiles which are read ahead may take: every card has them. Of float32 more were slower.
_SHARED: Final = 2**16, 2**14
_ALL_AT_ONCE: Final = 64  # tiles of rows, which have a program each: there is nothing to save
_TILES_EACH: Final = 8  # of a program that computes several


class Tiles(NamedTuple):
    """The division of rows of n elements.

    Attributes:
        rows: rows of a tile.
        block: elements of a row in a tile, a power of two.
        chunks: tiles in a row; more than one if the row is split.
        programs: programs that share the rows of a group; one computes tiles i, i + programs, i + 2 programs ...
        warps: of 32 threads, in a program.
    """

    rows: int
    block: int
    chunks: int
    programs: int
    warps: int


OPTIONS: Final[dict[str, Any]] = {"enable_fp_fusion": False}  # of the compiler: the arithmetic is as it is written
_FAST: Final = {80, 90, 100}  # compute capabilities of cards with half as many units for float64 as for float32
_SUMS: Final = 2**11  # of a tile of add_up
_SUM_PROGRAMS: Final = 2**7  # of add_up, where the width allows them: as many as the largest card has processors


def tiles(kind: str, rows: int, n: int, groups: int = 1) -> Tiles:
    """The division for a kind of pass, forward or backward, of rows that have so many groups of n elements.

    A program has one group of its rows: so the gains of a tile are one row, and the sums for them have n elements.

    Example:
        >>> tiles("forward", 4096, 128)
        Tiles(rows=32, block=128, chunks=1, programs=128, warps=8)
        >>> tiles("backward", 4096, 4096)
        Tiles(rows=1, block=4096, chunks=1, programs=264, warps=8)
        >>> tiles("forward", 64, 262144).chunks
        32
        >>> tiles("backward", 4096, 128, groups=32).programs
        9
    """
    limits = _LIMITS[kind]
    whole = power_of_two(n)
    block = whole if whole <= limits.widest else limits.chunk
    is_read_in_words = n % 8 == 0
    is_shared = block <= _NARROW and is_read_in_words
    if is_shared:
        rows_each = limits.narrow // block
        warps = _NARROW_WARPS * min(_MOST_ROWS, rows_each) * block // limits.narrow
    else:
        a_warp = limits.a_warp if is_read_in_words else limits.a_warp_one_by_one
        rows_each, warps = a_warp // block, block // (limits.a_thread * _WARP)
        if block > limits.a_warp:
            warps = max(limits.fewest_warps, warps)
    rows_each, warps = max(1, min(_MOST_ROWS, rows_each)), max(1, warps)
    tiles_of_rows = -(-rows // rows_each)
    programs = tiles_of_rows
    every = tiles_of_rows * groups
    if kind == "backward" and every > _ALL_AT_ONCE:
        most = next(number for width, number in _PROGRAMS if block <= width and (is_shared or width > _NARROW))
        programs = -(-min(most, max(_ALL_AT_ONCE, every // _TILES_EACH)) // groups)
    return Tiles(rows_each, block, -(-n // block), programs, warps)


def sum_tiles(width: int) -> Tiles:
    """The division of what programs have summed, of rows of so many elements: a row is what a program summed.

    Example:
        >>> sum_tiles(768)
        Tiles(rows=256, block=8, chunks=96, programs=1, warps=4)
    """
    block = min(64, max(8, power_of_two(width) // _SUM_PROGRAMS))
    return Tiles(_SUMS // block, block, -(-width // block), 1, 4)


def has_fast_float64(capability: int) -> bool:
    """Whether float64 costs little on a card, of compute capability 90 for 9.0. Others compute 1/64 as fast in it."""
    wanted = environment.read("RMSNORM_GPU_FP64")
    return capability in _FAST if wanted is None else wanted == "1"


def way(call: Call, scale: str | None, bias: str | None, float64: bool = True) -> str:
    """The way of the forward pass, with parameters of these dtypes: see triton_forward."""
    if call.x_dtype == "float32":
        return "wide"
    is_one_format = call.x_dtype == call.result_dtype and (
        not call.norm_dtype or (call.product_dtype == call.x_dtype and scale in (None, call.x_dtype))
    )
    has_one_way = (
        bias is None
        and not (call.norm_dtype and call.variant.scale_offset)
        and scale in (None, call.x_dtype, "float32")
    )
    if not float64:
        has_one_way = has_one_way and scale in (None, call.x_dtype) and not call.variant.scale_offset
    return "cut" if is_one_format and has_one_way and call.n <= _LIMITS["forward"].widest else "pairs"


class Settings(NamedTuple):
    """How a kernel is compiled, and what it takes beside arrays and sizes.

    Attributes:
        arguments: by their names; a kernel takes those that it has.
        options: of the compiler, by their names.
    """

    arguments: dict[str, Any]
    options: dict[str, Any]


def settings(
    kernel: str, call: Call, tile: Tiles, formats: tuple[str | None, ...] = (None, None), float64: bool = True,
    step: int = 0,
) -> Settings:  # fmt: skip
    """The settings of a kernel: forward, backward, the sum_parts of either, or add_up, of ``sum_tiles``.

    ``formats``: the dtypes of scale and bias for forward, those of its one or two totals for add_up.
    ``float64``: of the card, see ``has_fast_float64``. x of 32 bits is computed in float64 on every card.
    ``step``: from one row of x to the next, if there is a gap between them.

    Example:
        >>> from rmsnorm.specification.call import Spec
        >>> from rmsnorm.specification.resolve import resolve
        >>> from rmsnorm.specification.variants import Variant
        >>> call = resolve("rms_norm", Spec((64, 128), "float16"), variant=Variant.get("standard"))
        >>> settings("add_up", call, sum_tiles(8192), ("float16", None)).arguments
        {'FORMAT': 'float16', 'SECOND': None, 'ROWS': 32, 'BLOCK': 64}
    """
    options: dict[str, Any] = {"num_warps": tile.warps, **OPTIONS}
    division = {"ROWS": tile.rows, "BLOCK": tile.block}
    if kernel == "add_up":
        return Settings({"FORMAT": formats[0], "SECOND": formats[1], **division}, options)
    float64 = float64 or call.x_dtype == "float32"
    arguments: dict[str, Any] = {
        "eps": float(call.eps), "share": 1 / call.k, "POSITION": call.variant.eps_position,
        "OFFSET": call.variant.scale_offset, "FORMAT": call.x_dtype, **division, "FLOAT64": float64,
    }  # fmt: skip
    if kernel in ("forward", "backward"):
        arguments["EIGHTS"] = call.n % 16 == 8 and step % 8 == 0
    if kernel == "forward":
        roundings = {"NORM": call.norm_dtype or "", "PRODUCT": call.product_dtype, "RESULT": call.result_dtype}
        scale, bias = formats
        arguments |= {**roundings, "WAY": way(call, scale, bias, float64)}
    elif kernel == "backward":
        read_ahead = (
            4 * tile.rows * tile.block * (4 if call.x_dtype == "float32" else 2)
        )  # bytes of h and dy, of two tiles
        is_ahead = tile.chunks == 1 and read_ahead <= _SHARED[call.x_dtype == "float32"]
        arguments["STAGES"] = 3 if is_ahead else 1
        options["maxnreg"] = 128  # registers of a thread, so that an SM has two programs of eight warps
    return Settings(arguments, options)


def power_of_two(n: int) -> int:
    """The smallest one that is not below n, and not below 16: a tile with fewer elements has idle threads."""
    return max(16, 1 << (n - 1).bit_length())
