"""The record of what identify learns about a target: a field for each question, in the order of the report; defects."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Final, Generic, TypeVar

from rmsnorm.identify.identity import Finding, Kind

Value = TypeVar("Value")


class NotRms(Exception):
    """The target computes something else: the message says what was seen."""


@dataclass(frozen=True)
class Learned(Generic[Value]):
    """The answer to a question, None where it is not observable, and what was seen, or why nothing can be seen."""

    value: Value | None
    evidence: str


def not_observable(reason: str) -> Learned[Any]:
    return Learned(None, reason)


_OF_THE_MODEL: Final = {"of_the_model": True}  # fields that are withdrawn where no model predicts y


@dataclass
class Findings:
    """Answers, None where nothing was asked, and sentences on defects."""

    assumed: Learned[str] | None = None
    refused: dict[str, Learned[str]] = field(default_factory=dict, metadata={"name": "{} x"})  # by the dtype of x
    repeatable: Learned[bool] | None = None
    axes: Learned[str] | None = None
    group_size: Learned[int] | None = None
    gate: Learned[str | bool] | None = None
    gain: Learned[bool] | None = None
    scale_offset: Learned[float] | None = None
    bias: Learned[bool] | None = None
    numerator: Learned[str] | None = None
    kind: Learned[Kind] | None = None
    statistic: Learned[str] | None = None
    partial: Learned[float] | None = None
    partial_rounding: Learned[str] | None = None
    divisor: Learned[float] | None = field(default=None, metadata=_OF_THE_MODEL)
    factor: Learned[float] | None = field(default=None, metadata=_OF_THE_MODEL)
    widths: Learned[str] | None = field(default=None, metadata=_OF_THE_MODEL)
    eps_position: Learned[str] | None = field(default=None, metadata=_OF_THE_MODEL)
    eps: Learned[float | str] | None = field(default=None, metadata=_OF_THE_MODEL)
    narrow_eps: dict[str, Learned[float]] = field(default_factory=dict, metadata={"name": "eps in {}"})
    statistic_dtype: Learned[str] | None = field(default=None, metadata=_OF_THE_MODEL)
    result_dtype: Learned[str] | None = None
    rounding: Learned[str] | None = field(default=None, metadata=_OF_THE_MODEL)
    float64: Learned[str] | None = field(default=None, metadata=_OF_THE_MODEL)
    confirmed: Learned[bool] | None = None
    overflow: Learned[str] | None = None
    underflow: Learned[str] | None = None
    zero_row: Learned[str] | None = None
    nan: Learned[str] | None = None
    infinity: Learned[str] | None = None
    gradients: Learned[str] | None = None
    mask: Learned[str] | None = None
    nan_under_mask: Learned[str] | None = None
    empty_row: Learned[str] | None = None
    residual: Learned[str] | None = None
    returned_sum: Learned[str] | None = None
    rounding_with_residual: Learned[str] | None = None
    residual_rounding: Learned[str] | None = None
    batches: Learned[str] | None = None
    training: Learned[str] | None = None
    confirmed_gate: Learned[bool] | None = None
    gate_gradient: Learned[str] | None = None
    defects: list[str] = field(default_factory=list)

    def defect(self, sentence: str) -> None:
        if sentence not in self.defects:
            self.defects.append(sentence)

    def is_hidden(self, name: str) -> bool:
        """Whether it was asked and is not observable."""
        answer = getattr(self, name)
        return answer is not None and answer.value is None

    def withdraw_model(self, defects: int) -> None:
        """Take back what rests on a model that was not confirmed, with the defects after the first so many."""
        for entry in fields(self):
            if entry.metadata.get("of_the_model") and getattr(self, entry.name) is not None:
                setattr(self, entry.name, not_observable("no model was confirmed"))
        self.narrow_eps.clear()
        del self.defects[defects:]

    @property
    def listed(self) -> tuple[Finding, ...]:
        """All answers, by their names."""
        answers: dict[str, Learned[Any]] = {}
        for entry in fields(self):
            answer = getattr(self, entry.name)
            if isinstance(answer, dict):
                answers |= {entry.metadata["name"].format(dtype): single for dtype, single in answer.items()}
            elif isinstance(answer, Learned):
                answers[entry.name] = answer
        return tuple(Finding(name, answer.value, answer.evidence) for name, answer in answers.items())
