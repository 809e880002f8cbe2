"""Norms of NumPy, right and wrong: what `check` says of each, and of the ways in which it calls them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy_zoo as zoo
import pytest
from zoo_row import Row

from rmsnorm import PRESETS, Variant, numpy_impl
from rmsnorm.identify import identify
from rmsnorm.numpy_impl import fast
from rmsnorm.parity import check, report

few = pytest.mark.usefixtures("few_circumstances")
TWO = "it returns a tuple of 2"


def right(norm: Any, asked: str = "standard", **more: Any) -> Row:
    return Row(norm, asked, **more)


def wrong(norm: Any, *says: str, asked: str = "llama", **more: Any) -> Row:
    return Row(norm, asked, "y", says=says, defects=None, **more)


def named(norm: Any, *says: str) -> Row:
    return wrong(norm, *says, asked="standard", is_named=True, check={"dtypes": "float16"})


# fmt: off
ROWS = {
    "no gain": right(zoo.no_gain),
    "a bias": right(lambda x, weight, bias: fast.rms_norm(x, weight, bias)),
    "weight and bias swapped": wrong(lambda x, weight, bias: fast.rms_norm(x, bias, weight), asked="standard"),
    "every option and extreme": right(
        fast.rms_norm, has={"mask", "huge", "residual"}, check={"extremes": True},
    ),
    "another sum of the same dtype": wrong(
        zoo.another_sum(lambda x, h: x), "the second result is another float32 of shape",
        asked="standard",
    ),
    "a sum of another dtype": wrong(
        zoo.another_sum(lambda x, h: h.astype("float64")),
        "the second result is another float64 of shape", asked="standard",
    ),
    "no sum": wrong(
        zoo.another_sum(lambda x, h: None), f"{TWO} whose second entry is None, expected numpy.ndarray",
        asked="standard",
    ),
    # what is named
    "n - 1": named(zoo.over_n_minus_1, "the sum of squares is divided by n - 1 = 63"),
    "the bias is not applied": named(lambda x, weight, bias: zoo.standard(x, weight), "the bias is not applied"),
    "1 / rho in 16 bits": named(
        zoo.inverse_in_16_bits, "for float16 x, 1 / rho is rounded to float16 before the product with x"),
    "n - 1 and 1 + gain": named(
        lambda x, weight: zoo.over_n_minus_1(x, weight, 1.0),
        "the sum of squares is divided by n - 1 = 63", "scale_offset is 1.0, standard has 0.0"),
    "only wide": wrong(
        lambda x, weight: zoo.standard(x, weight) * (2 if x.shape[-1] > 5000 else 1),
        " is not standard: it agrees on the rows that identify tries, and not in ",
        asked="standard",
    ),
    "in parts": wrong(
        zoo.halves, "it agrees on the rows that identify tries, in groups of 32, and not in ", asked="standard"),
    # options
    "mask ignored": wrong(lambda x, weight, mask=None: zoo.standard(x, weight), asked="standard", only={"mask"}),
    "n for the count": wrong(zoo.where_masked(of_all=True), asked="standard", only={"mask"}),
    "eps outside beside a mask": wrong(zoo.where_masked(eps_outside=True), asked="standard", only={"mask"}),
    "residual ignored": wrong(
        lambda x, weight, residual=None: zoo.standard(x, weight), asked="standard", only={"residual"}),
    "gate ignored": wrong(lambda x, weight, gate=None: zoo.standard(x, weight), asked="standard", only={"gate"}),
    "mask ignored beside a residual": wrong(zoo.no_mask_beside_residual, asked="standard", only={"mask", "residual"}),
    "gate ignored beside a mask": wrong(zoo.no_gate_beside_mask, asked="standard", only={"gate", "mask"}),
    "mask ignored beside both": wrong(zoo.two_of_three, asked="standard", only={"gate", "mask", "residual"}),
    "no answer without a gate": wrong(zoo.one_column_without_a_gate, asked="standard"),
    # edges
    "nothing for no rows": wrong(
        zoo.where(lambda x: not x.size, lambda y: None), "it returns None, expected numpy.ndarray", asked="standard",
        only={"no rows"}),
    "the shape of one element": wrong(
        zoo.where(lambda x: x.shape[-1] == 1, lambda y: y[..., None]), asked="standard", only={"rows of 1"}),
    "another dtype of very wide rows": wrong(
        zoo.where(lambda x: x.shape[-1] == 66001, lambda y: y.astype(np.float64)), asked="standard",
        only={"rows of 66001"}),
    # memory, results, state
    "strides of the rows ignored": wrong(
        lambda x, weight: zoo.llama(x if x.strides[-1] > x.itemsize else zoo.dense(x), weight)),
    "tuple": wrong(lambda x, weight: (zoo.llama(x, weight), None), f"{TWO}, expected numpy.ndarray"),
    "nothing": wrong(lambda x, weight: None, "it returns None, expected numpy.ndarray"),
    "another array": wrong(lambda x, weight: memoryview(zoo.llama(x, weight)), "it returns a memoryview"),
    "state": wrong(zoo.doubled_after(1)),
    "error": wrong(zoo.out_of_luck, "RuntimeError: out of luck"),
    "shape": wrong(lambda x, weight: zoo.llama(x, weight)[..., 1:],
                   ", expected the shape of x"),
    "input": wrong(zoo.in_place, "inputs written to: x"),
    "dtype": wrong(lambda x, weight: zoo.llama(x, weight).astype(np.float64), "got f64["),
}
OF_MEMORY = {  # which an eighth of the circumstances does not show
    "strides ignored": wrong(lambda x, weight: zoo.llama(zoo.dense(x), weight),
                             "circumstances, each with 'every second element', 'a slice' or 'transposed'"),
    "the memory of a mask": wrong(zoo.dense_mask, asked="standard", only={"mask"}),
}
# fmt: on
OF_OPTIONS = [name for name, row in ROWS.items() if {*re.findall("mask|residual|gate", " ".join(row.only or ()))}]


@few
@pytest.mark.parametrize("name", ROWS)
def test_what_check_says(name: str) -> None:
    """A wrong return type is one comparison and not one for each case, and a report has a dozen lines."""
    row = ROWS[name]
    result = row.hold("numpy", "float32")
    assert result is not None
    if name == "only wide":
        assert re.search(r" \d+ of \d+ circumstances(, each with 'rows of \d+')?$", result.text.splitlines()[0])
    if row.asked == "llama":
        assert "parity ratio inf" not in result.text
        said = re.sub(r"(?m)^(edge|not compared): .*(\n    .*)*\n", "", result.text)
        assert len(said.splitlines()) <= 12
        assert len(result.run.records) == 1 or "returns" not in result.text
        assert len(result.details.splitlines()) > len(result.run.failures)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_MEMORY)
def test_what_some_circumstances_show(name: str) -> None:
    OF_MEMORY[name].hold("numpy", "float32")


@few
@pytest.mark.slow
@pytest.mark.parametrize("name", OF_OPTIONS)
def test_a_wrong_option_is_in_the_cases_with_it(name: str) -> None:
    ROWS[name]._replace(check={"dtypes": ("float16", "bfloat16")}).hold("numpy")


@few
def test_a_right_function_passes() -> None:
    result = check(zoo.llama, "llama", dtypes=["float32", "float64"])
    assert result.passed
    assert result.text.startswith("numpy_zoo:llama is llama: all ")
    assert {(r.dtype, r.quantity) for r in result.run.records} == {("float32", "y"), ("float64", "y")}


@few
def test_the_text_says_where_and_what_it_is_instead() -> None:
    def wrong(x: Any, weight: Any) -> Any:
        y = zoo.llama(x, weight)
        if y.ndim == 2 and len(y) > 1 and y.size > 3000:
            y[1, 2] = -y[1, 2]
        return y

    result = check(wrong, "llama", dtypes="float32")
    assert str(result) == repr(result) == result.text
    lines, failures, records = result.text.splitlines(), result.run.failures, result.run.records
    assert "y of row 1 is another one" in lines[0]
    assert f"{len(failures)} of {len(records)} comparisons differ (numpy {np.__version__} on cpu), in " in result.text
    data = failures[0]
    assert data.detail.startswith("at (1, 2) got ")
    full = f"  {data.case!r} f32 y: {data.detail}; parity ratio {data.parity_ratio:.3g}, bound {data.bound:.3g}"
    assert full in result.details.splitlines()
    assert "f32 y: at (1, 2) got " in " ".join(result.text.split())
    other = check(zoo.llama, Variant.get("llama").replace(eps=1e-3), dtypes="float32")
    assert other.text.splitlines()[:2] == [
        "numpy_zoo:llama is not llama with eps=0.001: eps is 1e-06, llama has 0.001",
        "mend: take eps 0.001",
    ]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_golden_is_every_preset(preset: str, request: pytest.FixtureRequest) -> None:
    """With every option that a case can pass to a function; every second one in 16 bits, two in all circumstances."""
    if preset not in ("llama", "zhang_tf"):
        request.getfixturevalue("few_circumstances")

    def golden(x: Any, weight: Any, bias: Any, mask: Any = None, residual: Any = None) -> Any:
        return fast.rms_norm(x, weight, bias, variant=preset, mask=mask, residual=residual)

    dtype = ["bfloat16", "float32"][list(PRESETS).index(preset) % 2]
    result = check(golden, preset, framework="numpy", dtypes=dtype, extremes=True)
    assert result.passed, result.text


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        (zoo.llama, {"dtypes": "float8"}, r"check: dtype is 'float8', expected 'float16', 'bfloat16', 'float32' or"),
        (zoo.llama, {"variant": "lama"}, r"check: variant is 'lama', expected .*did you mean 'llama'\?"),
        (zoo.llama, {"dtypes": []}, r"check: dtype is None, expected 'float16', 'bfloat16', 'float32' or"),
        (zoo.llama, {"framework": "caffe"}, "^check: framework is 'caffe', expected "),
        ("no_such:norm", {}, "^check: no_such cannot be imported "),
    ],
)
def test_what_cannot_be_asked_is_refused(target: Any, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(target, **options)
    if not {"dtypes", "variant"} & {*options}:
        with pytest.raises(ValueError, match=words.replace("check", "identify")):
            identify(target, **options)


@few
@pytest.mark.slow
def test_a_function_in_bfloat16_must_have_the_right_bits() -> None:
    """One that rounds after the gain is not llama, although hardly any element is two ulps off."""

    def once(x: Any, weight: Any) -> Any:
        y = numpy_impl.rms_norm(x, weight, variant="standard")
        return y if x.dtype == weight.dtype else y.astype(np.promote_types(x.dtype, weight.dtype))

    assert check(zoo.llama, "llama", dtypes="bfloat16", framework="numpy").passed
    failures = check(once, "llama", dtypes="bfloat16", framework="numpy").run.failures
    assert any(failure.parity_ratio <= failure.bound for failure in failures), "only the ends of a rounding see it"


@pytest.mark.slow
def test_right_options_hold_and_the_report_counts_them(tmp_path: Path) -> None:
    result = check(zoo.options, framework="numpy")
    assert result.passed, result.text
    counts = report.options(result.run)  # of cases and of circumstances
    assert list(counts) == ["gate", "mask", "residual"]
    for dtype in ("float16", "bfloat16", "float32"):
        of_one = [record for record in result.run.records if record.dtype == dtype]
        assert min(report.options(replace(result.run, records=of_one)).values()) > 1
    line = next(line for line in result.text.splitlines() if line.startswith("options: "))
    start = f"options: of {len(result.run.records)} comparisons {counts['gate']} with a gate, "
    assert line.startswith(start)
    report.write_json([result.run], tmp_path / "a.json")
    (backend,) = json.loads((tmp_path / "a.json").read_text())["backends"]
    assert backend["options"] == counts
