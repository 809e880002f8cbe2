"""In a TensorFlow without what rmsnorm asks of it in private, the results are the same."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path

import pytest
from programs import printed

pytest.importorskip("tensorflow")
from tf_without import MISSING

PROGRAM = Path(__file__).with_name("tf_without.py")


@lru_cache
def results(*names: str) -> dict[str, list[list[float]]]:
    return json.loads(printed("-W", "ignore", PROGRAM, *names, timeout=200).splitlines()[-1])


@pytest.mark.slow  # most of a minute
def test_without_all_of_it() -> None:
    assert results(*MISSING) == results()


@pytest.mark.slow
@pytest.mark.parametrize("name", MISSING)
def test_without_one(name: str) -> None:
    assert results(name) == results()


def test_nothing_else_asks_tensorflow_in_private() -> None:
    import rmsnorm

    private = re.compile(r"tensorflow\.python|keras\.src|(?:tf|keras|tensor|x)\._|pfor_converter")
    folder = Path(rmsnorm.__file__).parent
    texts = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
    asking = [name for name, text in texts.items() if name.startswith("tf_impl/") and private.search(text)]
    assert asking == ["tf_impl/private.py"]
    asking = [name for name, text in texts.items() if re.search(r"keras\.src|tensorflow\.python", text)]
    assert asking == ["tf_impl/private.py"]
