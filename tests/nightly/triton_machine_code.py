"""What the compiler makes of the Triton kernels, for cards that are not there. test_gpu.py runs this."""

from __future__ import annotations

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from triton_compiled import CASES, ON_PURPOSE, POINTERS, compiled, compiled_sums, loose

import rmsnorm.gpu
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import Variant
from rmsnorm.torch_impl import gpu, kernels

# Spills in a turn of the loop, of which a thread computes eight elements; 13 were counted for rows of one float32, and
# for bfloat16 beside dy and a gain of float32.
FEW = 13
# Issue slots an element, registers, and spills in the usual path, by version of Triton, case and compute capability.
# `python tests/nightly/triton_compiled.py` prints the table of the Triton that runs it.
COUNTED = {
    "3.9": {
        "forward bf16 8192": {80: (18.7, 64, 0), 90: (19.1, 64, 0), 100: (18.9, 64, 0), 120: (19.2, 64, 0)},
        "forward bf16 4096": {80: (18.6, 64, 0), 90: (19.4, 56, 0), 100: (18.8, 56, 0), 120: (19.4, 56, 0)},
        "forward bf16 128": {80: (26.2, 48, 0), 90: (28.3, 40, 0), 100: (27.8, 40, 0), 120: (28.4, 46, 0)},
        "forward bf16 8192 LLaMA": {80: (16.7, 64, 0), 90: (17.1, 66, 0), 100: (16.8, 66, 0), 120: (17.2, 68, 0)},
        "forward bf16 8192 Gemma": {80: (22.1, 64, 0), 90: (22.2, 72, 0), 100: (21.9, 72, 0), 120: (22.3, 70, 0)},
        "forward bf16 256": {80: (23.5, 90, 0), 90: (24.2, 72, 0), 100: (23.5, 72, 0), 120: (23.9, 74, 0)},
        "forward bf16 72": {80: (48.6, 40, 0), 90: (51.0, 40, 0), 100: (49.9, 40, 0), 120: (49.6, 58, 0)},
        "forward bf16 127": {80: (40.3, 125, 0), 90: (41.4, 128, 0), 100: (40.5, 128, 0), 120: (41.2, 127, 0)},
        "forward bf16 65536": {80: (36.5, 78, 0), 90: (34.6, 101, 0), 100: (30.1, 100, 0), 120: (35.4, 103, 0)},
        "forward f16 8192": {80: (16.0, 64, 0), 90: (16.4, 64, 0), 100: (15.9, 64, 0), 120: (16.2, 63, 0)},
        "forward f32 8192": {80: (13.5, 128, 0), 90: (13.9, 112, 0), 100: (13.9, 112, 0), 120: (13.8, 116, 0)},
        "backward bf16 8192": {80: (34.1, 128, 2), 90: (33.0, 128, 2), 100: (32.1, 128, 3), 120: (32.5, 128, 2)},
        "backward bf16 256": {80: (37.1, 128, 34), 90: (37.7, 128, 36), 100: (36.8, 128, 36), 120: (37.8, 128, 36)},
        "backward bf16 72": {80: (64.7, 128, 0), 90: (64.2, 128, 0), 100: (62.7, 128, 0), 120: (63.8, 119, 0)},
        "backward bf16 127": {80: (62.9, 128, 21), 90: (64.4, 128, 1), 100: (62.2, 128, 10), 120: (58.1, 128, 7)},
        "backward bf16 16384": {80: (29.7, 128, 2), 90: (29.1, 128, 15), 100: (28.9, 128, 12), 120: (28.4, 128, 6)},
        "backward bf16 1024": {80: (39.1, 128, 0), 90: (38.4, 128, 0), 100: (37.8, 128, 0), 120: (38.2, 128, 0)},
        "backward f32 8192": {80: (28.8, 128, 2), 90: (27.8, 128, 7), 100: (27.2, 128, 10), 120: (27.8, 128, 5)},
    }
}
VERSION = ".".join(triton.__version__.split(".")[:2])
MORE = 1.1  # than was counted: what an edit of a kernel may cost


@pytest.mark.parametrize("case", CASES)
def test_what_the_compiler_makes_of_a_kernel(case):
    """Machine code is all that a machine without a GPU can know of a kernel's speed."""
    assert VERSION in COUNTED, f"add what triton_compiled.py prints with Triton {VERSION}"
    kernel, dtype, n, options = CASES[case]
    for capability, most in COUNTED[VERSION][case].items():
        made = compiled(kernel, dtype, n, capability, FLOAT64=True, **options)
        assert made.loose == ()
        assert made.access == 16 or n % 8
        numbers = made.issue, made.registers, made.spills
        for number, counted in zip(numbers, most, strict=True):
            assert number <= MORE * counted, (capability, numbers, most)


@pytest.mark.parametrize("capability", [89, 120])
@pytest.mark.parametrize(("kernel", "issue", "fp64"), [("forward", 34, 0.1), ("backward", 78, 0.2)])
def test_cards_with_slow_float64_compute_little_in_it(kernel, issue, fp64, capability):
    """An SM issues 128 lanes a clock, of which 2 may be float64: so 0.2 of these take as long as 13 others."""
    made = compiled(kernel, "bfloat16", 8192, capability)
    assert made.issue <= issue
    assert made.fp64 <= fp64


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
@pytest.mark.parametrize(("kernel", "dtype", "n", "options"), OPTIONS)
def test_every_branch_is_machine_code(kernel, dtype, n, options, float64):
    made = compiled(kernel, dtype, n, FLOAT64=float64, **options)
    # The oldest flushes subnormal numbers in tl.div_rn, which divides numbers of a row: none is, or the row is special.
    if tuple(map(int, VERSION.split("."))) > rmsnorm.gpu._OLDEST:
        assert made.spills <= FEW
        assert made.loose == ()


@pytest.mark.parametrize(
    ("dtype", "n", "options"), [("float32", 65536, {}), ("bfloat16", 40000, {"OFFSET": 1.0, "groups": 3})]
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
