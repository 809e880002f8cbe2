"""PyTorch's own requirements on an operator and on a module, as its test suites state them, on ours.

torch.testing._internal carries the samples, references and error inputs of rms_norm and nn.RMSNorm; its test classes
(test_ops.py, test_modules.py, test_ops_gradients.py) are not installed, and what they require is written here afresh.
What does not apply:

- eps < 0, of one sample: out of the domain here, a ValueError;
- complex dtypes, which the operator lists: rejected here, there x^2 stands for |x|^2;
- the reference's default eps for 16 bits, machine eps of the input dtype, where the operator takes that of f32;
- check_inplace, jit.script: there is no variant in place, and scripting is deprecated in favour of export;
- cpu against gpu, multiple devices: need an accelerator.
"""

from __future__ import annotations

import copy
import pickle
from functools import cache
from typing import Any

import numpy as np
import pytest

from rmsnorm.specification import dtypes

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest")
from torch_arrays import are_alike  # noqa: E402
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
    (refused,) = (sample for sample in found if (sample.kwargs.get("eps") or 0) < 0)
    with pytest.raises(ValueError, match=r"eps is -0\.5, expected a finite number >= 0"):
        torch_rms_norm(refused.input, *refused.args, **refused.kwargs)
    assert len(kept) == 5
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
    """test_ops, test_errors: of the function and of the layer. The words are ours.

    The third does not apply to the function, which is given axes and no sizes.
    """
    of_function = (r"axis is empty, expected at least one", r"scale has shape \(1, 2\), expected \(1, 2, 3\)", "")
    of_layer = (r"normalized_shape is \(\), expected one size", r"expected \(1, 2, 3\)", r"expected \(2, 2\)")
    for error, words, words_of_layer in zip(operator_info().error_inputs("cpu"), of_function, of_layer, strict=True):
        x, (shape, weight, eps) = error.sample_input.input, error.sample_input.args
        if words:
            with pytest.raises(ValueError, match=words):
                torch_rms_norm(x, shape, weight, eps)
        with pytest.raises(ValueError, match=words_of_layer):
            torch.func.functional_call(RMSNorm(shape, eps), {} if weight is None else {"weight": weight}, (x,))


@pytest.mark.parametrize("dtype", dtypes.FLOATS)
def test_the_samples_of_pytorch(dtype: str) -> None:
    """test_ops, test_reference_testing: numbers as its reference has, dtype, shape and strides as its operator has."""
    from torch.testing._internal.common_methods_invocations import reference_rms_norm

    for sample in samples(getattr(torch, dtype)):
        got, eps = torch_rms_norm(sample.input, *sample.args, **sample.kwargs), sample.kwargs.get("eps")
        if eps is None:
            eps = torch.finfo(torch.float64 if dtype == "float64" else torch.float32).eps
        x, *weight = (t.detach().double().numpy() for t in (sample.input, *sample.args[1:]))
        want = reference_rms_norm(x, sample.args[0], *weight, eps=eps)
        # the reference rounds a dozen times in float64, the result once
        u = 2 * dtypes.unit_roundoff(dtype) if dtype != "float64" else 12 * 2.0**-53
        np.testing.assert_allclose(got.detach().double().numpy(), want, rtol=u, atol=0)
        built_in = torch.nn.functional.rms_norm(sample.input, *sample.args, **sample.kwargs)
        assert (got.dtype, got.shape) == (built_in.dtype, built_in.shape)
        assert got.stride() == built_in.stride() or not got.numel()


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
    """A compiled function has the outputs and gradients of the function, but for roundings of terms of about 1."""
    torch._dynamo.reset()  # each sample is a program of its own
    results = []
    for run in (function, torch.compile(function, fullgraph=True, backend=backend)):
        own = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        y = run(*own)
        results.append([y, *torch.autograd.grad(y.sum(), own, allow_unused=True)])
    for got, want in zip(*results, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            ends = want.detach().flatten().abs().amax(keepdim=True).clamp(min=1) if want.numel() else want.detach()
            assert are_alike(*(torch.cat([t.detach().flatten(), ends.flatten()]) for t in (got, want)))
            assert got.stride() == want.stride()


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
