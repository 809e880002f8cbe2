"""The environment variables: a value that a variable may not have is an error, wherever it is read."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from rmsnorm import cpu
from rmsnorm.cli import app
from rmsnorm.numpy_impl import fast
from rmsnorm.specification import environment


@pytest.mark.parametrize("name", environment._RULES)
def test_a_value_that_is_not_allowed_is_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("abc", "-1", "1e3", "2.5", "0x1", " 1", "\u0662", "9" * 400):
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=rf"rmsnorm: the environment variable {name} is '.*, expected .*; change"):
            environment.read(name)
        result = CliRunner().invoke(app, ["variants"])
        assert result.exit_code == 2
        assert name in result.stderr
    monkeypatch.setenv(name, "")
    assert environment.read(name) is None


@pytest.mark.parametrize("value", ["0", "1025", "999999999999999999999"])
def test_too_many_threads_are_refused_where_they_would_start(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not cpu.is_available():
        pytest.skip("the golden has one thread")
    monkeypatch.setenv("RMSNORM_NUM_THREADS", value)
    with pytest.raises(ValueError, match=f"RMSNORM_NUM_THREADS is '{value}', expected a number of threads, 1 to 1024"):
        fast.rms_norm(np.ones((64, 768), np.float32))
