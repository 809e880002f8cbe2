"""What PyTorch and transformers do to modules is done to ours: pruned, quantised, in encoders, workers and tools."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import rmsnorm

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn.utils import parametrize, prune  # noqa: E402
from torch_arrays import randn  # noqa: E402
from torch_layers import randomised  # noqa: E402

from rmsnorm.torch_impl import RMSNorm, rms_norm  # noqa: E402


def test_transformers_starts_every_variant_with_a_factor_of_one(tmp_path: Any) -> None:
    """At random, and for a key that a file lacks, although it fills every class named RMSNorm with 1."""
    transformers = pytest.importorskip("transformers")
    initialization = pytest.importorskip("transformers.initialization")
    half = rmsnorm.Variant.get("llama").replace(scale_offset=0.5)
    want = {"plain": 1.0, "gemma": 0.0, "tied": 0.0, "middle": 0.5, "chosen": 0.25}

    class GemmaRMSNorm(RMSNorm):
        def __init__(self) -> None:
            super().__init__(8, variant="gemma", bias=True)

    class Model(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig
        _tied_weights_keys: Any = {"tied.weight": "gemma.weight"}  # noqa: RUF012

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.plain, self.gemma, self.tied, self.none = (
                RMSNorm(8), GemmaRMSNorm(), GemmaRMSNorm(), RMSNorm(8, elementwise_affine=False, variant="gemma"),
            )  # fmt: skip
            self.middle, self.chosen = (RMSNorm(8, variant=half) for _ in range(2))
            self.post_init()

        def _init_weights(self, module: Any) -> None:
            super()._init_weights(module)
            if module is self.chosen:
                initialization.constant_(module.weight, 0.25)

    model = Model(transformers.PretrainedConfig(tie_word_embeddings=True))
    with torch.device("meta"):
        assert Model(model.config).gemma.weight.is_meta
    full = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}  # a gain of 1 may be loaded
    lacking = [{}, {f"{name}.weight": name for name in want}, {"middle.weight": "middle"}]
    for missing in lacking:
        folder = tmp_path / str(len(missing))
        model.save_pretrained(folder, state_dict={name: full[name] for name in full if name not in missing})
        loaded = Model.from_pretrained(folder)
        assert loaded.tied.weight is loaded.gemma.weight
        for name in want:
            expected = want[name] if f"{name}.weight" in missing else 1.0
            assert torch.equal(getattr(loaded, name).weight, torch.full((8,), expected))
    for name, expected in want.items():
        assert torch.equal(getattr(model, name).weight, torch.full((8,), expected))
        assert copy.deepcopy(model).get_submodule(name)._is_hf_initialized


def test_meta_until_there_are_weights() -> None:
    with torch.device("meta"):
        model = nn.Sequential(RMSNorm(8, variant="gemma", bias=True), nn.Linear(8, 2))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model[0](torch.empty(4, 8, device="meta")).shape == (4, 8)
    weights = {name: randn(*each.shape, seed=i) for i, (name, each) in enumerate(model.state_dict().items())}
    loaded, emptied = copy.deepcopy(model), model.to_empty(device="cpu")
    loaded.load_state_dict(weights, assign=True)
    want = rms_norm(randn(3, 8), weights["0.weight"], weights["0.bias"], variant="gemma")
    assert torch.equal(loaded[0](randn(3, 8)), want)
    emptied[0].reset_parameters()
    assert torch.equal(emptied[0](randn(4, 8)), rms_norm(randn(4, 8), variant="gemma"))
    skipped = nn.utils.skip_init(RMSNorm, 8, variant="gemma")
    assert (skipped.weight.shape, skipped.weight.device.type) == ((8,), "cpu")


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
    with parametrize.cached():
        assert torch.equal(layer(x), want)
    assert isinstance(pickled := copy.deepcopy(layer), RMSNorm)
    assert torch.equal(pickled(x), want)
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    assert type(layer) is RMSNorm
    assert torch.equal(layer(x), want)
    assert list(layer.state_dict()) == ["weight"]


def qat(model: Any, quantization: Any) -> Any:
    model.train().qconfig = quantization.get_default_qat_qconfig()
    prepared = quantization.prepare_qat(model)
    prepared(randn(4, 8))
    return quantization.convert(prepared.eval())


def dynamic(model: Any, quantization: Any) -> Any:
    return quantization.quantize_dynamic(model.eval(), {nn.Linear})


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("way", [qat, dynamic])
def test_quantisation_leaves_it_alone(way: Any) -> None:
    """As it leaves the built-in: the linear layer is converted, the norm is not, and computes what it did."""
    quantization = pytest.importorskip("torch.ao.quantization")
    codes = []
    for cls in (RMSNorm, nn.RMSNorm):
        torch.manual_seed(0)
        norm = randomised(cls(8))
        model = way(nn.Sequential(nn.Linear(8, 8), norm), quantization)
        first, left = (model.get_submodule(name) for name in "01")
        assert "quantized" in type(first).__module__
        assert type(left) is cls
        assert list(left.state_dict()) == ["weight"]
        assert torch.equal(left(randn(2, 8)), norm(randn(2, 8)))
        codes.append(getattr(model, "code", ""))
    assert codes[0] == codes[1]


LAYERS = {"encoder": nn.TransformerEncoderLayer, "decoder": nn.TransformerDecoderLayer}


def with_our_norms(kind: str, norm_first: bool, **options: Any) -> Any:
    layer = LAYERS[kind](8, 2, 16, 0.0, batch_first=True, norm_first=norm_first)
    for name, _ in list(layer.named_children()):
        if name.startswith("norm"):
            setattr(layer, name, RMSNorm(8, **options))
    return randomised(layer).eval()


def without_fast_path(model: Any, *inputs: Any, **named: Any) -> Any:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return model(*inputs, **named)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def close(y: Any, want: Any) -> bool:
    """As attention is another operator there: half of the digits, where LayerNorm and RMSNorm differ in the first."""
    return bool(((y - want).abs() <= torch.finfo(y.dtype).eps ** 0.5 * want.abs().max()).all())


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("bias", [None, True])
@pytest.mark.parametrize("options", [{"eps": 1e-5}, {"variant": "llama", "partial": 0.5}])
def test_the_fast_path_of_encoders_leaves_our_norms(options: Any, bias: Any, norm_first: bool) -> None:
    """It would compute LayerNorm with their parameters, or fail without a bias."""
    x, memory = randn(2, 5, 8) + 1, randn(2, 3, 8, seed=1)
    for kind in LAYERS:
        layer = with_our_norms(kind, norm_first, bias=bias, **options)
        inputs = (x, memory) if kind == "decoder" else (x,)
        for each in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            with torch.no_grad():
                want = without_fast_path(each, *inputs)
                assert close(each(*inputs), want)
            with torch.inference_mode():
                assert close(each(*inputs), want)
        assert list(layer.norm1.state_dict()) == ["weight", "bias"][: 2 if bias else 1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")  # PyTorch's
@pytest.mark.parametrize("bias", [None, True])
def test_a_stack_of_encoders_with_padding(bias: Any) -> None:
    """PyTorch makes a nested tensor of the rows that are no padding."""
    x, padding = randn(2, 5, 8) + 1, torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    stack = nn.TransformerEncoder(with_our_norms("encoder", False, bias=bias), 2, RMSNorm(8, variant="gemma"))
    for inputs in ({}, {"src_key_padding_mask": padding}):
        with torch.no_grad():
            want = without_fast_path(stack, x, **inputs)
            y = stack(x, **inputs)
        assert stack.use_nested_tensor
        assert close(*((t[~padding] if inputs else t) for t in (y, want)))


def _exported_with_hooks(layer: Any, tensors: Any) -> Any:
    hooked = copy.deepcopy(layer)
    hooked.register_forward_pre_hook(lambda module, arguments: tensors)
    return hooked(tensors[0])


def _stacked(layer: Any, tensors: Any) -> Any:
    parameters, buffers = torch.func.stack_module_state([layer, copy.deepcopy(layer)])
    run = lambda p, b: torch.func.functional_call(layer, (p, b), tensors)  # noqa: E731
    return tuple(result[1] for result in torch.vmap(run)(parameters, buffers))


TOOLS = {
    "by position": lambda layer, tensors: layer(*tensors),
    "a hook": _exported_with_hooks,
    "a trace": lambda layer, tensors: torch.jit.trace(layer, tensors)(*tensors),
    "an exported program": lambda layer, tensors: torch.export.export(layer, tensors).module()(*tensors),
    "DataParallel": lambda layer, tensors: nn.DataParallel(layer)(*tensors),
    "checkpoint": lambda layer, tensors: torch.utils.checkpoint.checkpoint(
        layer, tensors[0].clone().requires_grad_(), *tensors[1:], use_reentrant=True
    ),
    "functional_call": lambda layer, tensors: torch.func.functional_call(
        layer, dict(layer.named_parameters()), tensors
    ),
    "stacked layers": _stacked,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", TOOLS)
def test_tools_that_pass_every_argument_by_position(name: str) -> None:
    """In the order x, mask, residual, gate."""
    layer = randomised(RMSNorm(8, bias=True))
    x, residual, gate = (randn(4, 8, seed=seed) for seed in range(3))
    mask = randn(4, 8, seed=3) > 0
    want = layer(x, mask=mask, residual=residual, gate=gate)
    for got, expected in zip(TOOLS[name](layer, (x, mask, residual, gate)), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=2.0**-20)
    with pytest.raises(TypeError, match="mask has dtype float32, expected bool"):
        layer(x, residual)
    with pytest.raises(TypeError, match="residual has dtype bool, expected float16, bfloat16, float32 or float64"):
        layer(x, None, mask)
