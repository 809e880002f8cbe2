"""What the compiler makes of the Triton kernels, for cards that are not there. test_triton.py runs this."""

from __future__ import annotations

import pytest
import torch
import triton
from gpu_cards import CARDS, PROCESSORS
from gpu_kernels import CASES, ON_PURPOSE, POINTERS, compiled, compiled_sums, loose, predicted
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from rmsnorm.specification.call import Spec, resolve
from rmsnorm.specification.variants import Variant
from rmsnorm.torch_impl import gpu

ONE = 8  # one number, written before the loop over tiles and read behind it
# Issue slots an element, registers, and spills in the usual path, by version of Triton, case and compute capability.
# `benchmarks/gpu_kernels.py --limits` prints the table of the Triton that runs it.
COUNTED = {
#TABLE
}
MORE = 1.1  # than was counted: what an edit of a kernel may cost


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(len(CASES))
def test_what_the_compiler_makes_of_a_kernel(case):
    """Machine code is all that a machine without a GPU can know of a kernel's speed."""
    version = ".".join(triton.__version__.split(".")[:2])
    assert version in COUNTED, f"add what gpu_kernels.py --limits prints with Triton {version}"
    kernel, dtype, n, options = CASES[case]
    for capability, most in COUNTED[version][case].items():
        made = compiled(kernel, dtype, n, capability, **options)
        assert made.loose == ()
        assert made.counts.unknown == ()
        assert made.access == 16
        assert (made.counts.issue, made.registers, made.spills) <= tuple(MORE * number for number in most)


def test_only_what_is_written_on_purpose_may_be_loose():
    for harmless in ("fma.rn.f32", "fma.rn.bf16x2", "mul.rn.f64", "add.s32", "cvt.rn.bf16x2.f32", *ON_PURPOSE):
        assert loose(f"\t{harmless} %r1, %r2;") == ()
    for wrong in ("mul.f32", "add.f16x2", "fma.rz.f64", "cvt.rz.f16.f32", "cvt.rn.ftz.f32.f16", "div.full.f32",
                  "rsqrt.approx.f64", "add.rz.f32", "sqrt.approx.f32"):  # fmt: skip
        assert loose(f"\t{wrong} %r1, %r2;") == (wrong,)


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
    ("backward", "bfloat16", 64, {"groups": 8}),
    ("backward", "bfloat16", 80, {"mask": "*u8", "mask_step": 80, "mask_stride": 1}),
    ("backward", "float32", 80, {"mask": "*u8", "scale": None, "dscale": None, "POSITION": "clamp"}),
]


@pytest.mark.parametrize(("kernel", "dtype", "n", "options"), OPTIONS)
def test_every_branch_is_machine_code(kernel, dtype, n, options):
    made = compiled(kernel, dtype, n, **options)
    assert made.spills == 0
    assert made.loose == ()


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
    made, rows = compiled("backward", "bfloat16", 4096), 2**15
    card = CARDS["RTX 4090"]
    times, limit = predicted(made, rows, card)
    assert limit == "fp64"  # of which that card has 2 lanes
    assert times["fp64"] == pytest.approx(rows * 4096 * made.counts.fp64 / (2 * card.processors * card.clock))
    assert times["mem"] == pytest.approx((rows * 4096 * 3 * 2 + 16 * made.tile.programs * 4096) / card.bandwidth)
    assert predicted(made, rows, CARDS["H100 SXM"])[1] == "mem"
    assert {card.capability for card in CARDS.values()} == set(PROCESSORS)
