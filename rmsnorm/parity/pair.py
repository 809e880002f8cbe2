"""Compares two norms with each other: where they have the same bits, where not, and which fields differ."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from rmsnorm.identify import identify
from rmsnorm.identify.identity import Identity
from rmsnorm.parity.asking import Answer, Refused, answer, judged, questions
from rmsnorm.parity.cases import Array
from rmsnorm.parity.checking import dtypes_named
from rmsnorm.parity.design import levels_for, levels_of
from rmsnorm.parity.fitting import adapted
from rmsnorm.parity.judge import bits_of
from rmsnorm.parity.lines import shared
from rmsnorm.parity.questions import Question, case_of
from rmsnorm.specification import dtypes, errors
from rmsnorm.specification.variants import Preset, Variant, get_variant
from rmsnorm.targets import Target, TargetError, open_target
from rmsnorm.targets.calling import with_values
from rmsnorm.targets.target import random_state_kept

_NAMES: Final = ("A", "B")
_ROWS: Final = 64  # that are called one by one
_SHOWN: Final = 4  # places of a report


@dataclass(frozen=True)
class Difference:
    """A quantity of one call that has other bits in B than in A: how many elements, and the first of them."""

    call: str
    dtype: str
    quantity: str
    count: int
    size: int
    words: str


@dataclass
class Pair:
    """What ``compare`` found. Printed, it is its ``text``.

    Attributes:
        names: of the two.
        variant: with whose values they were called, and within whose intervals each is judged.
        calls: the circumstances that both answered, with their levels.
        same, elements: of each quantity how many elements have the same bits, and how many there are.
        differences: what has other bits.
        refused: sentences on calls that one of the two refused.
        right: whether each is within the intervals of the variant, in every call.
        identities: what ``identify`` says of each, where they differ.
    """

    names: tuple[str, str]
    variant: Variant
    calls: dict[str, set[str]] = field(default_factory=dict)
    same: dict[str, int] = field(default_factory=dict)
    elements: dict[str, int] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    right: list[bool] = field(default_factory=lambda: [True, True])
    identities: tuple[Identity, ...] = ()
    seconds: float = 0.0

    @property
    def is_same(self) -> bool:
        """Whether all bits are the same, in calls that both answer."""
        return not self.differences and not self.refused and bool(self.calls)

    @property
    def both_right(self) -> bool:
        return all(self.right) and not self.refused and bool(self.calls)

    @property
    def fields(self) -> list[str]:
        """The fields of a variant in which they differ, in words."""
        if len(self.identities) < len(_NAMES) or any(each.variant is None for each in self.identities):
            return []
        first, second = self.identities
        assert second.variant is not None  # noqa: S101
        mine, theirs = first.unlike(second.variant), second.unlike(first.variant)  # type: ignore[arg-type]
        return [f"{name}: A has {mine[name]!r}, B {theirs[name]!r}" for name in mine if name in theirs]

    @property
    def text(self) -> str:
        """What is the same, where they differ, in which fields, and whether each is right."""
        differing = dict.fromkeys(entry.call for entry in self.differences)
        count = len(self.calls)
        if self.is_same:
            lines = [f"A and B have the same bits in all of {count} calls"]
        else:
            is_told = 0 < len(differing) <= count / 2  # of more calls what they share says nothing
            where = shared(self.calls, list(differing)) if is_told else ""
            lines = [f"A and B have other bits in {len(differing)} of {count} calls{where}"]
        lines += [f"  {letter} is {name}" for letter, name in zip(_NAMES, self.names, strict=True)]
        shares = [f"{name} {_percent(self.same[name], self.elements[name])}" for name in self.elements]
        lines += [f"elements with the same bits: {', '.join(shares)}"] * bool(shares)
        lines += [f"  {entry.call!r} {dtypes.short(entry.dtype)} {entry.quantity}: {entry.words}"
                  for entry in self._first()]  # fmt: skip
        lines += [f"they differ in {entry}" for entry in self.fields]
        lines += [f"{letter}: {identity.headline}" for letter, identity in zip(_NAMES, self.identities, strict=False)]
        for letter, right in zip(_NAMES, self.right, strict=True):
            is_right = "is" if right else "is not"
            lines.append(f"{letter} {is_right} within the intervals of {self.variant.label} in these calls")
        return "\n".join([*lines, *self.refused[:_SHOWN]])

    def _first(self) -> Iterator[Difference]:
        """The first difference of each quantity and dtype."""
        seen: set[tuple[str, str]] = set()
        for entry in sorted(self.differences, key=lambda entry: (entry.quantity != "y", entry.call.count(";"))):
            if (key := (entry.quantity, entry.dtype)) not in seen and len(seen) < _SHOWN:
                seen.add(key)
                yield entry

    @property
    def json(self) -> dict[str, Any]:
        """Everything, as values that json.dumps takes."""
        return {
            "a": self.names[0], "b": self.names[1], "variant": self.variant.label, "same": self.is_same,
            "both_right": self.both_right, "calls": [*self.calls], "fields": self.fields, "right": self.right,
            "shares": {name: self.same[name] / max(1, self.elements[name]) for name in self.elements},
            "differences": [asdict(entry) for entry in self.differences], "refused": self.refused,
            "identities": [identity.json for identity in self.identities],
        }  # fmt: skip

    def __repr__(self) -> str:
        return self.text


@random_state_kept()
def compare(
    a: Any,
    b: Any,
    variant: Preset | Variant | None = None,
    *,
    framework: str | None = None,
    dtypes: Sequence[str] | str | None = None,
    gradients: bool = True,
    compiled: str = "",
    rows: str = "",
    device: str = "cpu",
) -> Pair:
    """Call two norms in the same circumstances, as ``check`` does, and compare their bits: y and each gradient.

    Training and inference must have the same bits where a loss is taken of both, and so must a kernel and what it
    replaces, eager and compiled code, a batch and its rows.

    Args:
        a, b: as the ``function`` of ``check``: of one library or of two.
        variant: with whose values they are called, and within whose intervals each is judged; None for what
            ``identify`` says of a.
        framework, dtypes, gradients, device: as of ``check``.
        compiled: "a", "b" or "ab": which of the two the compiler of its library compiles first.
        rows: "a" or "b": which of the two is called with each row alone; then gradients are left out.

    Raises:
        ValueError: as of ``check``; or the two take no common arguments.

    Example:
        >>> import numpy as np
        >>> def once(x, weight):
        ...     wide = x.astype(np.float32)
        ...     inverse = 1 / np.sqrt((wide * wide).mean(-1, keepdims=True) + np.float32(1e-6))
        ...     return (wide * inverse * weight.astype(np.float32)).astype(x.dtype)
        >>> compare(once, once, "standard", dtypes="bfloat16").is_same
        True
    """
    began = time.monotonic()
    for name, value in (("compiled", compiled), ("rows", rows)):
        if {*value} - {"a", "b"}:
            raise errors.not_a_choice("compare", name, value, ("", "a", "b", "ab"))
    opened = [open_target(each, framework=framework, device=device, op="compare") for each in (a, b)]
    chosen = _variant(opened[0], variant)
    targets = [with_values(each, eps=chosen.eps, offset=chosen.scale_offset) for each in opened]
    names = (opened[0].name, opened[1].name)
    pair, types = Pair(names, chosen), dtypes_named(dtypes)
    differentiated = gradients and not rows and all(target.differentiable for target in targets)
    made = [target.compiled if letter in compiled else target for letter, target in zip("ab", targets, strict=True)]
    for first, second, question in _common(made, chosen, types, gradients=differentiated):
        _compare(pair, (first, second), question, rows)
    if not pair.calls:
        raise errors.nothing_compared("compare", names[1], pair.refused)
    if pair.differences:
        pair.identities = tuple(identify(target, gradients=False) for target in targets)
    pair.seconds = time.monotonic() - began
    return pair


def _variant(target: Target, variant: Preset | Variant | None) -> Variant:
    if variant is not None:
        return get_variant("compare", variant)
    return identify(target, gradients=False).variant or Variant.get("standard")


def _common(
    targets: Sequence[Target], variant: Variant, types: Sequence[str], *, gradients: bool
) -> Iterator[tuple[Target, Target, Question]]:
    """The circumstances that both can be asked, with each target as their shapes need it."""
    quick = any(target.bridge.compiles for target in targets)
    first, second = targets
    own, other = (levels_for(target, types, gradients=gradients, group_size=None, required_gate=False, quick=quick)
                  for target in targets)  # fmt: skip
    for factor, levels in own.items():
        if not {*levels} & {*other[factor]}:
            raise errors.out_of_domain("compare", factor, f"{levels} of A", f"some of {other[factor]} of B",
                                       "give both the same arguments")  # fmt: skip
    for sized, question in questions(first, variant, types, gradients=gradients, group_size=None, quick=quick,
                                     only=other):  # fmt: skip
        case = case_of(question.circumstance, variant)
        eps = case.options.get("eps")
        called = second if eps is None else with_values(second, optional=True, eps=eps)
        yield sized, adapted(called, case, None)[0], question


def _compare(pair: Pair, targets: Sequence[Target], question: Question, rows: str) -> None:
    answers = []
    for letter, target in zip("ab", targets, strict=True):
        try:
            given = _by_rows(target, question) if letter in rows else answer(target, question)
        except Refused as refusal:
            pair.refused.append(f"{letter.upper()} refuses {question.circumstance.name!r}: {refusal}")
            return
        if given is None:  # too many rows for one call each
            return
        answers.append(given)
    dtype, name = question.circumstance["x"], question.circumstance.name
    pair.calls[name] = {*levels_of(name), dtype}
    for place, given in enumerate(answers):
        held = not given.wrong and all(entry.passed for entry in judged(question, None, given))
        pair.right[place] &= held
    for quantity in dict.fromkeys([*answers[0].results, *answers[1].results]):
        got = [given.results.get(quantity, [None])[0] for given in answers]
        _count(pair, name, dtype, quantity, got)


def _count(pair: Pair, call: str, dtype: str, quantity: str, got: Sequence[Array | None]) -> None:
    first, second = got
    if first is None or second is None or (first.dtype, first.shape) != (second.dtype, second.shape):
        a, b = ("nothing" if one is None else errors.describe(one.shape, one.dtype.name) for one in got)
        pair.differences.append(Difference(call, dtype, quantity, 0, 0, f"A returns {a}, B {b}"))
        return
    other = np.flatnonzero((bits_of(first) != bits_of(second)) & ~(np.isnan(_wide(first)) & np.isnan(_wide(second))))
    pair.elements[quantity] = pair.elements.get(quantity, 0) + first.size
    pair.same[quantity] = pair.same.get(quantity, 0) + first.size - len(other)
    if len(other):
        place = tuple(int(i) for i in np.unravel_index(int(other[0]), first.shape))
        words = f"{len(other)} of {first.size} elements, first at {place}: A {first[place]!s}, B {second[place]!s}"
        pair.differences.append(Difference(call, dtype, quantity, len(other), first.size, words))


def _by_rows(target: Target, question: Question) -> Answer | None:
    """y of each row, called alone; None where there are many."""
    data = question.data
    axes = data.x.ndim - len(question.lead)
    every: Mapping[str, Array] = {
        name: np.broadcast_to(array, data.x.shape).reshape(-1, *data.x.shape[-axes:])
        for name in ("x", "residual", "gate", "mask") if (array := getattr(data, name)) is not None
    }  # fmt: skip
    count = len(every["x"])
    if not 0 < count <= _ROWS:
        return None
    own = {name: array for name in ("scale", "bias") if (array := getattr(data, name)) is not None}
    shape = (*[1] * max(1, len(question.lead)), *data.x.shape[-axes:])
    try:
        parts = [target.forward(**own, **{name: array[row].reshape(shape) for name, array in every.items()})
                 for row in range(count)]  # fmt: skip
    except TargetError as error:
        raise Refused(str(error)) from error
    return Answer({"y": [np.concatenate(parts).reshape(data.x.shape)]}, ["y"])


def _wide(array: Array) -> Array:
    return np.ascontiguousarray(array).ravel().astype(np.float64)


def _percent(same: int, count: int) -> str:
    """A share that says 100 % of all alone."""
    share = 100 * same / max(1, count)
    return "100 %" if same == count else f"{min(share, 99.9999):.6g} %"
