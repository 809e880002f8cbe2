"""The fixture ``rmsnorm_parity``. pytest imports this in every session: it loads nothing until the fixture is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rmsnorm.variants import Variant

if TYPE_CHECKING:
    from collections.abc import Callable

    from rmsnorm.parity import Report


@pytest.fixture(scope="session")
def rmsnorm_parity() -> Callable[..., Report]:
    """Hold a function or layer to a variant: ``rmsnorm_parity(my_norm, variant="llama", framework="torch")``.

    It takes what rmsnorm.parity.check takes, and returns its report; where something differs the test fails with the
    case, the worst element, what was got and wanted, the bound, and what the function is instead.
    """

    def parity(function: Any, variant: str | Variant = "standard", **options: Any) -> Report:
        __tracebackhide__ = True
        from rmsnorm.parity import check

        report = check(function, variant, **options)
        if not report.passed:
            pytest.fail(report.text, pytrace=False)
        return report

    return parity
