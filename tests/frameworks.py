"""Every way to call ``rms_norm``, as one object each: NumPy arrays in, NumPy arrays out.

A way is a framework as its users call it eagerly, or what they put around the call: a compiler, a transform.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import numpy as np

from rmsnorm.parity.judge import Outcome, named_gradients
from rmsnorm.specification.frameworks import FRAMEWORKS
from rmsnorm.targets.bridges import bridge

INPUTS = ("x", "scale", "bias", "residual", "gate")
EAGER = {"numpy": "numpy", "torch": "torch", "tf": "tf", "flax": "flax"}  # each way, and its framework
FORMULAS = {"fast": "numpy", "torch.func": "torch"}
COMPILED = {
    "aot_eager": "torch", "inductor": "torch", "graph": "tf", "graph of unknown sizes": "tf", "XLA": "tf",
    "XLA of unknown sizes": "tf", "jit": "flax",
}  # fmt: skip
WAYS = {**EAGER, **FORMULAS, **COMPILED}
LAYERS = {"torch layer": "torch", "keras layer": "tf", "nnx layer": "flax", "linen layer": "flax"}
KEYS = {**WAYS, **LAYERS}


def missing(key: str) -> str | None:
    """What to say where the framework is not installed."""
    row = FRAMEWORKS[key]
    is_here = importlib.util.find_spec(row.package) is not None
    return None if is_here else f"{row.package} is not installed; pip install '.[{row.extra}]'"


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The value with the function applied to the NumPy arrays in it."""
    if isinstance(value, dict):
        return {key: mapped(function, entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(mapped(function, entry) for entry in value)
    return function(value) if isinstance(value, np.ndarray) else value


def given_to(data: Any) -> dict[str, Any]:
    """The options of a call as its arguments say them."""
    return {**data.options, **getattr(data, "given", {})}


def measured(between: Any, data: Any, step: Callable[[Any], Any], compiled: Callable[[Any], Any]) -> Outcome:
    """What a step that is compiled makes of the arguments of a call, and which of them it writes to.

    It takes a dictionary: the ``inputs`` and the tangents ``along`` them by their names, ``up`` and the mask.
    """

    def sent_of(values: dict[str, Any]) -> dict[str, Any]:
        return {name: between.send(value) for name, value in values.items() if value is not None}

    arrays = {name: getattr(data, name) for name in INPUTS}
    with between.precision(any(a is not None and a.dtype == np.float64 for a in (*arrays.values(), data.dy))):
        inputs, along = sent_of(arrays), sent_of(dict(zip(INPUTS, data.tangents, strict=False)))
        before = {name: between.fetch(t).tobytes() for name, t in inputs.items()}
        up = [between.send(v) for v in (data.dy, data.dh) if v is not None]
        results = compiled(step)({"inputs": inputs, "along": along, "up": up, **sent_of({"mask": data.mask})})
        fetched = {name: [between.fetch(v) for v in values] for name, values in results.items() if values}
        touched = [name for name, was in before.items() if was != between.fetch(inputs[name]).tobytes()]
    return Outcome(fetched, tuple(touched))


class Way:
    """``rms_norm`` and ``rms_norm_vjp`` in one way: its name, and the key of the framework, the name if it is eager."""

    def __init__(self, name: str) -> None:
        self.name, self.key = name, WAYS[name]

    @cached_property
    def functional(self) -> Any:
        return importlib.import_module(f"rmsnorm.{self.key}_impl.{'fast' if self.name == 'fast' else 'functional'}")

    @cached_property
    def bridge(self) -> Any:
        return bridge(self.key)

    def precision(self, wide: bool) -> Any:
        """JAX computes in float64 only if that is switched on."""
        return self.bridge.precision(wide)

    def send(self, array: Any) -> Any:
        return array if self.key == "numpy" else self.bridge.send(array)

    def fetch(self, value: Any) -> Any:
        return None if value is None else self.bridge.fetch(value)

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """What a public function returns for NumPy arrays."""
        wide: list[bool] = []
        mapped(lambda array: wide.append(array.dtype == np.float64), (arguments, options))
        with self.precision(any(wide)):
            sent, named = mapped(self.send, arguments), mapped(self.send, options)
            result = getattr(self.functional, name)(*sent, **named)
            return tuple(map(self.fetch, result)) if isinstance(result, tuple) else self.fetch(result)

    def rms_norm(self, *arguments: Any, **options: Any) -> Any:
        return self.call("rms_norm", *arguments, **options)

    def rms_norm_vjp(self, *arguments: Any, **options: Any) -> Any:
        return self.call("rms_norm_vjp", *arguments, **options)

    def outcome(self, data: Any) -> Outcome:
        """Everything that the judge compares of the arguments of a call.

        Gradients are those of automatic differentiation and those of the formulas; both count.
        """
        return self._by_formulas(data) if self.key == "numpy" else self._by_tape(data)

    def _by_formulas(self, data: Any) -> Outcome:
        primals, more = (data.x, data.scale, data.bias), {**given_to(data), **data.arrays}
        before = [a.tobytes() for a in (*primals, *data.arrays.values()) if a is not None]
        y, *rest = self.functional.rms_norm(*primals, return_inverse_rms=True, **more)
        dy = data.dy if data.dh is None else (data.dy, data.dh)
        gradients = self.functional.rms_norm_vjp(dy, *primals, **more)
        named = {"y": y, "inverse_rms": rest[-1], **named_gradients(data, gradients)}
        if self.name == "numpy":
            named["jvp"] = self.functional.rms_norm_jvp(primals, data.tangents, **more)
        if data.residual is not None:
            named["h"] = rest[0]
        after = [a.tobytes() for a in (*primals, *data.arrays.values()) if a is not None]
        results = {name: [value] for name, value in named.items() if value is not None}
        return Outcome(results, () if before == after else ("an argument",))

    def _by_tape(self, data: Any) -> Outcome:
        def step(sent: Any) -> Any:
            inputs, options = sent["inputs"], {**given_to(data), "mask": sent.get("mask")}

            def function(tensors: Any) -> Any:
                *primals, residual, gate = (tensors.get(name) for name in INPUTS)
                named = {"residual": residual, "gate": gate, "return_inverse_rms": True}
                return self.function("rms_norm")(*primals, **named, **options)

            (y, *rest), by_tape = self.pull(function, inputs, sent["up"])
            results = {"y": [y], "inverse_rms": [rest[-1]], **{f"d{name}": [d] for name, d in by_tape.items()}}
            if "residual" in inputs:
                results["h"] = [rest[0]]
            if self.has_formulas:
                *primals, residual, gate = (inputs.get(name) for name in INPUTS)
                dy = sent["up"][0] if residual is None else tuple(sent["up"])
                formulas = self.function("rms_norm_vjp")(dy, *primals, residual=residual, gate=gate, **options)
                for name, gradient in named_gradients(data, formulas).items():
                    results.setdefault(name, []).append(gradient)
            if self.has_tangents:
                results["jvp"] = [self.push(function, inputs, sent["along"])]
            return {name: [v for v in values if v is not None] for name, values in results.items()}

        return measured(self.bridge, data, step, self.compiled)

    # What a way puts around the call.

    @property
    def has_tangents(self) -> bool:
        return self.name not in ("aot_eager", "inductor", "graph of unknown sizes", "XLA", "XLA of unknown sizes")

    @property
    def has_formulas(self) -> bool:
        return self.name not in ("inductor", "torch.func")

    def function(self, name: str) -> Any:
        own = getattr(self.functional, name)
        if self.name not in ("aot_eager", "inductor"):
            return own
        torch = self.bridge.torch
        torch.compiler.reset()
        return torch.compile(own, backend=self.name, fullgraph=True)

    def compiled(self, function: Any) -> Any:
        """The whole step as the way compiles it."""
        if self.name in ("graph", "XLA"):
            return self.bridge.tf.function(function, jit_compile=self.name == "XLA")
        if self.name in ("graph of unknown sizes", "XLA of unknown sizes"):
            tf, is_xla = self.bridge.tf, self.name.startswith("XLA")

            def unsized(sent: Any) -> Any:
                spec = tf.nest.map_structure(lambda t: tf.TensorSpec([None] * t.shape.rank, t.dtype), sent)
                return tf.function(function, input_signature=[spec], jit_compile=is_xla)(sent)

            return unsized
        return self.bridge.jax.jit(function) if self.name == "jit" else function

    def pull(self, function: Any, inputs: Any, up: Any) -> Any:
        if self.name != "torch.func":
            return self.bridge.pull(function, inputs, up)

        def split(tensors: Any) -> Any:
            *outputs, inverse_rms = function(tensors)
            return tuple(outputs), inverse_rms

        outputs, back, inverse_rms = self.bridge.torch.func.vjp(split, dict(inputs), has_aux=True)
        return (*outputs, inverse_rms), back(tuple(up))[0]

    def push(self, function: Any, inputs: Any, along: Any) -> Any:
        if self.name != "torch.func":
            return self.bridge.push(function, inputs, along)
        torch = self.bridge.torch
        inputs = {name: t.contiguous() for name, t in inputs.items()}  # forward mode takes no expanded tensor
        along = {name: along.get(name, torch.zeros_like(t)) for name, t in inputs.items()}
        with torch.no_grad():
            return torch.func.jvp(lambda tensors: function(tensors)[0], (inputs,), (along,))[1]


@cache
def way(name: str) -> Way:
    return Way(name)
