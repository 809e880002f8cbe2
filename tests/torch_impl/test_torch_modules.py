"""What is done to torch.nn.RMSNorm is done to ours: moved, parametrized, quantised, traced, in workers and threads."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn.utils import parametrize, prune  # noqa: E402
from torch_arrays import randn  # noqa: E402
from torch_layers import randomised  # noqa: E402

from rmsnorm.torch_impl import RMSNorm, rms_norm  # noqa: E402


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


@pytest.mark.parametrize("swapping", [False, True])  # the way of module.to that keeps the parameter objects
def test_moves_between_dtypes(swapping: bool) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        layer = randomised(RMSNorm(8, bias=True))
        weight = layer.weight
        torch.__future__.set_swap_module_params_on_conversion(swapping)
        try:
            layer.to(dtype)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert layer.weight is weight
        assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
        assert layer(randn(2, 8, dtype=dtype)).dtype == dtype


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


def static(model: Any, quantization: Any) -> Any:
    model.eval().qconfig = quantization.get_default_qconfig()
    prepared = quantization.prepare(model)
    prepared(randn(4, 8))
    return quantization.convert(prepared)


def dynamic(model: Any, quantization: Any) -> Any:
    return quantization.quantize_dynamic(model.eval(), {nn.Linear})


def graph(model: Any, quantization: Any) -> Any:
    from torch.ao.quantization import quantize_fx

    mapping = quantization.get_default_qconfig_mapping()
    prepared = quantize_fx.prepare_fx(model.eval(), mapping, (randn(4, 8),))
    prepared(randn(4, 8))
    return quantize_fx.convert_fx(prepared)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("way", [qat, static, dynamic, graph])
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


def test_a_symbolic_trace_has_one_node() -> None:
    """torch.fx takes the layer as a leaf, as it takes the built-in, with a mask and a residual if there are any."""

    class Block(nn.Module):
        def __init__(self, cls: Any) -> None:
            super().__init__()
            self.norm, self.linear = randomised(cls(8)), randomised(nn.Linear(8, 8))

        def forward(self, x: Any) -> Any:
            return x + self.linear(self.norm(x))

    class Added(Block):
        def forward(self, x: Any, residual: Any, mask: Any) -> Any:
            y, h = self.norm(x, residual=residual, mask=mask)
            return h + self.linear(y)

    ours, theirs = (torch.fx.symbolic_trace(Block(cls)) for cls in (RMSNorm, nn.RMSNorm))
    assert ours.code == theirs.code
    assert torch.equal(ours(randn(4, 8)), Block(RMSNorm)(randn(4, 8)))
    given = randn(4, 8), randn(4, 8, seed=1), randn(4, 8, seed=2) > 0
    block = Added(RMSNorm)
    assert torch.equal(torch.fx.symbolic_trace(block)(*given), block(*given))
    alone = torch.fx.symbolic_trace(block.norm)  # the root is no leaf: the function is a node, with the layer's gain
    assert torch.equal(alone(given[0]), block.norm(given[0]))
    assert list(alone.state_dict()) == ["weight"]


@pytest.mark.parametrize("options", [{}, {"variant": "gemma", "eps": 1e-3, "partial": Fraction(1, 3), "axis": (0, 1)}])
def test_a_symbolic_trace_has_the_function_as_a_node(options: Any) -> None:
    function = lambda x, residual, mask: rms_norm(x, residual=residual, mask=mask, **options)  # noqa: E731
    tensors = randn(4, 8), randn(4, 8, seed=1), randn(4, 8, seed=2) > 0
    traced = pickle.loads(pickle.dumps(torch.fx.symbolic_trace(function)))
    assert all(map(torch.equal, traced(*tensors), function(*tensors)))


class Rows(torch.utils.data.Dataset):
    """Rows that a layer has normalised in whichever process reads them."""

    def __init__(self, layer: Any, x: Any) -> None:
        self.layer, self.x = layer, x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        leaf = self.x[index].clone().requires_grad_()
        y = self.layer(leaf)
        y.square().sum().backward()
        return y.detach(), leaf.grad


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork.* was called:RuntimeWarning")  # another test of this process used JAX
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers(method: str) -> None:
    """The parent has used the layer and its threads before; what its workers give is the same bits."""
    if method not in torch.multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    layer, x = randomised(RMSNorm(1025)), randn(4, 2100, 1025)
    rows = Rows(layer, x[:, :1100])
    want = [torch.stack(each) for each in zip(*(rows[i] for i in range(4)), strict=True)]
    large = x[0].clone().requires_grad_()
    layer(large).sum().backward()  # by several threads
    for _ in range(2):
        loader = torch.utils.data.DataLoader(
            rows, batch_size=2, num_workers=2, multiprocessing_context=method, timeout=60
        )
        found = [torch.cat(each) for each in zip(*loader, strict=True)]
        assert all(torch.equal(got, each) for got, each in zip(found, want, strict=True))
        if method == "spawn":
            break


def test_sixteen_threads_and_one_layer() -> None:
    """Forward and backward at once, small and large calls, in every dtype: nobody gets what is another's."""
    layer, given = randomised(RMSNorm(512, variant="llama")), {}
    for dtype, rows in ((torch.bfloat16, 2), (torch.float32, 64), (torch.float64, 64), (torch.bfloat16, 4200)):
        x = randn(rows, 512, dtype=dtype)
        given[dtype, rows] = x, randn(rows, 512, dtype=layer(x).dtype, seed=1)
    calls = list(given)

    def run(call: Any, shift: int) -> Any:
        x, dy = given[call]
        leaf = x.roll(shift, 0).requires_grad_()
        y = layer(leaf)
        return [*torch.autograd.grad(y, (leaf, layer.weight), dy), y.clone()]

    want = {(call, shift): run(call, shift) for call in calls for shift in range(4)}

    def wrong(index: int) -> list[Any]:
        own = [(calls[(index + step) % len(calls)], index % 4) for step in range(len(calls))]
        return [call for call in own if not all(map(torch.equal, run(*call), want[call]))]

    with ThreadPoolExecutor(16) as pool:  # none waits for another
        assert list(pool.map(wrong, range(16), timeout=120)) == [[]] * 16


