"""`rmsnorm.parity.check` on functions: right verdicts, and clear messages."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy_zoo import llama as right

from rmsnorm import PRESETS, Variant, numpy_impl
from rmsnorm.identify import identify
from rmsnorm.numpy_impl import fast
from rmsnorm.parity import check


def test_a_right_function_passes_in_every_dtype() -> None:
    result = check(right, "llama", dtypes=["float32", "float64"])
    assert result.passed
    assert result.text.startswith("numpy_zoo:llama is llama: all ")
    assert {(r.dtype, r.quantity) for r in result.run.records} == {("float32", "y"), ("float64", "y")}
    names = {record.case for record in result.run.records}
    assert {"rows", "odd", "wide", "vector", "zero rows", "gain bf16"} <= names
    assert not names & {"mask", "residual", "bias", "no gain", "channels", "partial 0.3", "huge"}
    assert "huge" in {record.case for record in check(right, "llama", dtypes="float32", extremes=True).run.records}


@pytest.mark.costly
def test_the_text_says_where_and_what_it_is_instead() -> None:
    def wrong(x: Any, weight: Any) -> Any:
        y = right(x, weight)
        if y.size > 3000:
            y[1, 2] = -y[1, 2]
        return y

    result = check(wrong, "llama", dtypes="float32")
    assert str(result) == repr(result) == result.text
    assert not result.passed
    lines = result.text.splitlines()
    assert "wrong is not llama: it is not recognised: " in lines[0]
    failures, records = result.run.failures, result.run.records
    assert f"{len(failures)} of {len(records)} comparisons differ (numpy {np.__version__} on cpu); " in result.text
    data = next(r for r in result.run.failures if r.case == "rows")
    assert data.detail.startswith("at (1, 2) got ")
    full = f"  'rows' f32 y: {data.detail}; parity ratio {data.parity_ratio:.3g}, bound {data.bound:.3g}"
    assert full in result.details.splitlines()
    assert any(line.startswith("  'rows' f32 y: at (1, 2) got ") for line in lines)

    other = check(right, Variant.get("llama").replace(eps=1e-3), dtypes="float32")
    said = other.text.splitlines()
    assert said[:2] == [
        "numpy_zoo:llama is not llama with eps=0.001: eps is 1e-06, llama has 0.001",
        "mend: take eps 0.001",
    ]


@pytest.mark.costly
def test_parameters_follow_the_signature() -> None:
    def bare(x: Any) -> Any:
        return fast.rms_norm(x)

    def with_bias(x: Any, weight: Any, bias: Any) -> Any:
        return fast.rms_norm(x, weight, bias)

    def swapped(x: Any, weight: Any, bias: Any) -> Any:
        return fast.rms_norm(x, bias, weight)

    def with_residual(x: Any, weight: Any, residual: Any = None) -> Any:
        return fast.rms_norm(x, weight, residual=residual)

    options: Any = {"framework": "numpy", "dtypes": "float32"}
    assert check(bare, **options).passed
    assert check(with_bias, **options).passed
    assert not check(swapped, **options).passed
    result = check(with_residual, **options)
    assert result.passed, result.text
    assert "residual" in {record.case for record in result.run.records}
    for second, words in (
        (lambda x, h: x, "the second result is another f32[16, 48], expected x + residual, f32[16, 48]"),
        (lambda x, h: h.astype("float64"), "the second result is another f64[16, 48], expected x + residual, f32"),
        (lambda x, h: None, "it returns a tuple of 2 whose second entry is None, expected numpy.ndarray"),
    ):

        def wrong_sum(x: Any, weight: Any, residual: Any = None, second: Any = second) -> Any:
            y = fast.rms_norm(x, weight, residual=residual)
            return y if residual is None else (y[0], second(x, y[1]))

        result = check(wrong_sum, **options)
        assert not result.passed
        assert words in result.text
    result = check(fast.rms_norm, extremes=True, **options)
    assert result.passed, result.text
    assert {"mask", "huge", "residual"} <= {record.case for record in result.run.records}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.sample(2)
def test_the_golden_is_every_preset(preset: str) -> None:
    """With every option that a case can pass to a function; every second one in 16 bits."""

    dtype = [["bfloat16"], ["float32"]][list(PRESETS).index(preset) % 2]

    def golden(x: Any, weight: Any, bias: Any, mask: Any = None, residual: Any = None) -> Any:
        return fast.rms_norm(x, weight, bias, variant=preset, mask=mask, residual=residual)

    result = check(golden, preset, framework="numpy", dtypes=dtype, extremes=True)
    assert result.passed, result.text


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(ValueError, match=r"check: dtype is 'float8', expected 'float16', 'bfloat16', 'float32' or"):
        check(right, dtypes="float8")
    with pytest.raises(ValueError, match=r"check: variant is 'lama', expected .*did you mean 'llama'\?"):
        check(right, "lama")
    with pytest.raises(ValueError, match="no_such_module cannot be imported"):
        check("no_such_module:norm")
    with pytest.raises(ValueError, match=r"check: dtype is None, expected 'float16', 'bfloat16', 'float32' or"):
        check(right, dtypes=[])


@pytest.mark.costly
@pytest.mark.usefixtures("few_circumstances")
def test_a_function_in_bfloat16_must_have_the_right_bits() -> None:
    """One that rounds after the gain is not llama, although hardly any element is two ulps off."""
    assert check(right, "llama", dtypes="bfloat16", framework="numpy").passed

    def once(x: Any, weight: Any) -> Any:
        y = numpy_impl.rms_norm(x, weight, variant="standard")
        return y if x.dtype == weight.dtype else y.astype(np.promote_types(x.dtype, weight.dtype))

    result = check(once, "llama", dtypes="bfloat16", framework="numpy")
    assert not result.passed
    rows = next(r for r in result.run.failures if (r.case, r.quantity) == ("rows", "y"))
    assert rows.parity_ratio <= rows.bound
    assert rows.bit_identical < rows.identical_bound
    assert np.dtype(ml_dtypes.bfloat16).name == rows.dtype


def doubled_after(first: Any) -> Any:
    """The mistake starts with the second call."""
    calls: list[int] = []

    def norm(x: Any, weight: Any) -> Any:
        calls.append(1)
        return right(x, weight) * (2 if len(calls) > first else 1)

    return norm


def dense(x: Any) -> Any:
    """What a kernel reads that ignores strides."""
    return np.lib.stride_tricks.as_strided(x, x.shape, np.empty(x.shape, x.dtype).strides)


def clipped(x: Any, weight: Any, limit: float) -> Any:
    largest = limit * np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True) + 1e-6)
    return np.where(np.abs(x) > largest, np.sign(x) * weight * limit, right(x, weight)).astype(x.dtype)


def raises(x: Any, weight: Any) -> Any:
    raise RuntimeError("out of luck")


def in_place(x: Any, weight: Any) -> Any:
    y = right(x, weight)
    x[...] = 0
    return y


BLIND_SPOTS: dict[str, tuple[Any, str]] = {
    "factor beyond two axes": (lambda x, weight: right(x, weight) * (1.1 if x.ndim > 2 else 1), "'odd' f32 y: at ("),
    "factor on five axes": (lambda x, weight: right(x, weight) * (1.1 if x.ndim == 5 else 1), "'tall' f32 y: at ("),
    "strides ignored": (
        lambda x, weight: right(dense(x), weight),
        "circumstances, each with 'every second element', 'a slice' or 'transposed'",
    ),
    "strides of the rows ignored": (
        lambda x, weight: right(x if x.strides[-1] > x.itemsize else dense(x), weight),
        "'zero rows' f32 y: at (",
    ),
    "clipped at 4.5": (lambda x, weight: clipped(x, weight, 4.5), "'rows' f32 y: at ("),
    "clipped at 120": (lambda x, weight: clipped(x, weight, 120.0), "'wide' f32 y: at ("),
    "row of an outlier doubled": (
        lambda x, weight: np.where(
            x[..., :1] > 3 * np.sqrt(np.mean(x * x, axis=-1, keepdims=True)), 2 * right(x, weight), right(x, weight)
        ),
        "'rows' f32 y: at (",
    ),
    "tuple": (lambda x, weight: (right(x, weight), None), "it returns a tuple of 2, expected numpy.ndarray"),
    "nothing": (lambda x, weight: None, "it returns None, expected numpy.ndarray"),
    "another array": (lambda x, weight: memoryview(right(x, weight)), "it returns a memoryview"),
    "state": (doubled_after(1), "'odd' f32 y: at ("),
    "error": (raises, "raised on x f32[48, 96], scale f32[96]: RuntimeError: out of luck"),
    "shape": (lambda x, weight: right(x, weight)[..., 1:], "f32[48, 95] for x f32[48, 96], expected the shape of x"),
    "input": (in_place, "inputs written to: x"),
    "dtype": (lambda x, weight: right(x, weight).astype(np.float64), "got f64[48, 96], want f32[48, 96]"),
}


@pytest.mark.parametrize("name", BLIND_SPOTS)
def test_blind_spots(name: str) -> None:
    """Each fails, in a dozen lines; a wrong return type is one comparison and not one for each case."""
    function, words = BLIND_SPOTS[name]
    result = check(lambda x, weight: function(x, weight), "llama", framework="numpy", dtypes="float32")
    assert not result.passed
    assert words in result.text
    assert "parity ratio inf" not in result.text
    said = re.sub(r"(?m)^(edge|not compared): .*(\n    .*)*\n", "", result.text)
    assert len(said.splitlines()) <= 12
    assert len(result.run.records) == 1 or "returns" not in result.text
    assert len(result.details.splitlines()) > len(result.run.failures)


@pytest.mark.costly
@pytest.mark.parametrize("backward", [False, True])
def test_a_write_is_blamed_on_the_call_that_wrote(backward: bool) -> None:
    """To x of one element alone, or to its dy: the other cases hold, and this one is not refused."""
    torch = pytest.importorskip("torch")

    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            return dy.detach().mul_(-1).neg() if dy.numel() == 1 else dy

    def norm(x: Any) -> Any:
        y = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], eps=1e-6).to(x.dtype)
        if x.numel() == 1 and not backward:
            x.detach().zero_()
        return Writes.apply(y) if backward else y

    result = check(norm, "standard", dtypes="float32")
    wrong = {(record.case, record.detail) for record in result.run.failures}
    assert wrong == {("one element", "inputs written to: dy" if backward else "inputs written to: x")}
    assert not [skip for skip in result.run.skipped if skip.edge]
    assert "it writes to its arguments" not in result.text, "as no row of identify is of one element"


def test_an_error_on_the_target_begins_with_what_was_called() -> None:
    for ask, name in ((check, "check"), (identify, "identify")):
        with pytest.raises(ValueError, match=f"^{name}: no_such cannot be imported "):
            ask("no_such:norm")
        with pytest.raises(ValueError, match=f"^{name}: framework is 'caffe', expected "):
            ask(right, framework="caffe")
