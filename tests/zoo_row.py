"""A row of the zoo: a norm, right or wrong, with what `check` and `identify` must say of it, each asked once.

numpy_zoo.py and torch_zoo.py have the norms; parity/test_zoo.py, parity/test_zoo_numpy.py and
identify/test_zoo_identify.py have the rows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from rmsnorm import Variant
from rmsnorm.identify import Identity, identify
from rmsnorm.parity import check
from rmsnorm.parity.circumstances import levels_of, options_of
from rmsnorm.parity.report import Report

NOTHING: Mapping[str, Any] = MappingProxyType({})


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
    lacks: str | None = None  # words that it has not
    is_named: bool = False  # whether the first lines and the message of the run have those words, and how to mend it
    check: Mapping[str, Any] = NOTHING  # options of check
    identify: Mapping[str, Any] = NOTHING  # options of identify

    def hold(self, framework: str, dtypes: str = "bfloat16") -> Report | None:
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
        assert self.lacks is None or self.lacks not in found.text
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
