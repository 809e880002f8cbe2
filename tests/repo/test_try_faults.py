"""The table of faults names what exists, and the program tells a fault that is noticed from one that is not."""

from __future__ import annotations

import importlib
import operator
import shlex
from pathlib import Path

import pytest
from faults import FAULTS, SURFACES
from try_faults import ROOT, run

TEST = """
import numpy as np
from rmsnorm.numpy_impl import rms_norm_vjp

def test_dscale():
    ones = np.ones((3, 4), "float32")
    assert rms_norm_vjp(ones, ones, ones[0], eps=0.0)[1].tolist() == [3.0] * 4
"""


def test_every_fault_has_a_name_and_every_surface_tests():
    assert len({fault.title for fault in FAULTS}) == len(FAULTS)
    assert {fault.surface for fault in FAULTS} == set(SURFACES)
    for surface in SURFACES.values():
        paths = [path for path in shlex.split(surface.tests) if path.startswith("tests/")]
        assert paths
        assert all((ROOT / path).exists() for path in paths), surface


@pytest.mark.parametrize("name", sorted({surface.module for surface in SURFACES.values()}))
def test_every_fault_is_of_something_that_exists(name):
    if "_impl" in name and "numpy" not in name:
        pytest.importorskip({"tf": "tensorflow"}.get(framework := name.split(".")[1].removesuffix("_impl"), framework))
    attributes = {fault.attribute for fault in FAULTS if SURFACES[fault.surface].module == name}
    assert all(operator.attrgetter(attribute)(importlib.import_module(name)) for attribute in attributes)


def test_a_fault_is_noticed_and_no_fault_is_not(tmp_path: Path):
    test = tmp_path / "test_dscale.py"
    test.write_text(TEST)
    verdict, by = run("numpy: dscale lacks the last row", [str(test)], 60)
    assert (verdict, "test_dscale" in by[0]) == ("killed", True)
    assert run("none", [str(test)], 60) == run(None, [str(test)], 60) == ("survived", [])
    test.write_text("import no_such_module\n")
    assert run("none", [str(test)], 60)[0] == "error", "a test that cannot be collected notices nothing"
