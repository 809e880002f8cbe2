"""The Triton kernels against the golden, on a GPU, or else in Triton's interpreter; nightly/test_gpu.py starts that.

python -m pytest tests/kernels/gpu_kernels.py                                                      # with a GPU
RMSNORM_GPU_KERNELS=interpret TRITON_INTERPRET=1 python -m pytest tests/kernels/gpu_kernels.py     # without one
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
import triton

import rmsnorm.gpu
from rmsnorm import engines, numpy_impl
from rmsnorm.gpu import plan, triton_cancelled
from rmsnorm.torch_impl import RMSNorm, gpu, rms_norm, rms_norm_vjp

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinite numbers in the interpreter

DEVICE = "cpu" if rmsnorm.gpu.is_interpreted() else "cuda"
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
VARIANTS = ("llama", "gemma", "paper", "zhang_torch", "x_transformers", "lasagne", "olmo2", "nematus", "mlx")
# The widest rows that a program has in registers, and the rows of a tile: the division of rows of 80 elements.
BRANCHES = {"many": (2**13, 32), "one": (2**13, 1), "split": (64, 1)}
WIDTH, TINY = 80, 2.0**-150
CASES = [("many", list(DTYPES)[i % 3], variant, 1e-6, 1) for i, variant in enumerate(VARIANTS)]
CASES += [
    ("one", "bfloat16", "llama", 0.0, 1), ("one", "float32", "paper", 0.0, 1), ("one", "float16", "gemma", 1e-6, 1),
    ("split", "bfloat16", "llama", 1e-6, 1), ("split", "float32", "zhang_torch", 1e-6, 1),
    ("split", "float16", "paper", 0.0, 1), ("many", "float32", "gemma", 0.0, 1), ("many", "float32", "llama", 1e-6, 1),
    ("many", "bfloat16", "llama", 1e-6, 2), ("one", "float32", "lasagne", 1e-6, 2),  # groups
    ("split", "float16", "gemma", 1e-6, 2), ("many", "float32", "paper", 0.0, 5),
]  # fmt: skip


def tensor(array):
    if array is None:
        return None
    bits = np.ascontiguousarray(array)
    if bits.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(DEVICE)
    return torch.from_numpy(bits).to(DEVICE)


def array(tensor):
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


@pytest.fixture(autouse=True)
def new_plans():
    """A launch has the division of its rows, which some tests change."""
    caches = gpu.launch_of, engines._prepared
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def used(monkeypatch):
    """Which passes the kernels computed."""
    calls = []

    def noted(name, own):
        return lambda *args, **arrays: (calls.append(name), own(*args, **arrays))[1]

    for name in ("forward", "backward"):
        monkeypatch.setattr(gpu, name, noted(name, getattr(gpu, name)))
    return calls


def choose(branch, monkeypatch):
    widest, most_rows = BRANCHES[branch]
    few = {kind: limits._replace(widest=widest, chunk=32) for kind, limits in plan._LIMITS.items()}
    for name, value in {"_LIMITS": few, "_MOST_ROWS": most_rows, "_ALL_AT_ONCE": 2, "_TILES_EACH": 3}.items():
        monkeypatch.setattr(plan, name, value)  # a program has several tiles, too


def same_bits(got, want):
    bits = f"u{want.dtype.itemsize}"
    equal = np.ascontiguousarray(got).view(bits) == np.ascontiguousarray(want).view(bits)
    return equal | (np.isnan(got.astype(float)) & np.isnan(want.astype(float)))


def differing(name, got, want):
    """How many elements of a result are not the golden's. In 16 bits none may be; in float32 they are an ulp away.

    The sums of float32 for the parameters, whose order counts, may be four ulps away; a gradient below float32's
    numbers is a zero of either sign.
    """
    got = array(got)
    wide, right = got.astype(float), want.astype(float)
    equal = same_bits(got, want) | ((np.abs(wide) < TINY) & (np.abs(right) < TINY) & (name not in ("y", "h")))
    near = equal
    if want.dtype == np.float32:
        units = 4 if name in ("dscale", "dbias") else 1
        near = equal | (np.abs(wide - right) <= np.spacing(np.abs(want)) * units)
    assert near.all(), (name, np.argwhere(~near)[:3], got[~near][:3], want[~near][:3])
    return (~equal).sum()


def drawn_rows(random, dtype):
    """A row of each kind: with zeros, the ends of the range, infinity and NaN, too."""
    info, n = ml_dtypes.finfo(dtype), WIDTH
    most, least, normal = (float(a) for a in (info.max, info.smallest_subnormal, info.smallest_normal))
    z, signs, some, one = random.normal(size=n), random.choice([-1, 1], n), random.random(n), random.integers(n)
    inf, nan, spike = z.copy(), z.copy(), np.zeros(n)
    inf[one], nan[one], spike[one] = np.inf * signs[0], np.nan, random.choice([1, 3, 0.1])
    rows = [
        z * 2.0 ** random.integers(-6, 6), z * 2.0 ** random.integers(-22, 22), random.standard_t(1.5, n),
        np.full(n, random.choice([1, 1.5, 3, 5, 0.75]) * 2.0 ** random.integers(-5, 5)), signs,
        2.0 ** random.integers(-8, 8, n) * signs, random.permutation(np.tile([1.0, 7.0], n // 2)),  # rho = 5
        np.tile([3.0, 4.0], n // 2) * signs, random.integers(-3, 4, n), z * 2.0**-130, z * most * 2.0**-8,
        np.where(some < 0.5, z, z * 2.0**-130), 0.0 * signs, inf, nan, random.uniform(-1, 1, n) * most,
        np.where(some < 0.9, 0, z), spike, np.where(some < 0.5, 0.0, least * signs), z * normal * 4,
    ]  # fmt: skip
    return random.permutation(np.stack(rows).astype(dtype))


def drawn_cotangents(random, x):
    """0, x, almost x, orthogonal to x, tiny, short, with few that are not 0, or ordinary."""
    dy, wide = random.normal(size=x.shape), np.nan_to_num(x.astype(float), posinf=1, neginf=-1)
    for row, v in zip(dy, wide, strict=True):
        few = np.where(random.random(WIDTH) < 0.9, 0, row)
        near = v * (1 + 2.0**-7 * random.integers(-1, 2, WIDTH))
        orthogonal = row - v * (row @ v) / (v @ v or 1)
        short = random.integers(-4, 5, WIDTH) / 4
        tiny = row * 2.0 ** random.integers(-120, -20)
        row[:] = (0.0 * row, v, near, orthogonal, tiny, short, few, row, row * 2.0**-9)[random.integers(9)]
    return dy.astype(x.dtype)


def drawn_gain(random, shape, dtype, kind):
    z = random.normal(size=shape)
    special = np.where(random.random(shape) < 0.05, random.choice([0, np.inf, np.nan, -0.0], shape), z)
    gains = 1 + 0.1 * z, random.integers(-32, 33, shape) / 32, special, z * 2.0 ** random.uniform(-30, 45, shape)
    return gains[kind % 4].astype(dtype)


@pytest.mark.parametrize(("branch", "dtype", "variant", "eps", "groups"), CASES)
def test_values_and_gradients_are_the_goldens(branch, dtype, variant, eps, groups, used, monkeypatch):
    """In 16 bits bit for bit, in float32 within an ulp, and bit for bit in all but one element in 100,000."""
    choose(branch, monkeypatch)
    # The interpreter adds pairs one after the other, in Python: a narrower step has fewer such sums at once.
    monkeypatch.setattr(triton_cancelled, "STEP", triton.language.constexpr(64))
    number, kind = CASES.index((branch, dtype, variant, eps, groups)), DTYPES[dtype]
    random = np.random.default_rng(100 + number)
    x = drawn_rows(random, kind)
    dy = drawn_cotangents(random, x)
    residual, dh = random.normal(size=(2, *x.shape)).astype(kind)
    if groups > 1:
        x, residual, dy, dh = (a.reshape(-1, groups, WIDTH) for a in (x, residual, dy, dh))
    parameters = [drawn_gain(random, x.shape[1:], kind, number + i) for i in range(2 if variant == "lasagne" else 1)]
    if number % 3:
        residual = dh = None
    options = {"variant": variant, "eps": eps, "axis": -1, "feature_axis": tuple(range(1, x.ndim))}
    results = numpy_impl.rms_norm(x, *parameters, residual=residual, return_inverse_rms=True, **options)
    dy = dy.astype(results[0].dtype)
    wanted = numpy_impl.rms_norm_vjp(dy if dh is None else (dy, dh), x, *parameters, residual=residual, **options)
    names = [name for name, g in zip(("dx", "dscale", "dbias", "dresidual"), wanted, strict=False) if g is not None]
    wanted = [g for g in wanted if g is not None]

    leaves = [tensor(a).requires_grad_() for a in (x, *parameters)]
    other = None if residual is None else tensor(residual).requires_grad_()
    outputs = rms_norm(*leaves, residual=other, return_inverse_rms=True, **options)
    pulled = tuple(tensor(a) for a in (dy, dh) if a is not None)
    gradients = torch.autograd.grad(outputs[: len(pulled)], [*leaves, *([] if other is None else [other])], pulled)
    assert used == ["forward", "backward"]
    plain = [leaf.detach() for leaf in leaves]
    by_formula = rms_norm_vjp(pulled if dh is not None else pulled[0], *plain, residual=tensor(residual), **options)
    assert used == ["forward", "backward"] * 2
    for name, got, want in [
        *zip(("y", "h", "1 / rho") if len(results) > 2 else ("y", "1 / rho"), outputs, results, strict=True),
        *zip(names, gradients, wanted, strict=True),
        *zip(names, [g for g in by_formula if g is not None], wanted, strict=True),
    ]:
        assert differing(name, got, want) <= (0.02 if name in ("dscale", "dbias") else 1e-5) * want.size, name


@pytest.mark.parametrize(("dtype", "branch", "float64"), [
    ("float16", "many", True), ("bfloat16", "one", False), ("float32", "one", True),
])  # fmt: skip
def test_a_row_whose_norm_is_the_clamp_has_the_slope_of_its_root(dtype, branch, float64, used, monkeypatch):
    choose(branch, monkeypatch)
    monkeypatch.setattr(gpu, "has_fast_float64", lambda capability: float64)
    monkeypatch.setattr(triton_cancelled, "STEP", triton.language.constexpr(64))
    random, x = np.random.default_rng(0), np.zeros((8, 16))
    rows = ([5], [3, -4], [2, 2, 2, 2, 3], [2.5], [10], [0], [4.9375, 0.75], [3, 4.0625])
    for row, start in zip(x, rows, strict=True):
        row[7 : 7 + len(start)] = start
    x, dy = x.astype(DTYPES[dtype]), random.normal(size=x.shape).astype(DTYPES[dtype])
    want = numpy_impl.rms_norm_vjp(dy, x, variant="x_transformers", eps=5.0)[0]
    leaf = tensor(x).requires_grad_()
    (got,) = torch.autograd.grad(rms_norm(leaf, variant="x_transformers", eps=5.0), leaf, tensor(dy))
    assert same_bits(array(got), want).all()
    assert used == ["forward", "backward"]


def assert_bits(x, scale=None, bias=None, *, dy=None, out_dtype=None, **options):
    """y is the golden's, and for a dy dx, too; returns dscale of both."""
    with np.errstate(all="ignore"):
        want = numpy_impl.rms_norm(x, scale, bias, out_dtype=out_dtype, **options)
    given = [tensor(a) for a in (x, scale, bias)]
    assert same_bits(array(rms_norm(*given, out_dtype=out_dtype, **options)), want).all()
    if dy is not None:
        right, got = numpy_impl.rms_norm_vjp(dy, x, scale, **options), rms_norm_vjp(tensor(dy), *given[:2], **options)
        assert same_bits(array(got[0]), right[0]).all()
        return array(got[1]), right[1]
    return None


