"""The fixture ``rmsnorm_parity``. pytest imports this in every session: it loads nothing until the fixture is used."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest

from rmsnorm.specification.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rmsnorm.parity import Report


@pytest.fixture(scope="session")
def rmsnorm_parity() -> Callable[..., Report]:
    """Compare a function or layer with a variant: ``rmsnorm_parity(my_norm, variant="llama", framework="torch")``.

    It takes the arguments of rmsnorm.parity.check and returns its report; with ``quantisation=`` those of
    check_quantised. If something differs, the test fails with the case, the worst element, the value got and wanted,
    the bound, and the variant that the function really is. It also fails if there is no such function or variant, or
    nothing can be compared.
    """

    def parity(function: Any, *what: Any, **options: Any) -> Report:
        __tracebackhide__ = True
        from rmsnorm import parity

        judge: Callable[..., Report] = parity.check_quantised if "quantisation" in options else parity.check
        message, report = "", None
        try:
            inspect.signature(judge).bind(function, *what, **options)
        except TypeError as error:
            names = ", ".join(list(inspect.signature(judge).parameters)[1:])
            message = f"rmsnorm_parity: {error}, expected some of {names}"
        else:
            try:
                report = judge(function, *what, **options)
            except InputError as error:
                message = str(error)
        if report is None or not report.passed:  # here, so that pytest shows no exception before it
            pytest.fail(message if report is None else report.text, pytrace=False)
        return report

    return parity
