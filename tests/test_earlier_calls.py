"""What is kept of a call changes no later one: an option of another type is refused, and a list is a tuple."""

from __future__ import annotations

import numpy as np
import pytest

import rmsnorm


@pytest.mark.parametrize(("valid", "wrong"), [({"axis": 1}, {"axis": True}), ({"axis": 1}, {"axis": 1.0}),
    ({"eps": 1}, {"eps": True}), ({"partial": 1}, {"partial": True})])  # fmt: skip
def test_an_option_of_another_type_is_refused_after_an_equal_one(framework, valid, wrong):
    x = np.ones((3, 5), np.float32)
    for _ in range(2):
        framework.rms_norm(x, **valid)
        with pytest.raises(TypeError, match=r"is (True \(bool\)|1\.0 \(float\)), expected"):
            framework.rms_norm(x, **wrong)


def test_a_list_of_axes_takes_the_way_of_a_tuple(framework):
    x = framework.send(np.ones((3, 4, 5), np.float32))
    said = [rmsnorm.explain(x, axis=kind((1, 2))) for kind in (tuple, list)]
    assert said[0] == said[1]