@pytest.mark.parametrize(("dtype", "half"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
def test_a_number_beside_the_middle_of_two_is_rounded_once(dtype, half):
    """What is nearer to the middle than float32 can say."""
    steps = np.tile([1, 1, 3, 3, -1, -1], 4)
    bias = (steps * half * (1 + np.tile([1, -1], 12) * 2.0**-22)).astype(np.float32)
    assert_bits(np.ones((2, 24), DTYPES[dtype]), None, bias, variant="paper", eps=0.0, out_dtype=dtype)


def test_a_result_has_more_bits_than_x():
    """Pairs of float32: with 1 / rho of 24 bits about every third number would be another one."""
    x = np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float16)
    assert_bits(x, variant="paper", out_dtype="float32")


def test_a_gain_with_an_offset_is_exact():
    """h (1 + w) has more bits than float32: without the last ones, one float16 in about 2^16 would be wrong."""
    random = np.random.default_rng(0)
    x, dy = (random.normal(size=(64, 4096)).astype(np.float16) for _ in range(2))
    assert_bits(x, (0.001 * random.normal(size=4096)).astype(np.float16), dy=dy, variant="gemma")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_gain_that_is_cast_to_the_dtype_of_x_first(dtype, used):
    random = np.random.default_rng(0)
    dy, x = (random.normal(size=(6, WIDTH)).astype(DTYPES[dtype]) for _ in range(2))
    dscale = assert_bits(x, random.normal(size=WIDTH).astype(np.float32), dy=dy, variant="t5x")
    assert used == ["forward", "forward", "backward"]  # the second for 1 / rho
    assert np.allclose(*dscale, rtol=2.0**-22, atol=0)  # a few ulps


@pytest.mark.parametrize("variant", ["llama", "paper", "gemma"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "16 bits"])
def test_parameters_at_the_ends_of_the_range(variant, dtype):
    """Beside x of 16 bits, parameters of float32."""
    random = np.random.default_rng(0)
    x = random.normal(size=(3, 16)).astype(dtype)
    ends = [0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-45, 1e-38, 1, *random.normal(size=6)]
    ends = np.array(ends, np.float32)
    for scale, bias in ((ends, None), (None, ends), (ends, ends[::-1].copy())):
        assert_bits(x, scale, bias, variant=variant)


def test_groups_in_rows_with_a_step():
    """Group i of a row reads the gains from n i on; rows of groups may have a step."""
    whole = torch.randn(6, 5, 24, device=DEVICE)
    scale = torch.randn(3, 24, device=DEVICE, requires_grad=True)
    for x in (whole[:, 1:4], whole[::2, :3], whole[:, ::2], whole[:, :3].flip(0)):
        x = x.detach().requires_grad_()
        want = torch.stack([rms_norm(x[:, i], scale[i], variant="paper") for i in range(3)], 1)
        y = rms_norm(x, scale, variant="paper", axis=-1, feature_axis=(-2, -1))
        assert torch.equal(y, want)
        of_both = (torch.autograd.grad(out, (x, scale), torch.ones_like(y)) for out in (y, want))
        assert all(torch.equal(*pair) for pair in zip(*of_both, strict=True))


def test_what_no_kernel_computes_is_computed(used):
    """A mask, a part of the elements, float64, other axes and no rows: with the same results, but for roundings."""
    layer = RMSNorm(32, variant="llama", device=DEVICE)
    x = torch.randn(5, 32, device=DEVICE)
    want = layer(x)
    for got in (layer(x, mask=torch.ones(5, 32, dtype=torch.bool, device=DEVICE)), rms_norm(x.T, axis=0).T):
        torch.testing.assert_close(got, want, rtol=2.0**-20, atol=0)
    got, wide = rms_norm(x, partial=0.5), rms_norm(x.double(), partial=0.5)
    torch.testing.assert_close(got, wide.float(), rtol=2.0**-20, atol=0)
    assert layer(x[:0]).shape == (0, 32)
    assert used == ["forward"]


def test_sums_have_one_order():
    """The gain's gradient has the same bits in every run."""
    runs = 100 if DEVICE == "cuda" else 2
    x, dy = torch.randn(2, 100, 64, device=DEVICE)
    first = rms_norm_vjp(dy, x, torch.ones(64, device=DEVICE))
    for _ in range(runs):
        assert torch.equal(rms_norm_vjp(dy, x, torch.ones(64, device=DEVICE))[1], first[1])
