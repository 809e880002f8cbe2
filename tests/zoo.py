"""Norms, right and wrong, each once, over the arrays of NumPy or of PyTorch; and a row of what is said of one.

zoo_torch.py has layers, and what only PyTorch has; tools/test_zoo.py and tools/test_identify_zoo.py have the rows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from rmsnorm import Variant
from rmsnorm.identify import Identity, identify
from rmsnorm.parity import check
from rmsnorm.parity.design import MASKS, OPTIONS, levels_of
from rmsnorm.parity.report import Report
from rmsnorm.targets.bridges import NumPy

NOTHING: Mapping[str, Any] = MappingProxyType({})


def options_of(circumstance: str) -> list[str]:
    """Those of gate, mask and residual that are in its name."""
    parts = ["mask" if part in MASKS else part for part in circumstance.split("; ")]
    return [name for name in OPTIONS if name in parts]


class Row(NamedTuple):
    """A norm and what is said of it. What is None is not asked."""

    norm: Any
    asked: Variant | str | None = None  # what check compares it with
    differ: str | None = ""  # the quantities in which it differs from that
    headline: str = ""  # the end of the first line of identify
    finds: Mapping[str, Any] = NOTHING  # answers of identify
    defects: Sequence[str] | None = ()  # sentences of identify; "..." ends a beginning
    tells: Sequence[str] = ()  # words of its text
    because: Mapping[str, str] = NOTHING  # a pattern in the evidence of an answer
    recognised: bool | None = None  # and so that identify is asked at all
    preset: str = ""  # the one from which it does not differ for identify
    only: Collection[str] | None = None  # levels and options that every call has in which it fails
    has: Collection[str] = ()  # levels of calls that are compared
    says: Sequence[str] = ()  # words of the report of check
    is_named: bool = False  # whether the first lines and the message of the run have those words, and how to mend it
    check: Mapping[str, Any] = NOTHING  # options of check
    identify: Mapping[str, Any] = NOTHING  # options of identify

    def hold(self, framework: str, dtypes: Any = ("float32", "bfloat16")) -> Report | None:
        """Asks check, and identify where that is not in its report; returns what check said."""
        found = identity = None
        if self.asked is not None:
            options: dict[str, Any] = {"framework": framework, "dtypes": dtypes, **self.check}
            found = check(self.norm, self.asked, **options)
            self._hold_report(found)
            identity = found.run.identity
            if self.differ and "y" not in self.differ.split():
                assert check(self.norm, self.asked, **options, gradients=False).passed
        if self.recognised is not None:
            self.hold_identity(identity or identify(self.norm, **{"framework": framework, **self.identify}))
        return found

    def _hold_report(self, found: Report) -> None:
        failures = found.run.failures
        if self.differ is not None:
            assert {record.quantity for record in failures} == set(self.differ.split()), found.text
        assert found.passed == (self.differ == "" and not self.only), found.text
        assert found.passed == (found.run.identity is None and not found.run.message)
        if self.only is not None:
            assert failures, found.text
            for record in failures:
                assert {*self.only} <= {*levels_of(record.case), *options_of(record.case)}, found.text
        assert {*self.has} <= {level for record in found.run.records for level in levels_of(record.case)}
        for words in self.says:
            assert words in found.text or words in " ".join(found.text.split()), found.text
        for sentence in self.defects or () if found.run.identity else ():
            assert sentence.removesuffix("...") in found.details, found.details
        if self.is_named:
            lines = found.text.splitlines()
            assert self.says[0] in lines[0]
            assert lines[1].startswith("mend: "), found.text
            assert all(words in "\n".join(lines[:5]) for words in self.says), found.text
            assert all(words in found.run.message for words in self.says)

    def hold_identity(self, identity: Identity) -> None:
        assert identity.headline.endswith(self.headline), identity.text
        finds = {"kind": "rmsnorm", **self.finds}
        assert {finding: identity[finding] for finding in finds} == finds, identity.text
        if self.defects is not None:
            assert len(identity.defects) == len(self.defects), identity.text
            for said, sentence in zip(identity.defects, self.defects, strict=True):
                assert said.startswith(sentence[:-3]) if sentence.endswith("...") else said == sentence, identity.text
        assert identity.recognised == self.recognised, identity.text
        for words in self.tells:
            assert words in " ".join(identity.text.split()), identity.text
        for name, pattern in self.because.items():
            evidence = next(finding.evidence for finding in identity.findings if finding.name == name)
            assert re.search(pattern, evidence), evidence
        if self.preset:
            assert identity.plain
            variant = Variant.get(self.preset).replace(bias=identity.variant.bias)
            assert not identity.differences(variant), identity.text


class WithGradients(NumPy):
    """Arrays of NumPy, with a function of the arguments and dy that returns the gradients by their names."""

    differentiable = True

    def __init__(self, derivatives: Any) -> None:
        super().__init__()
        self.derivatives = derivatives

    def linear(self, function: Any, tensors: Any, leaves: Any) -> Any:
        return function(tensors), lambda cotangents: self.derivatives(tensors, cotangents[0])


# The arrays of either library.


def wide(x: Any) -> Any:
    """In float64 in NumPy, in float32 at least in PyTorch: so few roundings that no result of 16 bits shows them."""
    if isinstance(x, np.ndarray):
        return x.astype(np.float64)
    import torch

    return x.to(torch.promote_types(x.dtype, torch.float32))


def like(y: Any, x: Any) -> Any:
    """y in the dtype of x."""
    return y.astype(x.dtype) if isinstance(x, np.ndarray) else y.type_as(x)


def mean_square(h: Any, axis: int = -1) -> Any:
    return (h * h).mean(axis)[..., None] if axis == -1 else (h * h).mean(axis, keepdims=True)


def rows(h: Any, eps: float = 1e-6, axis: int = -1) -> Any:
    """h / rho, in the dtype of h."""
    return h / (mean_square(h, axis) + eps) ** 0.5


def standard(x: Any, weight: Any, eps: float = 1e-6) -> Any:
    """With one rounding."""
    return like(rows(wide(x), eps) * wide(weight), x)


def no_gain(x: Any) -> Any:
    return like(rows(wide(x)), x)


def llama(x: Any, weight: Any) -> Any:
    """With a rounding before the gain, and the wider dtype of the two. Of NumPy."""
    promoted = x.dtype if x.dtype == weight.dtype else np.promote_types(x.dtype, weight.dtype)
    return (wide(no_gain(x)) * wide(weight)).astype(promoted)


def fused(x: Any, residual: Any, weight: Any) -> Any:
    """It must have a residual, as the kernels of inference engines."""
    return standard(x + residual, weight), x + residual


def masked(h: Any, weight: Any, mask: Any) -> Any:
    """With a mask or None."""
    squares, count = wide(h) * wide(h), max(1, h.shape[-1])
    if mask is not None:
        mask = np.broadcast_to(mask, h.shape) if isinstance(h, np.ndarray) else mask.expand(h.shape)
        squares = np.where(mask, squares, 0.0) if isinstance(h, np.ndarray) else squares.where(mask, 0.0)
        count = mask.sum(-1)[..., None].clip(1)
    q = squares.sum(-1)[..., None] / count
    return wide(h) / (q + 1e-6) ** 0.5 * wide(weight)


def sigmoid(z: Any) -> Any:
    return 1 / (1 + np.exp(-z)) if isinstance(z, np.ndarray) else z.sigmoid()


def options(x: Any, weight: Any, mask: Any = None, residual: Any = None, gate: Any = None) -> Any:
    """With each option that `check` passes, and SiLU of the gate after the norm."""
    h = x if residual is None else x + residual
    y = masked(h, weight, mask)
    if gate is not None:
        y = y * wide(gate) * sigmoid(wide(gate))
    return like(y, x) if residual is None else (like(y, x), h)


# Those that are wrong.


def forgets(option: str, *beside: str) -> Any:
    """A norm with a mask, a residual and a gate, that forgets one of them beside the others."""

    def norm(x: Any, weight: Any, mask: Any = None, residual: Any = None, gate: Any = None) -> Any:
        given = {"mask": mask, "residual": residual, "gate": gate}
        if all(given[name] is not None for name in beside):
            given[option] = None
        return options(x, weight, **given)

    return norm


def another_sum(second: Any) -> Any:
    """What is returned beside y is ``second`` of x and x + residual."""

    def norm(x: Any, weight: Any, residual: Any = None) -> Any:
        y = options(x, weight, residual=residual)
        return y if residual is None else (y[0], second(x, y[1]))

    return norm


def over_n_minus_1(x: Any, weight: Any, offset: float = 0.0) -> Any:
    q = (wide(x) * wide(x)).sum(-1)[..., None] / max(1, x.shape[-1] - 1)
    return like(wide(x) / (q + 1e-6) ** 0.5 * (offset + wide(weight)), x)


def halves(x: Any, weight: Any) -> Any:
    """Each half of an even row by itself."""
    n = x.shape[-1] // 2 if x.shape[-1] % 2 == 0 else x.shape[-1]
    parts = wide(x).reshape(*x.shape[:-1], x.shape[-1] // max(n, 1), n)
    return like(rows(parts).reshape(x.shape) * wide(weight), x)


def where(condition: Any, change: Any) -> Any:
    """What a change makes of y where a condition on x holds."""

    def norm(x: Any, weight: Any) -> Any:
        y = standard(x, weight)
        return change(y) if condition(x) else y

    return norm


def doubled_after(first: int) -> Any:
    """The mistake starts with a later call."""
    calls: list[int] = []

    def norm(x: Any, weight: Any) -> Any:
        calls.append(1)
        return llama(x, weight) * (2 if len(calls) > first else 1)

    return norm


def in_place(x: Any, weight: Any) -> Any:
    y = standard(x, weight)
    x[...] = 0
    return y


def out_of_luck(x: Any, weight: Any = None) -> Any:
    raise RuntimeError("out of luck\nwith a long story")


def dense(array: Any) -> Any:
    """What a kernel reads that ignores strides. Of NumPy."""
    strides = np.empty(array.shape, array.dtype).strides
    return np.lib.stride_tricks.as_strided(array, array.shape, strides)


def of_blocks_of_8(x: Any, weight: Any) -> Any:
    """The rest of a row is 0."""
    end = x.shape[-1] - x.shape[-1] % 8
    return np.concatenate([standard(x, weight)[..., :end], 0 * x[..., end:]], axis=-1)
