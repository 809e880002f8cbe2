"""What is done to torch.nn.RMSNorm is done to ours: moved, cast, pruned, quantised, in encoders, by tools."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn.utils import parametrize, prune  # noqa: E402
from torch_arrays import randn  # noqa: E402
from torch_layers import LlamaRMSNorm, randomised  # noqa: E402

from rmsnorm.torch_impl import RMSNorm, rms_norm  # noqa: E402

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
pytestmark = [
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),  # of the built-in
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # from inside the tools
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


@pytest.mark.parametrize("shape", [8, torch.Size([3, 8])])
def test_it_says_what_the_built_in_says(shape: Any) -> None:
    for arguments in ((), (1e-3,), (None, False)):
        ours, theirs = (cls(shape, *arguments) for cls in (RMSNorm, nn.RMSNorm))
        assert isinstance(ours, nn.RMSNorm)
        assert (repr(ours), ours.__constants__) == (repr(theirs), theirs.__constants__)
        assert list(ours.state_dict()) == list(theirs.state_dict())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:rmsnorm. triton is not installed:UserWarning")
def test_result_dtypes_are_those_of_the_built_in(autocast: Any, device: str) -> None:
    """In the call after the first, too. There are fake tensors of a GPU, for which torch.autocast would stay off."""
    torch.set_autocast_enabled(device, autocast is not None)
    torch.set_autocast_dtype(device, autocast or torch.bfloat16)
    try:
        for x_dtype, weight_dtype in itertools.product(DTYPES, DTYPES):
            with FakeTensorMode(), torch.no_grad(), torch.device(device):
                x = torch.empty(2, 8, dtype=x_dtype)
                layer, theirs = (cls(8, dtype=weight_dtype) for cls in (RMSNorm, nn.RMSNorm))
                want = theirs(x).dtype
                assert layer(x).dtype == layer(x).dtype == want
                assert RMSNorm(8, variant="llama")(x).dtype == LlamaRMSNorm(8)(x).dtype
            if device == "cpu":
                layer = RMSNorm(8, dtype=weight_dtype)
                assert [layer(torch.ones(2, 8, dtype=x_dtype)).dtype for _ in range(2)] == [want] * 2
    finally:
        torch.set_autocast_enabled(device, False)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: RMSNorm(8)(torch.ones(4, 6)), ValueError, r"RMSNorm: the end of x has shape \(6,\), expected \(8,\)"),
        (lambda: RMSNorm((4, 8))(torch.ones(8)), RuntimeError, r"shape \(8,\), expected \(4, 8\) .* x being f32\[8\]"),
        (lambda: RMSNorm(()), ValueError, r"RMSNorm: normalized_shape is \(\), expected one size >= 0 or a sequence"),
        (lambda: torch.jit.script(nn.Sequential(RMSNorm(8))), TypeError, r"use torch\.compile, torch\.export"),
    ],
    ids=["width", "as the built-in layer", "no size", "jit.script"],
)
def test_errors(make: Any, error: type[Exception], words: str) -> None:
    """A wrong shape is a RuntimeError, too, as that of the built-in layer."""
    with pytest.raises(error, match=words):
        make()


def test_moves_between_dtypes() -> None:
    layer = randomised(RMSNorm(8, bias=True))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        layer.to(dtype)
        assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
        assert layer(randn(2, 8, dtype=dtype)).dtype == dtype


def test_transformers_starts_every_variant_with_a_factor_of_one(tmp_path: Any) -> None:
    """At random, and for a key that a file lacks, although it fills every class named RMSNorm with 1."""
    transformers = pytest.importorskip("transformers")
    initialization = pytest.importorskip("transformers.initialization")

    class Model(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.plain, self.gemma, self.chosen = RMSNorm(8), RMSNorm(8, variant="gemma", bias=True), RMSNorm(8)
            self.post_init()

        def _init_weights(self, module: Any) -> None:
            super()._init_weights(module)
            if module is self.chosen:
                initialization.constant_(module.weight, 0.25)

    first = {"plain.weight": 1.0, "gemma.weight": 0.0, "chosen.weight": 0.25}
    model = Model(transformers.PretrainedConfig())
    assert {name: model.state_dict()[name].unique().item() for name in first} == first
    full = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}  # a gain of 1 may be loaded
    for missing in ([], [*first], ["gemma.weight"]):
        folder = tmp_path / str(len(missing))
        model.save_pretrained(folder, state_dict={name: full[name] for name in full if name not in missing})
        loaded = Model.from_pretrained(folder).state_dict()
        want = {name: value if name in missing else 1.0 for name, value in first.items()}
        assert {name: loaded[name].unique().item() for name in first} == want


def test_meta_until_there_are_weights() -> None:
    with torch.device("meta"):
        empty = RMSNorm(8, variant="gemma", bias=True)
    assert empty(torch.empty(4, 8, device="meta")).is_meta
    x, weights = randn(3, 8), {"weight": randn(8, seed=1), "bias": randn(8, seed=2)}
    loaded, filled = copy.deepcopy(empty), empty.to_empty(device="cpu")
    loaded.load_state_dict(weights, assign=True)
    assert torch.equal(loaded(x), rms_norm(x, *weights.values(), variant="gemma"))
    filled.reset_parameters()
    assert torch.equal(filled(x), rms_norm(x, variant="gemma"))


def test_parametrized_pruned_and_back() -> None:
    layer, x = randomised(RMSNorm(8, variant="llama")), randn(4, 8)
    prune.l1_unstructured(layer, "weight", 0.5)
    assert (layer(x) == 0).all(0).sum() == 4
    layer(x).sum().backward()
    assert (layer.weight_orig.grad == 0).sum() == 4
    prune.remove(layer, "weight")
    parametrize.register_parametrization(layer, "weight", nn.Softplus(), unsafe=True)
    want = rms_norm(x, nn.functional.softplus(layer.parametrizations.weight.original), variant="llama")
    assert torch.equal(layer(x), want)
    assert torch.equal(copy.deepcopy(layer)(x), want)
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    assert type(layer) is RMSNorm
    assert torch.equal(layer(x), want)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantisation_leaves_it_alone() -> None:
    """Training for it, too: the linear layer is converted, the norm is not, and computes what it did."""
    quantization = pytest.importorskip("torch.ao.quantization")
    model = nn.Sequential(nn.Linear(8, 8), randomised(RMSNorm(8))).train()
    model.qconfig = quantization.get_default_qat_qconfig()
    prepared = quantization.prepare_qat(model)
    prepared(randn(4, 8))
    first, norm = quantization.convert(prepared.eval())
    assert "quantized" in type(first).__module__
    assert type(norm) is RMSNorm
    assert torch.equal(norm(randn(2, 8)), model[1](randn(2, 8)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")  # PyTorch's
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("bias", [None, True])
def test_the_fast_path_of_encoders_leaves_our_norms(bias: Any, norm_first: bool) -> None:
    """It would compute LayerNorm with their parameters, or fail without a bias; of padding it makes a nested tensor."""
    x, padding = randn(2, 5, 8) + 1, torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=norm_first)
    layer.norm1, layer.norm2 = (RMSNorm(8, variant="llama", partial=0.5, bias=bias) for _ in range(2))
    layer = randomised(layer).eval()
    stack = nn.TransformerEncoder(layer, 2, RMSNorm(8, variant="gemma"), enable_nested_tensor=not norm_first)
    calls: list[tuple[Any, dict[str, Any]]] = [(layer, {}), (copy.deepcopy(layer), {}), (stack, {})]
    for model, options in (*calls, (stack, {"src_key_padding_mask": padding})):
        for context in (torch.no_grad, torch.inference_mode):
            results = []
            for has_fast_path in (False, True):
                torch.backends.mha.set_fastpath_enabled(has_fast_path)
                with context():
                    results.append(model(x, **options))
            want, y = (t[~padding] if options else t for t in results)
            # half of the digits, as attention is another operator there; LayerNorm and RMSNorm differ in the first
            assert ((y - want).abs() <= torch.finfo(y.dtype).eps ** 0.5 * want.abs().max()).all()


TOOLS = {
    "by position": lambda layer, tensors: layer(*tensors),
    "a trace": lambda layer, tensors: torch.jit.trace(layer, tensors)(*tensors),
    "an exported program": lambda layer, tensors: torch.export.export(layer, tensors).module()(*tensors),
    "DataParallel": lambda layer, tensors: nn.DataParallel(layer)(*tensors),
}


def test_tools_that_pass_every_argument_by_position() -> None:
    """In the order x, mask, residual, gate."""
    layer = randomised(RMSNorm(8, bias=True))
    x, residual, gate = (randn(4, 8, seed=seed) for seed in range(3))
    mask = randn(4, 8, seed=3) > 0
    want = layer(x, mask=mask, residual=residual, gate=gate)
    for name, tool in TOOLS.items():
        for got, expected in zip(tool(layer, (x, mask, residual, gate)), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=2.0**-20, msg=name)
    with pytest.raises(TypeError, match="mask has dtype float32, expected bool"):
        layer(x, residual)
