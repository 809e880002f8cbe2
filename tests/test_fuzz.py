"""Random calls: every derivative of every framework is the golden's, and no composition of transforms another number.

A call has a level of each factor: a layout of axes, a gate, a residual, a mask, dtypes. Every level is drawn as often
as the others, so that a few calls have all of them. `make fuzz` draws 2,000 for each framework.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from functools import partial
from typing import Any

import numpy as np
import pytest
from compositions import Flax, Tensorflow, Torch
from hypothesis import settings

from rmsnorm import cpu, engines
from rmsnorm.numpy_impl import fast
from rmsnorm.parity.cases import Case, Data, make
from rmsnorm.parity.judge import Outcome, compare, expect, named_gradients
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Spec
from rmsnorm.specification.frameworks import FRAMEWORKS
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import CHOICES

NIGHTLY = settings().max_examples > 100  # pytest --hypothesis-profile nightly
SEED = os.environ.get("RMSNORM_FUZZ_SEED") or (f"{date.today()}" if NIGHTLY else "3")
CALLS = {"numpy": 12, "torch": 12, "tf": 12, "flax": 6}  # of each engine
BOUND = 1000  # units of the largest element: at most some hundred operations in a row, on numbers about 1

LAYOUTS = (
    {}, {"axis": 0}, {"axis": 1}, {"axis": (-2, -1)}, {"axis": (1, 2), "feature_axis": 0},
    {"axis": -1, "feature_axis": (-2, -1)}, {"axis": -1, "feature_axis": (0, 1, 2)}, {"axis": -1, "feature_axis": 1},
)  # fmt: skip
FACTORS: dict[str, tuple[Any, ...]] = {
    **CHOICES,  # fields of the variant
    "eps": (None, 0.0, 1e-5, 0.3),
    "scale_offset": (0.0, 1.0, -0.75),
    "partial": (None, 0.3, 0.5),
    "shape": ((5, 6, 12), (4, 3, 7), (3, 5, 33)),
    "layout": LAYOUTS,
    "data": ("rows", "alike"),
    "scale": (True, True, False),
    "bias": (True, False),
    "gate": (True, False),
    "mask": (None, "whole", "broadcast"),
    "residual": (True, False),
    "dtype": dtypes.FLOATS,
    "parameters": (None, *dtypes.FLOATS),
    "residual dtype": (None, None, *dtypes.FLOATS),
    "gate dtype": (None, None, *dtypes.FLOATS),
    "out_dtype": (None, None, "bfloat16", "float32"),
}
# For derivatives of derivatives: numbers about 1 in one dtype, and nothing that is rounded on the way.
COMPOSED = FACTORS | {
    "rounding": ("before_scale", "after_scale"), "result_dtype": ("promote",), "out_dtype": (None,),
    "eps": (0.0, 1e-5, 0.3, 3.0), "shape": ((3, 2, 4),), "dtype": ("float32", "float64"), "parameters": (None,),
    "residual dtype": (None,), "gate dtype": (None,),
}  # fmt: skip


def drawn(name: str, factors: dict[str, tuple[Any, ...]], count: int) -> Iterator[tuple[np.random.Generator, Any]]:
    """So many choices of a level of each factor, each level about as often as the others; and random numbers."""
    random = np.random.default_rng(zlib.crc32(f"{name} {SEED} ".encode()))
    columns = {key: random.permutation(np.arange(count) % len(levels)) for key, levels in factors.items()}
    orders = {key: random.permutation(len(levels)) for key, levels in factors.items()}
    for i in range(count):
        yield random, {key: levels[orders[key][columns[key][i]]] for key, levels in factors.items()}


def drawn_data(random: np.random.Generator, levels: dict[str, Any]) -> Data:
    """The arguments of a call, as those of a case of the kit."""
    fields = {name: levels[name] for name in (*CHOICES, "scale_offset", "eps")}
    gate = (fields["gate_function"], fields["gate_position"]) if levels["gate"] else None
    dtype, own = levels["dtype"], levels["gate dtype"] or levels["dtype"]
    wide = "float64" in (dtype, own, levels["residual dtype"], levels["parameters"])
    is_before = gate is not None and gate[1] == "before"
    if fields["eps"] == 0.0 and is_before:
        fields["eps"] = 0.3  # f(0) is 0
    # In float64 the kit has no bound for what 1 - eps / rho loses of rows that are small beside eps.
    if wide and dtype != "float64" and gate is not None and not is_before:
        fields["rounding"] = "after_scale"  # nor for dgate beside a tie of h / rho, which is rounded to fewer bits
    if wide and (is_before or fields["eps"] == 0.3) and fields["eps_position"] == "outside":
        fields["eps_position"] = "inside"
    case = Case(
        f"drawn {random.integers(2**32)}", levels["shape"], ("standard",), "drawn", levels["data"],
        scale=levels["scale"], bias=levels["bias"], parameters=levels["parameters"], mask=levels["mask"] == "whole",
        residual=levels["residual"], gate=gate, fields=fields,
        options={**levels["layout"], "partial": levels["partial"], "out_dtype": levels["out_dtype"]},
    )  # fmt: skip
    data = make(case, "standard", dtype)
    if levels["mask"] == "broadcast":
        sizes = tuple(int(random.choice([1, size])) for size in data.x.shape)[random.integers(4) :]
        data = replace(data, mask=np.asarray(random.random(sizes) < 0.6))
    return recast(data, levels["residual dtype"], own)


def recast(data: Data, residual: str | None, gate: str) -> Data:
    """The same with a residual and a gate of these dtypes."""
    arrays = {"x": data.x, "scale": data.scale, "bias": data.bias, "residual": data.residual, "gate": data.gate}
    if data.residual is not None and residual is not None:
        arrays["residual"] = data.residual.astype(residual)
    if data.gate is not None:
        arrays["gate"] = data.gate.astype(gate)
    specs: Any = {name: Spec(array.shape, array.dtype.name) for name, array in arrays.items() if array is not None}
    mask = None if data.mask is None else Spec(data.mask.shape, "bool")
    call = resolve("recast", **specs, mask=mask, **data.options)
    dh = None if data.dh is None else data.dh.astype(call.sum_dtype)
    return replace(data, **arrays, call=call, dy=data.dy.astype(call.result_dtype), dh=dh)


@pytest.fixture(params=[True, False], ids=["kernels", "operations"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, forget: Callable[..., None]) -> bool:
    """Whether there are kernels; else every framework computes in operations of its own."""
    if not request.param:
        compiled = [sys.modules["jax"].clear_caches] if "jax" in sys.modules else []
        monkeypatch.setattr(cpu, "missing", lambda *_: "there are none")
        forget(engines._prepared)
        for clear in compiled:
            clear()
    return bool(request.param)


def only_some(framework: Any, random: np.random.Generator, data: Data, results: dict[str, Any]) -> None:
    """Gradients of some arguments have the bits that they have beside those of all others."""
    names = ("x", "scale", "bias", "residual", "gate")
    arrays = {name: array for name in names if (array := getattr(data, name)) is not None}
    tensors = {name: framework.send(array) for name, array in arrays.items()}
    mask = None if data.mask is None else framework.send(data.mask)

    def outputs(leaves: Any) -> Any:
        return framework.functional.rms_norm(**leaves, mask=mask, return_inverse_rms=True, **data.options)

    leaves = [name for name in names if name in arrays and random.random() < 0.5] or ["x"]
    _, back = framework.bridge.linear(outputs, tensors, leaves)
    for name, gradient in back([framework.send(v) for v in (data.dy, data.dh) if v is not None]).items():
        whole, part = results[f"d{name}"][0], framework.fetch(gradient)
        assert whole.tobytes() == part.tobytes(), f"d{name} beside those of {leaves} alone: {data.case}"


def by_kernels(data: Data) -> Outcome:
    """The results of the fast functions of NumPy."""
    primals, options = (data.x, data.scale, data.bias), {**data.options, **data.arrays}
    y, *_, inverse_rms = fast.rms_norm(*primals, **options, return_inverse_rms=True)
    gradients = fast.rms_norm_vjp(data.dy if data.dh is None else (data.dy, data.dh), *primals, **options)
    named = {"y": y, "inverse_rms": inverse_rms, **named_gradients(data, gradients)}
    return Outcome({name: [array] for name, array in named.items() if array is not None})


def test_derivatives(framework, kernels, record_property):
    """y, 1 / rho, all gradients by the tape and by the formula, the derivative along tangents: within the kit's bounds.

    Of NumPy it is the golden that is compared, with the R matrix of each row; and its kernels have the golden's bits.
    """
    compared, count = 0, settings().max_examples if NIGHTLY else CALLS[framework.name]
    for random, levels in drawn(f"{framework.name} {kernels}", FACTORS, count):
        data = drawn_data(random, levels)
        outcome, expected = framework.implementation(data), expect(data)
        for each in (outcome,) if framework.name == "flax" else (outcome, framework.direct(data)):
            for verdict in compare(each, expected):
                assert verdict.passed, f"{verdict} of {levels}"
                compared += 1
        if framework.name == "numpy":
            del expected["jvp"]
            for verdict in compare(by_kernels(data), expected):
                is_exact = expected[verdict.quantity].value.dtype != np.float64 and levels["rounding"] != "input_dtype"
                assert verdict.passed, f"{verdict} of {levels}"
                assert verdict.max_ulp == 0 or not is_exact, f"{verdict} of {levels}"
        elif framework.name != "flax":  # where a gradient is one of a compiled function
            only_some(framework, random, data, outcome.results)
    record_property("comparisons", compared)  # tests/conftest.py prints it


def composed(framework: Any, random: np.random.Generator, levels: dict[str, Any]) -> tuple[Data, list[tuple[str, str]]]:
    """A call, and the transforms around it, each with the argument it is for: two of them differentiate at least."""
    data = drawn_data(random, levels)
    names = [str(random.choice(framework.derivatives)) for _ in range(2)]
    names += [str(random.choice([*framework.derivatives, *framework.others])) for _ in range(random.integers(3))]
    random.shuffle(names)
    present = [name for name in ("x", "scale", "bias", "residual", "gate") if getattr(data, name) is not None]
    around = sorted(names, key=lambda name: name in framework.outer)
    return data, [(name, str(random.choice(present))) for name in around]


def numbers(data: Data, random: np.random.Generator) -> dict[str, Any]:
    """Of size one half to two: no derivative is large, and no sum cancels to nothing by chance."""
    arrays = {}
    for name in ("x", "scale", "bias", "residual", "gate"):
        if (array := getattr(data, name)) is not None:
            size = random.uniform(0.5, 2.0, array.shape)
            sign = np.sign(arrays["x"]) if name == "residual" else random.choice([-1.0, 1.0], array.shape)
            arrays[name] = (size * sign).astype(data.x.dtype)
    return arrays


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # of vmap around vmap
@pytest.mark.parametrize("name", ["torch", "flax", "tf"])
def test_compositions(name, kernels, record_property):
    """Derivatives of derivatives, batched, compiled, recomputed and in loops are those of the textbook's formula.

    It is written in plain float64 operations of the same framework, and wrapped alike. What the framework refuses of
    it counts as refused.
    """
    backend = FRAMEWORKS[name]
    pytest.importorskip(backend.package, reason=f"pip install '.[{backend.extra}]'")
    framework = {"torch": Torch, "flax": Flax, "tf": Tensorflow}[name]()
    compared, refused, count = 0, 0, settings().max_examples // 2 if NIGHTLY else 1  # of each engine
    for random, levels in drawn(f"{name} {kernels}", COMPOSED, 3 * count):
        if compared == count:
            break
        data, transforms = composed(framework, random, levels)
        functions = [partial(function, data=data) for function in (framework.ours, framework.plain)]
        for transform in transforms:
            functions = [framework.wrap(transform[0], function, transform[1]) for function in functions]
        arrays = numbers(data, random)
        try:
            want = framework.reference(functions[1], {key: array.astype(float) for key, array in arrays.items()})
        except Exception:  # of many types: saved-tensor hooks around torch.func.grad, a loop of TensorFlow in another
            refused += 1
            continue
        try:
            got = framework.value(functions[0], arrays)
        except ValueError as error:  # TensorFlow vectorises no Bitcast; the loops it takes for it do not nest so deep
            loops = sum(transform in ("vectorized", "jacobian") for transform, _ in transforms)
            if loops < 3 or data.x.dtype != np.float64 or "Bitcast" not in str(error):
                raise
            refused += 1
            continue
        about = f"{' of '.join(f'{one} ({of})' for one, of in reversed(transforms))} of {data.case}"
        assert (got.dtype, got.shape) == (data.x.dtype, want.shape), about
        assert np.isfinite(want).all(), about
        error = np.abs(got - want).max() / max(1.0, np.abs(want).max()) / np.finfo(got.dtype).eps
        assert error <= BOUND, f"off by {error:.3g} units: {about}"
        compared += 1
    record_property("comparisons", compared)
    assert compared == count, f"of {3 * count} compositions {refused} were refused"
