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


def wide_rows(x: Any, weight: Any) -> Any:
    return once(x, weight) * (2 if x.shape[-1] > 1024 else 1)


def test_one_function_has_its_own_bits() -> None:
    pair = package.compare(once, once, "standard", framework="numpy", dtypes="float32")
    assert pair.is_same
    assert pair.both_right
    assert pair.text.startswith(f"A and B have the same bits in all of {len(pair.calls)} calls")
    assert pair.text.endswith("B is within the intervals of standard in these calls")
    assert {*pair.elements} == {"y"}


def test_another_rounding_is_named_and_is_in_16_bits_alone() -> None:
    pair = compare(once, before, framework="numpy", dtypes=("bfloat16", "float32"))
    assert (pair.is_same, pair.right) == (False, [True, False])
    assert {entry.dtype for entry in pair.differences} >= {"bfloat16"}
    assert "they differ in rounding: A has 'after_scale', B 'before_scale'" in pair.text.splitlines()
    assert 0.5 < pair.json["shares"]["y"] < 1


def test_where_they_differ_is_a_level() -> None:
    pair = compare(once, wide_rows, "standard", framework="numpy", dtypes="float32")
    widths = {int(levels_of(entry.call)[1].removeprefix("rows of ")) for entry in pair.differences}
    assert min(widths) > 1024


def test_a_batch_and_its_rows() -> None:
    """A sum whose order depends on the number of rows."""

    def ordered(x: Any, weight: Any) -> Any:
        rows = x.size // x.shape[-1]
        return once(x, weight) if rows > 1 else divided(x, weight)

    def exact(x: Any, weight: Any) -> Any:
        wide = x.astype(np.float64)
        inverse = 1 / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
        return (wide * inverse * weight.astype(np.float64)).astype(x.dtype)

    assert compare(exact, exact, "standard", framework="numpy", rows="b", dtypes="float32").is_same
    assert not compare(ordered, ordered, "standard", framework="numpy", rows="b", dtypes="float32").is_same


def test_what_one_refuses_is_said() -> None:
    def of_matrices(x: Any, weight: Any) -> Any:
        if x.ndim != 2:
            raise ValueError("two axes, please")
        return once(x, weight)

    pair = compare(once, of_matrices, "standard", framework="numpy", dtypes="float32")
    assert not pair.is_same
    assert not pair.differences
    assert any("B refuses" in line and "two axes, please" in line for line in pair.text.splitlines())


@pytest.mark.torch
def test_gradients_and_two_libraries() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def wrong_gradient(x: Any, weight: Any) -> Any:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6).detach()
        return (wide * inverse * weight.float()).to(x.dtype)

    def right(x: Any, weight: Any) -> Any:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype)

    pair = compare(right, wrong_gradient, "standard", framework="torch", dtypes="float32")
    assert {entry.quantity for entry in pair.differences} == {"dx"}
    assert pair.right == [True, False]
    assert compare(right, once, "standard", dtypes="float32").both_right


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="compare: compiled is 'c', expected '', 'a', 'b' or 'ab'"):
        compare(once, once, compiled="c")
    with pytest.raises(ValueError, match=r"compare: gain is .* of A., expected some of .* of B; give both the same"):
        compare(once, lambda x: x, "standard", framework="numpy")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(__file__).read_text(encoding="utf-8").replace("pytestmark =", "_ =")
    (tmp_path / "norms.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    common = ("--framework", "numpy", "--dtype", "float32", "--variant", "standard")
    same = rmsnorm("compare", "norms.py:once", "norms.py:once", *common)
    assert (same.exit_code, same.stdout.splitlines()[1]) == (0, "  A is norms.py:once"), same.stderr
    other = rmsnorm("compare", "norms.py:once", "norms.py:divided", *common, "--json")
    assert (other.exit_code, json.loads(other.stdout)["both_right"]) == (1, True)
    assert rmsnorm("compare", "norms.py:once", "norms.py:divided", *common, "--within").exit_code == 0
