"""What the compiler makes of the Triton kernels, for cards that are not there. test_gpu.py runs this."""

from __future__ import annotations

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from triton_compiled import ON_PURPOSE, POINTERS, compiled, compiled_sums, loose

import rmsnorm.gpu
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import Variant
from rmsnorm.torch_impl import gpu, kernels

VERSION = ".".join(triton.__version__.split(".")[:2])


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize(("kernel", "dtype", "n"), [
    *(("forward", "bfloat16", n) for n in (72, 127, 256, 4096, 8192, 65536)), ("forward", "float16", 8192),
    ("forward", "float32", 8192), *(("backward", "bfloat16", n) for n in (72, 127, 1024, 16384)),
    ("backward", "float32", 8192),
])  # fmt: skip
def test_each_division_of_rows_is_machine_code_of_every_card(kernel, dtype, n, capability):
    """Which reads and writes 16 bytes at once where rows allow it."""
    made = compiled(kernel, dtype, n, capability)
    assert made.loose == ()
    assert made.access == 16 or n % 8


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
