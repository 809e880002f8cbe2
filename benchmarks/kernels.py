"""Nanoseconds and bytes an element of each kernel for CPUs, of a copy and of PyTorch's LayerNorm, on one thread.

    python benchmarks/kernels.py --json results/NAME.jsonl    # every level that this processor has: two minutes each
    python benchmarks/kernels.py --show results/NAME.jsonl    # the table of a file again
    python benchmarks/kernels.py --place L1 --seconds 0.1     # seconds

A level is a set of instructions for which the kernels are compiled: v3 has AVX2, v4 has AVX-512. Each level runs in a
process of its own. All arrays of a cell are allocated once and fit into the place that it names: L1, L2 or memory,
where x alone is larger than most third-level caches. LayerNorm allocates its results; the process keeps what it frees,
so that no call waits for new pages.

The time of an element is the difference between a call on all rows and a call on one row, so what a call costs before
its first row is not in it. Each time is the least of many calls, which take turns. The bytes are those that a pass has
to read and write, without the parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from timing.machine import environment

LEVELS = ("v3", "v4", "v4-bf16", "arm64")
WIDTH = {"L1": 512, "L2": 768, "memory": 4096}
ROWS = {"L1": 4, "L2": 32, "memory": 2048}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Arrays of the size of x that a pass reads and writes.
KERNELS = {"forward": 2, "with a residual": 4, "backward": 3}
# The C library keeps what is freed: else LayerNorm alone would pay for new pages in each call.
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "RMSNORM_HUGE_PAGES": "0"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures, a line for each, after one of the machine"
    )
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the table of such a file, and measure nothing")
    parser.add_argument("--level", choices=LEVELS, help="this level alone")
    parser.add_argument("--place", choices=ROWS, help="arrays of this size alone")
    parser.add_argument("--seconds", type=float, default=0.8, help="about how long a cell is measured (%(default)s)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        for record in measured(options.seconds, [options.place] if options.place else list(ROWS)):
            print(json.dumps(record), flush=True)
        return
    if options.show:
        lines = [json.loads(line) for line in options.show.read_text(encoding="utf-8").splitlines()]
        print(title(lines[0]), table(lines[1:]), sep="\n\n")
        return
    first = environment()
    records = []
    for level in [options.level] if options.level else LEVELS:
        records += _of_level(level, options.seconds, options.place)
    if not records:
        raise SystemExit("there are no kernels of this level for this processor, or none are installed")
    print(title(first), table(records), sep="\n\n")
    if options.json:
        options.json.write_text("".join(json.dumps(record) + "\n" for record in (first, *records)), encoding="utf-8")


def _of_level(level: str, seconds: float, place: str | None) -> list[dict[str, Any]]:
    """What a process with the kernels of a level prints; nothing if the processor lacks it."""
    command = [sys.executable, __file__, "--child", "--seconds", str(seconds), *(("--place", place) if place else ())]
    cells = len(KERNELS) * len(BYTES) * (1 if place else len(ROWS))
    own = {**os.environ, **KEPT, "RMSNORM_CPU_LEVEL": level}
    records = []
    with subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            records.append(json.loads(line))
            print(f"{level}: {len(records)} of {cells} cells", end="\r", file=sys.stderr)
    if process.returncode:
        raise SystemExit(f"the measurement of level {level} ended with {process.returncode}")
    if records:
        print(file=sys.stderr)
    return records


def measured(seconds: float, places: list[str]) -> Iterator[dict[str, Any]]:
    """A record for each kernel, format and place; none where there are no kernels of the level that was asked for."""
    import torch

    from rmsnorm import cpu

    if cpu.what_is_missing():
        return
    from rmsnorm.cpu import launch

    torch.set_num_threads(1)
    for kernel in KERNELS:
        for dtype in BYTES:
            for place in places:
                candidates = _candidates(kernel, dtype, ROWS[place], WIDTH[place])
                single = _candidates(kernel, dtype, 1, WIDTH[place])
                times = _least({**candidates, **{f"{name}, one row": call for name, call in single.items()}}, seconds)
                more = (ROWS[place] - 1) * WIDTH[place]
                each = {name: 1e9 * (times[name] - times[f"{name}, one row"]) / more for name in candidates}
                yield {
                    "level": launch.level(), "kernel": kernel, "dtype": dtype, "place": place,
                    "shape": [ROWS[place], WIDTH[place]], "bytes": KERNELS[kernel] * BYTES[dtype],
                    "ns": {name: round(value, 4) for name, value in each.items()},
                }  # fmt: skip


def _candidates(kernel: str, dtype: str, rows: int, width: int) -> dict[str, Callable[[], Any]]:
    """Ours, a copy of as many bytes and, where there is one, LayerNorm's kernel, on one thread."""
    import torch

    from rmsnorm.cpu import launch
    from rmsnorm.specification.call import Spec
    from rmsnorm.specification.resolve import resolve
    from rmsnorm.specification.variants import derive

    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    has_residual = "residual" in kernel
    variant = derive("rms_norm", "torch", 1e-6, None)
    spec, row = Spec((rows, width), dtype), Spec((width,), dtype)
    call = resolve("rms_norm", spec, row, None, variant=variant, residual=spec if has_residual else None)
    native = launch.launch_of(call, dtype, None).native
    arrays = [torch.randn(rows, width).to(kind) for _ in range(KERNELS[kernel])]
    x, results = arrays[0], [torch.empty_like(x) for x in arrays]
    weight, bias = torch.rand(width).to(kind) + 0.5, torch.zeros(width, dtype=kind)
    inverse_rms = torch.empty(rows, dtype=torch.float64)
    dscale = torch.empty(width, dtype=kind)
    keep = (arrays, results, weight, bias, inverse_rms, dscale)
    at, to = ([array.data_ptr() for array in of] for of in (arrays, results))
    step = width * BYTES[dtype]
    alike: dict[str, Any] = {
        "threads": 1, "gomp_parallel": 0, "scale": weight.data_ptr(), "inverse_rms": inverse_rms.data_ptr(),
    }  # fmt: skip
    forward: dict[str, Any] = alike | {
        "x": at[0], "x_step": step, "residual": at[1] if has_residual else None, "bias": None, "y": to[0],
        "h": to[1] if has_residual else None,
    }  # fmt: skip
    native.forward(**forward)
    if kernel.startswith("backward"):
        backward: dict[str, Any] = alike | {
            "h": at[0], "h_step": step, "dy": at[1], "dh": None, "dx": to[0], "dscale": dscale.data_ptr(),
            "dbias": None,
        }  # fmt: skip
        ours = lambda: (native.backward(**backward), keep)  # noqa: E731
    else:
        ours = lambda: (native.forward(**forward), keep)  # noqa: E731
    copied = _copy(arrays, results, KERNELS[kernel])
    candidates: dict[str, Callable[[], Any]] = {"ours": ours, "copy": copied}
    if kernel == "forward":
        candidates["LayerNorm"] = lambda: torch.native_layer_norm(x, (width,), weight, bias, 1e-6)
    elif kernel == "backward":
        _, mean, rstd = torch.native_layer_norm(x, (width,), weight, bias, 1e-6)
        gradients = torch.ops.aten.native_layer_norm_backward
        mask, dy = [True, True, True], arrays[1]
        candidates["LayerNorm"] = lambda: gradients(dy, x, (width,), mean, rstd, weight, bias, mask)
    return candidates


