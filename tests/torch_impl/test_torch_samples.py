"""PyTorch's own requirements on an operator and on a module, as its test suites state them, on ours.

torch.testing._internal carries the samples, references and error inputs of rms_norm and nn.RMSNorm, which
test_torch_tools.py and test_torch_layer.py run; its test classes (test_ops.py, test_modules.py, test_ops_gradients.py)
are not installed, and what they require is written here afresh. What does not apply:

- eps < 0, of one sample: out of the domain here, a ValueError;
- complex dtypes, which the operator lists: rejected here, there x^2 stands for |x|^2;
- check_inplace, jit.script: there is no variant in place, and scripting is deprecated in favour of export;
- cpu against gpu, multiple devices: need an accelerator.
"""

from __future__ import annotations

import copy
import pickle
from functools import cache
from typing import Any

import pytest

from rmsnorm import dtypes

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest")
from torch_layers import torch_rms_norm  # noqa: E402

from rmsnorm.torch_impl import RMSNorm  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # forward_ad's own


# The lists of all operators and all modules take seconds to import: a test that needs one does it.
@cache
def operator_info() -> Any:
    from torch.testing._internal.common_methods_invocations import op_db

    return next(info for info in op_db if info.name == "nn.functional.rms_norm")


@cache
def module_info() -> Any:
    from torch.testing._internal.common_modules import module_db

    return next(info for info in module_db if info.module_cls is torch.nn.RMSNorm)


def samples(dtype: Any, requires_grad: bool = True) -> list[Any]:
    torch.manual_seed(0)
    found = list(operator_info().sample_inputs("cpu", dtype, requires_grad=requires_grad))
    kept = [sample for sample in found if (sample.kwargs.get("eps") or 0) >= 0]
    assert (len(found), len(kept)) == (6, 5)
    return kept


def test_every_flag_of_the_operator_is_kept() -> None:
    """What the operator is declared to support is what the tests here and beside run."""
    declared = ("supports_autograd", "supports_forward_ad", "supports_fwgrad_bwgrad", "supports_gradgrad")
    assert all(getattr(operator_info(), name) for name in declared)
    assert not operator_info().supports_out
    names = {str(dtype).removeprefix("torch.") for dtype in operator_info().dtypes}
    assert {name for name in names if "complex" not in name} == set(dtypes.FLOATS)
    x = torch.ones(2, 3, dtype=torch.complex64)
    with pytest.raises(TypeError, match="x has dtype complex64, expected float16"):
        torch_rms_norm(x, (3,))


def test_error_inputs_of_the_operator() -> None:
    """test_ops, test_errors: the words are ours. The third does not apply to the function, which
    is given axes and no sizes; test_torch_layer.py runs all three on the layer.
    """
    words = (r"axis is empty, expected at least one", r"scale has shape \(1, 2\), expected \(1, 2, 3\) to match axis")
    declared = list(operator_info().error_inputs("cpu"))
    assert len(declared) == 3
    for error, match in zip(declared, words, strict=False):
        shape, weight, eps = error.sample_input.args
        with pytest.raises(ValueError, match=match):
            torch_rms_norm(error.sample_input.input, shape, weight, eps)


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


def module_samples(dtype: Any, training: bool = True) -> Any:
    """Layers made as ModuleInfo makes the built-in, and what they are called with."""
    torch.manual_seed(0)
    for sample in module_info().module_inputs_func(module_info(), "cpu", dtype, True, training):
        made, given = sample.constructor_input, sample.forward_input
        layer = RMSNorm(*made.args, **made.kwargs, dtype=dtype)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.uniform_(-1, 1)
        yield layer.train(training), given.args, given.kwargs


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_requirements_of_modules(dtype: Any) -> None:
    """test_modules: pickle, repr, factory arguments, inputs with gaps, train and eval, the same again."""
    for layer, args, kwargs in module_samples(dtype):
        y = layer(*args, **kwargs)
        twin = pickle.loads(pickle.dumps(layer))
        assert torch.equal(twin(*args, **kwargs), y)
        assert repr(twin) == repr(layer)
        assert torch.equal(layer.eval()(*args, **kwargs), y)
        spread = [torch.stack([each, each], -1)[..., 0] for each in args]
        assert not spread[0].is_contiguous() or spread[0].numel() <= 1
        assert torch.equal(layer(*spread), y)
        assert torch.equal(layer(*args), layer(*args))
        moved = copy.deepcopy(layer).to("meta")
        assert moved(*(each.to("meta") for each in args)).shape == y.shape
        wide = copy.deepcopy(layer).to(torch.float64)
        assert all(parameter.dtype == torch.float64 for parameter in wide.parameters())
    assert not module_info().module_memformat_affects_out
    made = torch.nn.RMSNorm(3).extra_repr()
    assert RMSNorm(3).extra_repr() == made
    with torch.device("meta"):
        assert RMSNorm(3).weight.is_meta


def compared_with_eager(function: Any, leaves: list[Any], backend: str = "aot_eager") -> None:
    """A compiled function has the outputs and gradients of the function, bit for bit."""
    torch._dynamo.reset()  # each sample is a program of its own
    results = []
    for run in (function, torch.compile(function, fullgraph=True, backend=backend)):
        own = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        y = run(*own)
        results.append([y, *torch.autograd.grad(y.sum(), own, allow_unused=True)])
    for got, want in zip(*results, strict=True):
        assert (got is None) == (want is None)
        assert got is None or (torch.equal(got, want) and got.stride() == want.stride())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # the compiler's own
def test_samples_of_operator_and_module_in_compiled_programs() -> None:
    """test_ops, TestCompositeCompliance and test_modules under PYTORCH_TEST_WITH_AOT_EAGER."""
    for dtype in (torch.bfloat16, torch.float32):
        for sample in samples(dtype):
            compared_with_eager(
                lambda x, *weight, sample=sample: torch_rms_norm(x, sample.args[0], *weight, **sample.kwargs),
                [sample.input, *sample.args[1:]],
            )
        for layer, args, kwargs in module_samples(dtype):
            compared_with_eager(lambda x, layer=layer, kwargs=kwargs: layer(x, **kwargs), list(args))
