"""What identify learned about a target, as a value, as JSON and as a report."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Final, Literal

from rmsnorm.identify import mending, names
from rmsnorm.identify.findings import Finding
from rmsnorm.identify.mistakes import OF_SUM
from rmsnorm.specification.variants import Variant, get_variant

Kind = Literal["rmsnorm", "layernorm", "l2norm", "none"]
Position = Literal["before", "after"]  # of the normalisation
_FIRST: Final = ("eps", "eps_position", "statistic_dtype", "rounding", "gain", "scale_offset", "bias", "confirmed")
_SHOWN: Final = 8  # findings of the short report


@dataclass(frozen=True)
class Gate:
    """A factor act(gate) of x or of y; the gate is an input, or for ``vector`` a parameter times x.

    The latter is the gated RMSNorm after zero's ReLA attention, which somebody who ports such a model writes again.
    """

    activation: str
    position: Position
    vector: bool = False

    @property
    def function(self) -> str:
        """Its name, as of a variant's ``gate_function``."""
        return f"{self.activation} of gate * x" if self.vector else self.activation


@dataclass(frozen=True)
class Identity:
    """What a target computes, with the evidence.

    Attributes:
        target: its name.
        framework: the library that computes it.
        kind: ``rmsnorm``, ``layernorm``, ``l2norm`` (the sum of squares in place of the mean) or ``none``.
        variant: the fields that were found, under the name of a preset, whose fields count where none was seen. Of
            presets that differ in eps at most, the name is that of the library that the norm is of, as "torch" of
            torch.nn.RMSNorm, else of a widely known family. None where no variant describes it.
        recognised: it is an RMSNorm, fresh data confirmed every finding, and it has no defect.
        plain: recognised, and the variant describes it completely: no groups, and no gate that must be passed.
        findings: one for each question, in the order of the report.
        defects: sentences.
        seconds: how long it took.
        last_axes: whether the normalised axes are the last ones.
        axes, rank: the normalised axes, from the first one, and the number of axes of x.
        gate: its gate, None without one.
        library: the package that it is of.
    """

    target: str
    framework: str
    kind: Kind = "none"
    variant: Variant | None = None
    recognised: bool = False
    plain: bool = False
    findings: tuple[Finding, ...] = ()
    defects: tuple[str, ...] = ()
    seconds: float = 0.0
    last_axes: bool = True
    axes: tuple[int, ...] = ()
    rank: int = 0
    gate: Gate | None = None
    library: str = ""

    @property
    def values(self) -> dict[str, Any]:
        """The value of each finding, None where it is not observable."""
        return {finding.name: finding.value for finding in self.findings}

    def __getitem__(self, name: str) -> Any:
        """The value of a finding, None where it is not observable or was not asked."""
        return self.values.get(name)

    @property
    def answered(self) -> bool:
        """Whether it answered as a function of x: a target that raised has no finding on its kind."""
        return "kind" in self.values

    def differences(self, variant: str | Variant) -> tuple[str, ...]:
        """Sentences on the observable fields that are different in a variant.

        Raises:
            ValueError: there is no preset of that name.
        """
        wanted = get_variant("Identity.differences", variant)
        if self.variant is None:
            return (f"kind is {self.kind!r}, {wanted.name} is RMSNorm",)
        return tuple(
            f"{name} is {names.written(value)}, {wanted.name} has {names.written(getattr(wanted, name))}"
            for name, value in self.unlike(wanted).items()
        )

    def unlike(self, wanted: Variant) -> dict[str, Any]:
        """The observable fields that are different in a variant, with the values that they have here."""
        if self.variant is None:
            return {}
        observed = {name for name, value in self.values.items() if value is not None}
        values = {name: getattr(self.variant, name) for name in names.different(self.variant, wanted, observed)}
        return values | {name: value for name, value in self.of_gate.items() if value != getattr(wanted, name)}

    @property
    def of_gate(self) -> dict[str, Any]:
        """What it does with its gate, as fields of a variant; empty where it has none."""
        return {"gate_function": self.gate.function, "gate_position": self.gate.position} if self.gate else {}

    def mends(self, wanted: Variant) -> list[str]:
        """How to make it this variant: a line for each defect and each field that differs, where one is known."""
        lines = [*map(mending.defect_mended, (self._unrecognised if self.kind == "none" else self.kind, *self.defects))]
        lines += [mending.field_mended(name, getattr(wanted, name)) for name in self.unlike(wanted)]
        return list(dict.fromkeys(filter(None, lines)))

    @property
    def named(self) -> Variant | None:
        """The preset by which it is named: the nearest one."""
        return None if self.variant is None else names.nearest(self.variant, self.values, self.library)[0]

    @property
    def brief(self) -> list[Finding]:
        """The findings that matter most: fields that differ from the named preset, then those that decide most often.

        A gain is not among them, as most norms have one.
        """
        fields = [*(self.unlike(self.named) if self.named else ()), *_FIRST]
        known = {finding.name: finding for finding in self.findings if finding.value is not None}
        shown = [known[name] for name in dict.fromkeys(fields) if name in known]
        return [finding for finding in shown if (finding.name, finding.value) != ("gain", True)][:_SHOWN]

    @property
    def other_defects(self) -> list[str]:
        """The defects that are not in the headline."""
        return [defect for defect in self.defects if defect not in self.headline]

    def is_over(self, axis: int | Sequence[int] | None) -> bool:
        """Whether it normalises these axes; None for the last ones."""
        if axis is None:
            return self.last_axes
        wanted = (axis,) if isinstance(axis, int) else axis
        return tuple(sorted(entry % max(self.rank, 1) for entry in wanted)) == self.axes

    @property
    def json(self) -> dict[str, Any]:
        """Everything, as values that json.dumps takes; an infinite distance is None, a fraction a text such as 1/3."""
        return _plain(asdict(self) | {"variant": self.variant and json.loads(self.variant.json)})

    @property
    def described(self) -> str:
        """Its variant, by name or by what differs from the nearest preset; and its groups and gate."""
        assert self.variant is not None  # noqa: S101  (every RMSNorm has one)
        groups = f", in groups of {self['group_size']}" if self["group_size"] else ""
        function = self.gate.activation if self.gate else ""
        article = "an optional" if self.plain else "an" if function[:1] in tuple("aeiou") else "a"
        gate = f", with {article} {function} gate" if function else ""
        return names.described(self.variant, self.values, self.library) + groups + gate

    @property
    def headline(self) -> str:
        """What it is, in one sentence."""
        if self.kind == "none":
            return f"{self.target} is {self._unrecognised}"
        if self.kind == "layernorm":
            where = "" if self.last_axes else f" along axis {self['axes']}"
            return f"{self.target} is LayerNorm{where}, not RMSNorm"
        where = "" if self.last_axes else f" over axis {self['axes']} (not the last)"
        if self.kind == "l2norm":
            return f"{self.target} is {self._l2_norm}"
        if self.recognised:
            return f"{self.target} is RMSNorm{where}: {self.described}"
        if self["confirmed"] is False and self["rounding"] is None and self["eps_position"] is None:
            return f"{self.target} is close to RMSNorm{where}, but no model predicts its y"
        count = len(self.defects)
        defects = "1 defect" if count == 1 else f"{count} defects"
        return f"{self.target} is close to RMSNorm{where}: {self.described}; {defects}"

    @property
    def _unrecognised(self) -> str:
        reasons = [finding.evidence for finding in self.findings if finding.name == "kind"]
        return f"not recognised: {next(iter([*reasons, *self.defects]), 'nothing is known of it')}"

    @property
    def _l2_norm(self) -> str:
        """What is known of it, and with which eps and gain RMSNorm computes the same."""
        eps, position = self["eps"], self["eps_position"]
        eps = f"{eps:.6g}" if isinstance(eps, float) else str(eps)
        where, formula, same = {
            "inside": (", eps on the sum", f"x / sqrt(sum(x^2) + {eps})", "eps / n"),
            "outside": (", eps on the norm", f"x / (|x| + {eps})", "eps / sqrt(n)"),
            "clamp": (", eps below the norm", f"x / max(|x|, {eps})", "the same eps"),
        }.get(position, ("", "x / |x|", "eps 0"))
        others = [defect for defect in self.defects if defect != OF_SUM.says]
        more = f"; {len(others)} other defect{'s' * (len(others) > 1)}" if others else ""
        return f"the L2 norm{where}: {formula}, which is RMSNorm with {same} and 1 / sqrt(n) times the gain{more}"

    @property
    def rows(self) -> list[Finding]:
        """The findings, and other names of the variant."""
        rows = list(self.findings)
        others: Sequence[str] = ()
        if self.recognised and self.variant:
            others = names.also_known_as(self.variant, self.values, self.library)
        if others:
            rows.append(Finding("also known as", ", ".join(others), "presets with the same numbers"))
        return rows

    @property
    def text(self) -> str:
        """The report, as lines of plain text."""
        lines = [self.headline]
        for row in [*self.rows, *(Finding("defect", sentence, "") for sentence in self.defects)]:
            start = f"  {row.name:<17} "
            line = f"{start}{row.word}{f' - {row.evidence}' if row.evidence else ''}"
            lines += textwrap.wrap(
                line, 118, subsequent_indent=" " * len(start), break_long_words=False, break_on_hyphens=False
            )
        return "\n".join(lines)

    @property
    def cluster(self) -> str:
        """What it computes, whatever its name: targets that compute the same have the same text."""
        if self.kind == "l2norm":
            return self._l2_norm
        if self.kind != "rmsnorm":
            return "LayerNorm" if self.kind == "layernorm" else self._unrecognised
        gain = ", without a gain" if self["gain"] is False else ""
        defects = [sentence.replace(self.target, "it") for sentence in self.defects]
        return "; ".join([self.described + gain, *defects])


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, Fraction):
        return str(value)  # 1/3 is no float
    return None if isinstance(value, float) and not math.isfinite(value) else value