def _copy(arrays: list[Any], results: list[Any], count: int) -> Callable[[], Any]:
    """Reads and writes as many bytes as a pass on ``count`` arrays: a copy is two; a third one is half a copy."""
    import torch

    whole, rest = divmod(count, 2)
    pairs = list(zip(results[:whole], arrays[:whole], strict=True))
    if rest:
        half = arrays[whole].numel() // 2
        pairs.append((results[whole].view(-1)[:half], arrays[whole].view(-1)[:half]))
    copy_ = torch.Tensor.copy_

    def copied() -> None:
        for to, own in pairs:
            copy_(to, own)

    return copied


def _least(candidates: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """The least seconds of a call of each; they take turns of up to 20 calls, at least five."""
    order, rounds = list(candidates), 0
    least = dict.fromkeys(order, float("inf"))
    draw, clock = random.Random(0), time.perf_counter
    ends = clock() + seconds
    while rounds < 5 or clock() < ends:
        draw.shuffle(order)
        for name in order:
            call, stop = candidates[name], clock() + 0.002
            call()  # it brings what the call needs back into the caches
            for _ in range(20):
                start = clock()
                call()
                took = clock() - start
                least[name] = min(least[name], took)
                if start > stop:
                    break
        rounds += 1
    return least


def title(first: dict[str, Any]) -> str:
    return (
        f"{first['processor']}, {first['date'][:10]}, PyTorch {first['versions']['torch']}, one thread; ns an element"
    )


def table(records: list[dict[str, Any]]) -> str:
    """A line for each level, kernel and format; a column for each place: ours, LayerNorm (LN) and a copy."""
    places = list(dict.fromkeys(r["place"] for r in records))
    lines = [["level", "kernel", "dtype", "bytes", *(f"{place}: ours, LN, copy" for place in places)]]
    lines.append(["---"] * len(lines[0]))
    results = {(r["level"], r["kernel"], r["dtype"], r["place"]): r for r in records}
    for level, kernel, dtype in dict.fromkeys(key[:3] for key in results):
        own = [results[level, kernel, dtype, place] for place in places]
        cells = [
            ", ".join(f"{r['ns'][name]:.2f}" if name in r["ns"] else "-" for name in ("ours", "LayerNorm", "copy"))
            for r in own
        ]
        lines.append([level, kernel, dtype, str(own[0]["bytes"]), *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
