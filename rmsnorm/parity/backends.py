"""How each framework is called on a case. Beside the tests, only this file sees more than one of them.

Gradients come by the framework's automatic differentiation and by rms_norm_vjp, and the worse of the two counts;
derivatives along tangents come by its forward mode.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from rmsnorm.parity.cases import Array, Data
from rmsnorm.parity.equations import candidate
from rmsnorm.parity.judge import Implementation, Outcome, named_gradients
from rmsnorm.specification import errors
from rmsnorm.specification.frameworks import FRAMEWORKS
from rmsnorm.targets.bridges import bridge

_INPUTS: Final = ("x", "scale", "bias", "residual", "gate")


def open_backend(key: str, device: str) -> tuple[str, Implementation]:
    """The version of a framework, and its implementation on a device.

    Raises:
        ModuleNotFoundError: the framework is not installed.
        ValueError: it has no such device.
    """
    row = FRAMEWORKS[key]
    try:
        version = importlib.import_module(row.package).__version__
    except ModuleNotFoundError:
        raise errors.missing_framework(row.package, row.extra) from None
    return version, _numpy(device) if key == "numpy" else _framework(key, device)


def _numpy(device: str) -> Implementation:
    """The equations in float64, which are the golden in other words."""
    if device != "cpu":
        raise errors.not_a_choice("numpy", "device", device, ["cpu"])
    return candidate


def _framework(key: str, device: str) -> Implementation:
    """An implementation of ours, by automatic differentiation and by its formulas, in both directions."""
    between, own = bridge(key, device), importlib.import_module(f"rmsnorm.{key}_impl")

    def run(data: Data) -> Outcome:
        def everything(sent: Mapping[str, Any]) -> Any:
            inputs, along, cotangents = sent["inputs"], sent["along"], sent["cotangents"]
            options = {**data.options, "mask": sent["mask"]}

            def function(tensors: Mapping[str, Any]) -> Any:
                *primals, residual, gate = (tensors.get(name) for name in _INPUTS)
                return own.rms_norm(*primals, residual=residual, gate=gate, return_inverse_rms=True, **options)

            *primals, residual, gate = (inputs.get(name) for name in _INPUTS)
            (y, *_, inverse_rms), by_tape = between.pull(function, inputs, cotangents)
            dy = cotangents[0] if residual is None else tuple(cotangents)
            by_formula = own.rms_norm_vjp(dy, *primals, residual=residual, gate=gate, **options)
            return y, inverse_rms, by_tape, by_formula, between.push(function, inputs, along)

        arrays = {name: getattr(data, name) for name in _INPUTS}
        wide = any(a is not None and a.dtype == np.float64 for a in (*arrays.values(), data.dy))
        with between.precision(wide):

            def send(values: Mapping[str, Any]) -> dict[str, Any]:
                return {name: between.send(value) for name, value in values.items() if value is not None}

            inputs, along = send(arrays), send(dict(zip(_INPUTS, data.tangents, strict=False)))
            before = {name: np.array(between.fetch(tensor)) for name, tensor in inputs.items()}
            cotangents = [between.send(v) for v in (data.dy, data.dh) if v is not None]
            sent = {"inputs": inputs, "along": along, "cotangents": cotangents, **send({"mask": data.mask})}
            # one function for a compiler, as in a user's training step
            compute = between.compiled(everything) if between.compiles else everything
            y, inverse_rms, by_tape, by_formula, tangent = compute({"mask": None, **sent})
            results = {"y": [y], "inverse_rms": [inverse_rms], "jvp": [tangent]}
            formulas = named_gradients(data, by_formula)
            for name, gradient in by_tape.items():
                ways = (gradient, formulas.get(f"d{name}"))
                results[f"d{name}"] = [way for way in ways if way is not None]
            fetched = {name: [between.fetch(way) for way in ways] for name, ways in results.items()}
            touched = [name for name, was in before.items() if _bits(was) != _bits(between.fetch(inputs[name]))]
        return Outcome(fetched, tuple(touched))

    return run


def _bits(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()
