"""A function of x, the gain and options that returns more than y, called with the cases of a quantisation."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes

from rmsnorm.parity.cases import Array
from rmsnorm.parity.comparison import Run, version_of
from rmsnorm.parity.quantised_cases import Case
from rmsnorm.specification import errors
from rmsnorm.specification.quantisation import Quantisation
from rmsnorm.targets import Target, TargetError, open_target
from rmsnorm.targets.arguments import argument_names, required_options
from rmsnorm.targets.bridges import Bridge, Torch
from rmsnorm.targets.locate import locate
from rmsnorm.targets.open import name_of


class Kernel:
    """A function of x, the gain and options, called with NumPy arrays."""

    def __init__(self, function: Any, framework: str | None, device: str, init: Mapping[str, Any]) -> None:
        self.device = device
        typed = function if isinstance(function, str) else ""
        function = locate(typed) if typed else function
        if not callable(function) or isinstance(function, type):
            want = "a function of x, the gain and options"
            raise errors.wrong_type("check", "function", function, want, "wrap it in one")
        self.name = typed or name_of(function)
        self.function = functools.partial(function, **init) if init else function
        self.names = argument_names(self.function)  # None for any: compiled code is called with all
        self.needs_residual = "residual" in required_options(self.function)
        self.options: dict[str, float] | None = None  # it is not called before it has some
        self.outputs: Any = None

        def probe(x: Any, weight: Any, residual: Any = None) -> Any:
            more = {} if residual is None else {"residual": residual}
            if self.options is not None:
                self.outputs = self.function(x, weight, **more, **self.options)
            return x

        probe.__signature__ = inspect.signature(probe)  # type: ignore[attr-defined]
        probe.__wrapped__ = function  # type: ignore[attr-defined]  # which shows whose arrays it takes
        likely = open_target(probe, framework=framework, device=device, op="check")
        loaded = [name for name in ("numpy", "torch", "jax", "tensorflow") if name in sys.modules and not framework]
        targets = [likely]
        for name in loaded:
            with contextlib.suppress(errors.InputError):  # the library is not on that device
                targets += [open_target(probe, framework=name, device=device)] if name != likely.framework else []
        self.targets = [replace(target, name=self.name) for target in targets]

    def takes(self, name: str) -> bool:
        return self.names is None or name in self.names

    def lacks(self, preset: Quantisation) -> list[str]:
        """The options of a call that it does not take."""
        names = ["eps"] + ["static_scale"] * (preset.block == "static")
        names += ["global_scale"] * (preset.global_scale == "given")
        return [name for name in names if not self.takes(name)]

    def conclude(self, run: Run) -> None:
        """Put the library, and the status by the records, into a run."""
        run.name = self.targets[0].framework
        run.version = version_of(run.name)
        run.conclude()

    def call(self, case: Case) -> list[Array]:
        """What it returns, as NumPy arrays.

        Raises:
            TargetError: it raised, or returned what is no array.
        """
        self.options = {"eps": case.eps, **case.options}
        refusals = []
        for target in self.targets:
            try:
                outputs = self._called(target, case)
            except TargetError as error:
                refusals.append(error)
            else:
                self.targets = [target]  # the likeliest library whose arrays it takes
                return outputs
        self.targets = self.targets[:1]
        raise refusals[0]

    def _called(self, target: Target, case: Case) -> list[Array]:
        target.noticed.forget()
        more = {} if case.residual is None else {"residual": case.residual}
        target.forward(case.x, case.gain, **more)
        if target.touched:
            raise TargetError(f"inputs written to: {', '.join(sorted(target.touched))}")
        outputs = self.outputs if isinstance(self.outputs, (tuple, list)) else (self.outputs,)
        if not isinstance(outputs[0], target.bridge.array):
            kind = target.bridge.array
            came = type(outputs[0]).__name__
            raise TargetError(f"q is a {came}, expected {kind.__module__}.{kind.__qualname__}")
        return [_fetched(target.bridge, output) for output in outputs]


def _fetched(bridge: Bridge, tensor: Any) -> Array:
    name = str(getattr(tensor, "dtype", "")).removeprefix("torch.")
    if isinstance(bridge, Torch) and name.startswith(("float8", "float4")):  # which NumPy gets as their bytes
        codes = bridge.fetch(tensor.view(bridge.torch.uint8))
        return codes if name.endswith("x2") else codes.view(getattr(ml_dtypes, name))
    return bridge.fetch(tensor)
