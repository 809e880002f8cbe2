"""What a norm costs where users meet it: a training step and a decoded word of a Transformer.

A worker (``python -m rmsnorm.bench.model NAME ...``) writes one JSON object a line, as rmsnorm.bench.run does.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from rmsnorm.bench.backends import open_backend
from rmsnorm.bench.candidates import BUILTIN, LAYER_NORM, OURS, Call
from rmsnorm.bench.measure import alternate, used_by_others
from rmsnorm.bench.models import MODES, Sizes
from rmsnorm.bench.run import limit
from rmsnorm.dtypes import unit_roundoff
from rmsnorm.processes import end_with_parent

Step = Callable[[str, str, Sizes, str, str], Call]  # of op, norm, sizes, dtype, mode


def allowed(sizes: Sizes, dtype: str) -> float:
    """How far the results of two models with the same norm may be apart, divided by the largest.

    What a block adds is rounded about eight times: by two norms, by the matrices, by attention and by the sums. The
    roundings of two models add up. A model with another norm is hundreds of times as far away in float32.
    """
    return 2 * (8 * sizes.layers + 2) * unit_roundoff(dtype)


def measure(
    step: Step, op: str, sizes: Sizes, dtype: str, mode: str, norms: Sequence[str], seconds: float
) -> list[dict[str, Any]]:
    """One record for each norm. The result of ours is compared with the built-in layer's, if both are asked for."""
    records, calls, results = [], {}, {}
    for norm in norms:
        record: dict[str, Any] = {
            "op": op, "shape": list(sizes), "dtype": dtype, "candidate": f"{norm} {mode}", "ours": norm == OURS,
            "mode": mode, "norm": norm, "status": "timed", "detail": "",
        }  # fmt: skip
        try:
            call = step(op, norm, sizes, dtype, mode)
            call()
            results[norm] = np.asarray(call(), dtype=np.float64)  # after a step of training, with its gradients
            calls[norm] = call
        except Exception as error:  # the report names what a framework raised
            record["status"], record["detail"] = "failed", f"{type(error).__name__}: {error}".splitlines()[0]
        records.append(record)
    if {OURS, BUILTIN} <= results.keys():
        want = results[BUILTIN]
        distance = float(np.max(np.abs(results[OURS] - want)) / np.max(np.abs(want)))
        ours = records[norms.index(OURS)]
        ours["error"] = distance if math.isfinite(distance) else None
        if not distance <= allowed(sizes, dtype):
            ours["status"], ours["detail"] = "wrong", f"{distance:.2g} away from the model with the built-in layer"
            del calls[OURS]
    others = used_by_others()
    timings = alternate(calls, seconds=seconds)
    busy = others()
    for record in records:
        timing = timings.get(record["norm"])
        record["timing"], record["others"] = asdict(timing) if timing else None, None if math.isnan(busy) else busy
        for name, other in (("speedup", BUILTIN), ("layer_norm_speedup", LAYER_NORM)):
            compared = timings.get(other) if record["norm"] != other else None
            record[name] = compared.median / timing.median if timing and compared else None
    return records


def worker_command(
    backend: str,
    sizes: Sizes,
    *,
    ops: Sequence[str],
    dtypes: Sequence[str],
    modes: Sequence[str],
    norms: Sequence[str],
    seconds: float,
    threads: int | None,
) -> list[str]:
    options = {
        "sizes": sizes, "ops": ops, "dtypes": dtypes, "modes": modes, "norms": norms, "seconds": seconds,
        "threads": threads,
    }  # fmt: skip
    return [sys.executable, "-m", "rmsnorm.bench.model", backend, json.dumps(options)]


def _step(backend: str) -> Step:
    if backend == "torch":
        from rmsnorm.bench.models import torch

        return torch.step
    if backend == "flax":
        from rmsnorm.bench.models import flax

        return flax.step
    from rmsnorm.bench.models import keras

    return keras.step


def work(backend: str, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        workbench = open_backend(backend, "cpu")
    except ModuleNotFoundError as missing:
        yield {"status": "absent", "message": str(missing)}
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield {"hello": workbench.version, "device": workbench.device, "cores": cores}
    sizes, step = Sizes(*options["sizes"]), _step(backend)
    for dtype in options["dtypes"]:
        for mode in (mode for mode in MODES[backend] if mode in options["modes"]):
            for op in options["ops"]:
                yield {"records": measure(step, op, sizes, dtype, mode, options["norms"], options["seconds"])}
    yield {"status": "done"}


def main() -> None:
    end_with_parent()
    options = json.loads(sys.argv[2])
    if options["threads"]:
        limit(options["threads"])
    for message in work(sys.argv[1], options):
        print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
