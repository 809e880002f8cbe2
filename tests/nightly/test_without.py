"""Without what rmsnorm asks of a framework in private, or under an older name, the results are the same.

``python test_without.py torch NAME ...``: each name is away while rmsnorm is imported, as it would be in a version
without it; one that older versions have elsewhere is put there. It prints what differs from the golden.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import calls
import frameworks
import numpy as np
import pytest
import transforms
from programs import printed

from rmsnorm.parity.judge import compare

MISSING = {
    "torch": (
        "_C._are_functorch_transforms_active", "_C._is_tracing", "_C._len_torch_dispatch_stack",
        "_C._dynamo.guards._empty_strided_cpu", "_C._dynamo.eval_frame._FrameExecStrategy", "compiler.is_exporting",
        "_prims_common.suggest_memory_format", "Tensor._is_zerotensor", "autograd.forward_ad._current_level",
        "_subclasses",
    ),
    "tf": (
        "python.eager.record.could_possibly_record", "python.eager.record.record_operation",
        "python.eager.forwardprop_util.pack_tangents", "python.ops.control_flow_util.GraphOrParentsInXlaContext",
        "python.framework.ops.EagerTensor",
    ),
    "flax": ("enable_x64", "typeof", "interpreters.mlir.ShardingContext"),
}  # fmt: skip
PACKAGES = {"torch": "torch", "tf": "tensorflow", "flax": "jax"}
ELSEWHERE = {"enable_x64": "experimental.enable_x64", "typeof": "core.get_aval"}  # of older versions of JAX
WAYS = {"torch": ("torch", "torch.func", "aot_eager"), "tf": ("tf", "graph", "XLA"), "flax": ("flax", "jit")}
ROWS = (  # the first one in every way
    {"variant": "llama", "x": "bfloat16", "bias": "bias"},
    {"variant": "zhang_torch", "x": "float32", "gate": "silu after", "partial": "0.3"},
    {"variant": "standard", "x": "float32", "mask": "mask", "residual": "before"},
)


def owner_of(package: str, name: str) -> tuple[Any, str]:
    """The module or class of a name, and the name in it."""
    *path, last = name.split(".")
    owner, at = importlib.import_module(package), package
    for part in path:
        at = f"{at}.{part}"
        try:
            owner = importlib.import_module(at)
        except ModuleNotFoundError:
            owner = getattr(owner, part)
    return owner, last


@contextmanager
def without(key: str, names: list[str]) -> Iterator[None]:
    with ExitStack() as patches:
        for name in names:
            owner, last = owner_of(PACKAGES[key], name)
            if not hasattr(owner, last):
                continue  # this version lacks it
            own = getattr(owner, last)
            if name in ELSEWHERE:
                setattr(*owner_of(PACKAGES[key], ELSEWHERE[name]), own)
            patches.callback(setattr, owner, last, own)
            if isinstance(vars(owner).get(last), type(sys)):  # a module, which an import would find again
                patches.callback(sys.modules.__setitem__, own.__name__, own)
                sys.modules[own.__name__] = None  # type: ignore[assignment]
            if key == "torch":
                setattr(owner, last, None)
            else:
                delattr(owner, last)
        yield


def failures(key: str) -> list[str]:
    """What differs from the golden: calls in every way, and each transform of the framework."""
    found = []
    for way in WAYS[key]:
        for row in ROWS if way == key else ROWS[:1]:
            data, expected = calls.asked(row)
            judged = compare(frameworks.way(way).outcome(data), expected)
            found += [f"{row} in {way}: {one.quantity} {one.detail}" for one in judged
                      if not one.passed and one.detail != "not computed"]  # fmt: skip
    kind, random = transforms.KINDS[key](), np.random.default_rng(0)
    for name in (*kind.derivatives, *kind.others):
        row = {"variant": "standard", "x": "float32", "layout": "small", "bias": "bias"}
        try:
            transforms.compared(kind, row, [kind.derivatives[0], name], random)
        except AssertionError as error:
            found.append(f"{name}: {error}")
    return found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("framework", [
    "torch", "tf", pytest.param("flax", marks=pytest.mark.needs("jax>=0.8", "older ones lack some of the names")),
])  # fmt: skip
def test_without_all_of_it_or_one(framework: str) -> None:
    pytest.importorskip(PACKAGES[framework])
    for names in (MISSING[framework], *([name] for name in MISSING[framework])):
        said = printed("-W", "ignore", __file__, framework, *names, timeout=400, JAX_PLATFORMS="cpu")
        assert json.loads(said.splitlines()[-1]) == [], names


if __name__ == "__main__":
    key, *missing = sys.argv[1:]
    with without(key, missing):
        importlib.import_module(f"rmsnorm.{key}_impl.private")
    print(json.dumps(failures(key)))
