"""recipe.py in PyTorch's operations against the golden: transformed, and compiled; and its roundings."""

from __future__ import annotations

from typing import Any

import pytest
from kit import FEW, failures
from options import hard_to_round

from rmsnorm.parity.cases import Data, select
from rmsnorm.parity.judge import Implementation, Outcome
from rmsnorm.specification import dtypes

torch = pytest.importorskip("torch")
from torch_arrays import to_numpy, to_torch  # noqa: E402

from rmsnorm.torch_impl import rms_norm, space  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning"),  # forward_ad's own
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),  # from inside the compiler
]
INPUTS = ("x", "scale", "bias", "residual", "gate")


def inputs_of(data: Data) -> dict[str, Any]:
    # forward mode of torch.func takes no expanded tensor, whatever the function
    return {name: to_torch(getattr(data, name)).contiguous() for name in INPUTS if getattr(data, name) is not None}


def by_transforms(data: Data) -> Outcome:
    """y and its derivatives by torch.func."""
    inputs, directions = inputs_of(data), dict(zip(INPUTS, data.tangents, strict=False))
    options = {**data.options, "mask": to_torch(data.mask), "return_inverse_rms": True}

    def function(*values: Any) -> Any:
        *outputs, inverse_rms = rms_norm(**dict(zip(inputs, values, strict=True)), **options)
        return tuple(outputs), inverse_rms

    tangents = tuple(
        torch.zeros_like(value) if directions.get(name) is None else to_torch(directions[name])
        for name, value in inputs.items()
    )
    outputs, pull_back, inverse_rms = torch.func.vjp(function, *inputs.values(), has_aux=True)
    gradients = pull_back(tuple(to_torch(v) for v in (data.dy, data.dh) if v is not None))
    with torch.no_grad():  # which must not hide the mask from a forward derivative
        jvp = torch.func.jvp(lambda *values: function(*values)[0][0], tuple(inputs.values()), tangents)[1]
    results = {"y": outputs[0], "inverse_rms": inverse_rms, "jvp": jvp}
    results |= {f"d{name}": gradient for name, gradient in zip(inputs, gradients, strict=True)}
    return Outcome({name: [to_numpy(value)] for name, value in results.items()})


def by_inductor(data: Data) -> Outcome:
    """y, 1 / rho and the gradients, of a program that Inductor wrote."""
    torch._dynamo.reset()
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs_of(data).items()}
    mask = to_torch(data.mask)
    compiled = torch.compile(lambda **tensors: rms_norm(**tensors, **data.options, return_inverse_rms=True))
    *outputs, inverse_rms = compiled(**leaves, mask=mask)
    upstream = [to_torch(v) for v in (data.dy, data.dh) if v is not None]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), upstream)
    results = {"y": outputs[0].detach(), "inverse_rms": inverse_rms}
    results |= {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return Outcome({name: [to_numpy(value)] for name, value in results.items()})


def holds(implementation: Implementation, combinations: Any) -> None:
    failed, _ = failures(implementation, combinations)
    failed = [each for each in failed if "jvp: not computed" not in each or implementation is by_transforms]
    assert not failed, "\n".join([f"{len(failed)} verdicts:", *failed[:20]])


@pytest.mark.parametrize("dtype", dtypes.FLOATS)
def test_what_transforms_derive_is_the_goldens(dtype: str) -> None:
    holds(by_transforms, select(types=(dtype,), brief=True))


@pytest.mark.parametrize("dtype", dtypes.FLOATS)
def test_compiled_programs_are_the_goldens(dtype: str) -> None:
    """Also in bits, where the variant rounds in between: Inductor leaves out casts to 16 bits and back."""
    holds(by_inductor, [run for run in FEW if run[2] == dtype])


@pytest.mark.parametrize("dtype", dtypes.HALF)
def test_a_rounding_without_a_cast_has_the_bits_of_one(dtype: str) -> None:
    """Up to ties, which go to either neighbour, but of subnormal numbers of bfloat16 and of those above 2^110."""
    target, powers = getattr(torch, dtype), torch.arange(-40, 16).float().exp2()[:, None]
    values = torch.cat([
        torch.from_numpy(hard_to_round(dtype)).float(), (powers * torch.linspace(-2, 2, 501)).flatten(),
        torch.tensor([0.0, -0.0, 65519.0, -65521.0, torch.inf, torch.nan]),
    ])  # fmt: skip
    values = values[((values.abs() < 2.0**110) & (values.abs() > 2.0**-126)) | values.isnan() | (values == 0)]
    got, want = space._rounded_by_sums(values, dtype), values.to(target).float()
    near = want.double() - values.double()
    is_tie = (got.double() - values.double() == -near) & (got.to(target).float() == got)
    assert (is_tie | (got == want) | (got.isnan() & want.isnan())).all()
    assert is_tie[near != 0].double().mean() < 0.1


@pytest.mark.parametrize("dtype", dtypes.HALF)
def test_a_rounding_is_the_identity_to_derivatives(dtype: str) -> None:
    values = torch.tensor([1.0, -0.3, 1e-9, 3e38, 0.0, -0.0, torch.inf, torch.nan])
    direction = torch.full_like(values, 1 + 2.0**-20)
    value, tangent = torch.func.jvp(lambda a: space.rounded(a, dtype), (values,), (direction,))
    want = values.to(getattr(torch, dtype)).float()
    assert torch.equal(value.nan_to_num(7), want.nan_to_num(7))
    assert torch.equal(value[:7].signbit(), want[:7].signbit())
    assert torch.equal(tangent[:6], direction[:6])
    leaf = values.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(space.rounded(leaf, dtype), leaf, direction)[0][:6], direction[:6])
