"""compare: two norms, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import rmsnorm

import rmsnorm as package
from rmsnorm.parity.design import levels_of
from rmsnorm.parity.pair import compare

pytestmark = pytest.mark.usefixtures("few_circumstances")
F32: dict[str, Any] = {"framework": "numpy", "dtypes": "float32"}


def once(x: Any, weight: Any) -> Any:
    """As a kernel that multiplies by 1 / rho, with one rounding."""
    wide = x.astype(np.float32)
    inverse = np.float32(1) / np.sqrt((wide * wide).mean(-1, keepdims=True) + np.float32(1e-6))
    return (wide * inverse * weight.astype(np.float32)).astype(x.dtype)


def before(x: Any, weight: Any) -> Any:
    """With a rounding before the gain."""
    y = once(x, np.ones(x.shape[-1:], np.float32)).astype(np.float32) * weight.astype(np.float32)
    return y.astype(x.dtype)


def divided(x: Any, weight: Any) -> Any:
    """With another order of operations, which is as right."""
    wide = x.astype(np.float32)
    rho = np.sqrt((wide * wide).mean(-1, keepdims=True) + np.float32(1e-6))
    return (wide / rho * weight.astype(np.float32)).astype(x.dtype)


def exact(x: Any, weight: Any) -> Any:
    wide = x.astype(np.float64)
    inverse = 1 / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
    return (wide * inverse * weight.astype(np.float64)).astype(x.dtype)


def ordered(x: Any, weight: Any) -> Any:
    """A sum whose order depends on the number of rows."""
    return once(x, weight) if x.size > x.shape[-1] else divided(x, weight)


def wide_rows(x: Any, weight: Any) -> Any:
    return once(x, weight) * (2 if x.shape[-1] > 1024 else 1)


def of_matrices(x: Any, weight: Any) -> Any:
    if x.ndim != 2:
        raise ValueError("two axes, please")
    return once(x, weight)


def test_one_function_has_its_own_bits() -> None:
    pair = package.compare(once, once, "standard", **F32)
    assert (pair.is_same, pair.both_right, {*pair.elements}) == (True, True, {"y"})
    assert pair.text.startswith(f"A and B have the same bits in all of {len(pair.calls)} calls")
    assert pair.text.endswith("B is within the intervals of standard in these calls")


def test_another_rounding_is_named_and_is_in_16_bits_alone() -> None:
    pair = compare(once, before, framework="numpy", dtypes=("bfloat16", "float32"))
    assert (pair.is_same, pair.right) == (False, [True, False])
    assert "bfloat16" in {entry.dtype for entry in pair.differences}
    assert "they differ in rounding: A has 'after_scale', B 'before_scale'" in pair.text.splitlines()
    assert 0.5 < pair.json["shares"]["y"] < 1


def test_where_they_differ_and_what_one_refuses_is_said() -> None:
    pair = compare(once, wide_rows, "standard", **F32)
    widths = {int(levels_of(entry.call)[1].removeprefix("rows of ")) for entry in pair.differences}
    assert min(widths) > 1024
    pair = compare(once, of_matrices, "standard", **F32)
    assert (pair.is_same, [*pair.differences]) == (False, [])
    assert any("B refuses" in line and "two axes, please" in line for line in pair.text.splitlines())


@pytest.mark.parametrize(("function", "is_same"), [(exact, True), (ordered, False)])
def test_a_batch_and_its_rows(function: Any, is_same: bool) -> None:
    assert compare(function, function, "standard", rows="b", **F32).is_same == is_same


@pytest.mark.torch
def test_gradients_and_two_libraries() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def right(x: Any, weight: Any, statistic: Any = None) -> Any:
        wide = x.float()
        inverse = torch.rsqrt((wide if statistic is None else statistic).square().mean(-1, keepdim=True) + 1e-6)
        return (wide * inverse * weight.float()).to(x.dtype)

    def wrong_gradient(x: Any, weight: Any) -> Any:
        return right(x, weight, x.float().detach())

    pair = compare(lambda x, weight: right(x, weight), wrong_gradient, "standard", framework="torch", dtypes="float32")
    assert {entry.quantity for entry in pair.differences} == {"dx"}
    assert pair.right == [True, False]
    assert compare(lambda x, weight: right(x, weight), once, "standard", dtypes="float32").both_right


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="compare: compiled is 'c', expected '', 'a', 'b' or 'ab'"):
        compare(once, once, compiled="c")
    with pytest.raises(ValueError, match=r"compare: gain is .* of A., expected some of .* of B; give both the same"):
        compare(once, lambda x: x, "standard", framework="numpy")


@pytest.mark.parametrize(
    ("other", "status", "options"), [("once", 0, ""), ("divided", 1, ""), ("divided", 0, "--within")]
)
def test_the_command(other: str, status: int, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(__file__).read_text(encoding="utf-8").replace("pytestmark =", "_ =")
    (tmp_path / "norms.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    asked = ("compare", "norms.py:once", f"norms.py:{other}", "--framework", "numpy", "--dtype", "float32")
    shown = rmsnorm(*asked, "--variant", "standard", *options.split())
    assert (shown.exit_code, shown.stdout.splitlines()[1]) == (status, "  A is norms.py:once"), shown.stderr
    if not options:
        assert json.loads(rmsnorm(*asked, "--variant", "standard", "--json").stdout)["both_right"]
