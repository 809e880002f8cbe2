"""What the compiler makes of the Triton kernels, for cards that are not there. test_triton.py runs this."""

from __future__ import annotations

import pytest
import torch
import triton
from gpu_kernels import CARDS, POINTERS, compiled, compiled_sums, predicted
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from rmsnorm.specification.call import Spec, resolve
from rmsnorm.specification.variants import Variant
from rmsnorm.torch_impl import gpu

# kernel, dtype, n, capability; the most registers that may not fit, in bytes
ONE = 8  # one number, written before the loop over tiles and read behind it
CASES = [
    ("forward", "bfloat16", 128, 90, 0),
    ("forward", "float32", 16384, 80, 0),
    ("backward", "bfloat16", 4096, 90, ONE),
    ("backward", "float32", 768, 100, 0),
    ("backward", "bfloat16", 8192, 90, 256),
    ("forward", "bfloat16", 65536, 90, 0),
]
MOST_FLOAT64 = {"forward": 3, "backward": 8}  # operations an element: the sums, and the conversions for them
MOST_32_BITS = {"forward": 23, "backward": 44}


@pytest.mark.parametrize(("kernel", "dtype", "n", "capability", "spilled"), CASES)
def test_what_the_compiler_makes_of_a_kernel(kernel, dtype, n, capability, spilled):
    """Machine code is all that a machine without a GPU can know of a kernel's speed."""
    made = compiled(kernel, dtype, n, capability)
    assert made.spilled <= spilled
    assert made.loose == ()
    assert made.access == 16
    assert made.reads == {"forward": 1, "backward": 2}[kernel] + (made.tile.rows == 1)
    assert made.float64 <= MOST_FLOAT64[kernel]
    assert made.float32 <= MOST_32_BITS[kernel]


SINGLE, SUMS = POINTERS["float32"], POINTERS["float64"]
MIXED = {"scale": SINGLE, "bias": SINGLE, "PRODUCT": "float32", "RESULT": "float32", "y": SINGLE}
OPTIONS = [  # each branch of a kernel, which the interpreter does not compile
    ("forward", "float16", 80, {"NORM": "float16", "bias": POINTERS["float16"]}),
    ("forward", "bfloat16", 80, {"residual": POINTERS["bfloat16"], "h_out": POINTERS["bfloat16"], "OFFSET": 1.0}),
    ("forward", "bfloat16", 80, {"NORM": "bfloat16", **MIXED}),
    ("forward", "float16", 80, {"POSITION": "outside", "OFFSET": 1.0, **MIXED}),
    ("forward", "float32", 80, {"POSITION": "clamp", "scale": None, "NORM": "float32", "k": 1}),
    ("forward", "float32", 1, {"rows": 1}),
    ("forward", "bfloat16", 64, {"groups": 8}),
    ("forward", "bfloat16", 80, {"mask": "*u8", "mask_step": 80, "mask_stride": 1}),
    ("forward", "float16", 80, {"mask": "*u8", "NORM": "float16", "POSITION": "clamp"}),
    ("backward", "bfloat16", 80, {"dh": POINTERS["bfloat16"], "dbias": SUMS, "dy": SINGLE, "scale": SINGLE}),
    ("backward", "float16", 80, {"POSITION": "outside", "OFFSET": 1.0, "k": 40}),
    ("backward", "float32", 80, {"POSITION": "clamp", "scale": None, "dscale": None, "k": 1}),
    ("backward", "float32", 1, {"rows": 1}),
    ("backward", "bfloat16", 80, {"rows": 1, "mask": "*u8"}),
    ("backward", "bfloat16", 64, {"groups": 8}),
    ("backward", "bfloat16", 80, {"mask": "*u8", "mask_step": 80, "mask_stride": 1}),
    ("backward", "float32", 80, {"mask": "*u8", "scale": None, "dscale": None, "POSITION": "clamp"}),
]


@pytest.mark.parametrize(("kernel", "dtype", "n", "options"), OPTIONS)
def test_every_branch_is_machine_code(kernel, dtype, n, options):
    assert compiled(kernel, dtype, n, **options).spilled <= ONE


@pytest.mark.parametrize(
    ("dtype", "n", "options"),
    [("float32", 65536, {}), ("bfloat16", 40000, {"OFFSET": 1.0, "groups": 3, "mask": "*u8"})],
)
def test_the_kernels_that_add_up_are_machine_code(dtype, n, options):
    assert all(made.asm["cubin"] for made in compiled_sums(dtype, n, **options))


@pytest.mark.parametrize("position", ["inside", "outside", "clamp"])
def test_neither_width_nor_eps_compiles_a_kernel(position, monkeypatch):
    """Of widths with one tile, what Triton takes for the key of compiled code is the same."""
    keys, backend = [], make_backend(GPUTarget("cuda", 90, 32))

    def run(kernel, *arguments, grid, warmup, **options):
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, *key = binder(*arguments, **options)
        keys.append((kernel.__name__, str(key)))

    monkeypatch.setattr(triton.JITFunction, "run", run)
    for n, eps in ((96, 1e-6), (112, 1e-5)):
        variant = Variant(name="", eps=eps, eps_position=position)
        call = resolve("rms_norm", Spec((64, n), "float32"), Spec((n,), "float32"), variant=variant)
        plan = gpu.plan(call, "float32", None)
        x, scale = torch.ones(64, n), torch.ones(n)
        inverse_rms = gpu.forward(plan, x, None, scale, None, None)[2]
        gpu.backward(plan, x, x, scale, None, None, inverse_rms, None)
    first, second = keys[:3], keys[3:]
    assert [name for name, _ in first] == ["forward", "backward", "add_up"]
    assert first == second


def test_the_model_of_time_knows_what_limits_a_kernel():
    made = compiled("backward", "bfloat16", 4096)
    time, limit = predicted(made, 2**15, CARDS["RTX 4090"])
    assert limit == "float64"  # which that card has for each 64 of float32
    assert time == pytest.approx(2**27 * made.float64 / CARDS["RTX 4090"].float64)
    assert predicted(made, 2**15, CARDS["H100 SXM"])[1] == "memory"
