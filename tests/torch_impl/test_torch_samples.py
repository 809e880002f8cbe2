"""PyTorch's own requirements on an operator and on a module, as its test suites state them, on ours.

torch.testing._internal carries the samples and error inputs of rms_norm; its test classes are not installed, and what
they require is written here afresh. An eps below 0, of one sample, and complex dtypes are refused here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest")
from torch_layers import torch_rms_norm  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # forward_ad's own


# The lists of all operators and all modules take seconds to import: a test that needs one does it.
@cache
def operator_info() -> Any:
    from torch.testing._internal.common_methods_invocations import op_db

    return next(info for info in op_db if info.name == "nn.functional.rms_norm")


def samples(dtype: Any, requires_grad: bool = True) -> list[Any]:
    torch.manual_seed(0)
    found = list(operator_info().sample_inputs("cpu", dtype, requires_grad=requires_grad))
    kept = [sample for sample in found if (sample.kwargs.get("eps") or 0) >= 0]
    (refused,) = (sample for sample in found if (sample.kwargs.get("eps") or 0) < 0)
    with pytest.raises(ValueError, match=r"eps is -0\.5, expected a finite number >= 0"):
        torch_rms_norm(refused.input, *refused.args, **refused.kwargs)
    assert len(kept) == 5
    return kept


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # the mode's own
def test_fake_tensors_foretell_the_real_ones() -> None:
    """test_ops, TestFakeTensor: shape, dtype and strides of every operator inside, forward and backward."""
    from torch._subclasses.fake_utils import CrossRefFakeMode

    for dtype in (torch.bfloat16, torch.float64):
        for sample in samples(dtype):
            leaves = [t.detach().requires_grad_() for t in (sample.input, *sample.args[1:])]
            with CrossRefFakeMode():
                y = torch_rms_norm(leaves[0], sample.args[0], *leaves[1:], **sample.kwargs)
                y.sum().backward()


def test_operators_keep_to_their_schemas() -> None:
    """test_ops, TestTags and SchemaCheckMode: nothing inside writes to or aliases what its schema does not say."""
    from torch._subclasses.schema_check_mode import SchemaCheckMode

    for sample in samples(torch.float32, requires_grad=False):
        with SchemaCheckMode():
            torch_rms_norm(sample.input, *sample.args, **sample.kwargs)


@pytest.mark.slow
def test_composite_compliance() -> None:
    """test_ops, TestCompositeCompliance: right for any subset of arguments that are a wrapping subclass."""
    from torch.testing._internal.composite_compliance import (
        check_all_permutations,
        check_backward_formula,
        check_forward_ad_formula,
    )

    for sample in samples(torch.float64):
        args = (sample.input, *sample.args)
        check_all_permutations(torch_rms_norm, args, sample.kwargs, torch.testing.assert_close)
        check_backward_formula(torch_rms_norm, args, sample.kwargs, assert_equal_fn=torch.testing.assert_close)
        check_forward_ad_formula(torch_rms_norm, args, sample.kwargs, assert_equal_fn=torch.testing.assert_close)
