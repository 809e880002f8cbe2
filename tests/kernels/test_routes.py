"""A call is checked once for equal shapes, dtypes and options of any library; and why no kernel computes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rmsnorm import cpu
from rmsnorm.engines import _prepared, prepare, refusal
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import derive

X, G = np.ones((4, 6), "float32"), np.ones(6, "float32")


def test_an_equal_call_is_prepared_once() -> None:
    options = ("llama", None, None, -1, None, None)
    first = prepare("rms_norm", options, X, G)
    assert prepare("rms_norm", options, X.copy(), G.copy()) is first
    assert prepare("rms_norm", options, X, G.astype("float64")) is not first
    assert first.in_memory()[0] is first.in_memory()[0]


SPEC = Spec((2, 3, 4), "float32")


@pytest.mark.parametrize(("arguments", "want"), [
    ({"axis": (-2, -1)}, None),
    ({"feature_axis": (-2, -1)}, None),  # groups
    ({"axis": (-2, -1), "feature_axis": -2}, None),  # a gain that elements of a row share
    ({"partial": 0.5}, None),
    ({"residual": SPEC, "gate": SPEC}, None),
    ({"gate": Spec((2, 3, 4), "float64")}, "an array is float64"),
    ({"scale": Spec((4,), "float64")}, "an array is float64"),
    ({"x": Spec((2, 3, 4), "float64")}, "an array is float64"),
    ({"mask": Spec((4,), "bool")}, "the call has a mask"),
    ({"axis": 1}, "the normalised axes are not the last ones"),
    ({"x": Spec((2, 0, 4), "float32")}, "x has no elements"),
    ({"x": Spec((None, 3, 4), "float32")}, "a size of x is not known before the program runs"),
    ({"x": Spec((2, 3, 4), "float16"), "out_dtype": "bfloat16"}, "x and y have different formats of 16 bits"),
])  # fmt: skip
def test_why_no_kernel_computes_a_call(arguments: dict[str, Any], want: str | None) -> None:
    arguments = {"x": SPEC, **arguments}
    x, scale, partial = arguments.pop("x"), arguments.pop("scale", None), arguments.pop("partial", None)
    call = resolve("test", x, scale, variant=derive("test", "standard", None, partial), **arguments)
    formats = () if scale is None else (scale.dtype,)
    assert refusal(call.in_rows, None, formats) == refusal(call.in_rows, "cpu", formats) == want
    on_gpu = refusal(call.in_rows, "cuda", formats)
    assert on_gpu == ("the kernels for GPUs count all elements of a row" if partial else want)


@pytest.mark.parametrize("framework", ["torch", "tf", "flax"], indirect=True)
def test_an_eager_call_without_kernels_warns_once(framework: Any, monkeypatch: pytest.MonkeyPatch, forget: Any) -> None:
    """In every framework that has the kernels; calls that no kernel could compute say nothing."""
    make, rms_norm = framework.send, framework.functional.rms_norm
    x, g = make(np.ones((5, 7), "float32")), make(np.ones(7, "float32"))
    monkeypatch.setattr(cpu, "is_switched_off", lambda: False)
    monkeypatch.setattr(cpu, "what_is_missing", lambda: "there are none today")
    forget(cpu._warn, _prepared)
    rms_norm(make(np.ones((0, 7), "float32")), g)
    with pytest.warns(UserWarning, match="rmsnorm: using slower code, .* as there are none to"):
        rms_norm(x, g)
    rms_norm(x, g)  # warnings are errors
    rms_norm(make(np.ones((3, 7), "float32")), g, variant="llama")