def test_more_than_there_is_memory_for() -> None:
    """An error of PyTorch's own, and the next call is right."""
    layer, x = randomised(RMSNorm(8)), randn(1, 8)
    want = layer(x)
    for graph in (False, True):
        with (
            torch.set_grad_enabled(graph),
            pytest.raises(RuntimeError, match=r"can't allocate memory|not enough memory"),
        ):
            layer(x.expand(2**43, 8))
        assert torch.equal(layer(x), want)


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
@pytest.mark.parametrize("options", [{"eps": 1e-5}, {}, {"variant": "gemma"}, {"variant": "llama", "partial": 0.5}])
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inside the compiler
def test_a_compiled_encoder() -> None:
    layer = with_our_norms("encoder", False, bias=True, eps=1e-5)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert close(compiled(randn(2, 5, 8)), without_fast_path(layer, randn(2, 5, 8)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_nested_tensors_without_gaps() -> None:
    """Of the strided layout, which PyTorch's stack of encoders makes; tests of transforms have the jagged one."""
    layer, parts = randomised(RMSNorm(8)), [randn(3, 8), randn(5, 8, seed=1)]
    layer(parts[0])
    nested = torch.nested.nested_tensor(parts, requires_grad=True)
    y = layer(nested)
    torch.nested.to_padded_tensor(y, 0.0).square().sum().backward()
    for got, slope, part in zip(y.unbind(), nested.grad.unbind(), parts, strict=True):
        leaf = part.clone().requires_grad_()
        layer(leaf).square().sum().backward()
        assert torch.equal(got, layer(part))
        assert torch.equal(slope, leaf.grad)


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
