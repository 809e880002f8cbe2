"""What PyTorch alone has around its layer: autocast, transformers, forms of the shape.

What it promises as the layers of the other frameworks do is in tests/layers.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

import rmsnorm

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch_arrays import randn  # noqa: E402
from torch_layers import LlamaRMSNorm, randomised, ulp_bound  # noqa: E402

from rmsnorm.torch_impl import RMSNorm, private, rms_norm  # noqa: E402

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MPS = pytest.param("mps", marks=pytest.mark.needs("torch!=2.6.*", "whose built-in takes no fake tensors of mps"))


@pytest.mark.parametrize("shape", [8, (8,), [8], torch.Size([3, 8]), (2, 3, 8)])
def test_it_says_what_the_built_in_says(shape: Any) -> None:
    for arguments in ((), (1e-3,), (None, False)):
        ours, theirs = (cls(shape, *arguments) for cls in (RMSNorm, nn.RMSNorm))
        assert isinstance(ours, nn.RMSNorm)
        for name in ("normalized_shape", "eps", "elementwise_affine", "__constants__"):
            assert getattr(ours, name) == getattr(theirs, name)
        assert repr(ours) == repr(theirs)
        assert list(ours.state_dict()) == list(theirs.state_dict())


def test_an_eps_that_is_set_later_counts() -> None:
    layer, x = randomised(RMSNorm((3, 8), 1e-2, partial=0.3, variant="llama")), randn(4, 3, 8)
    layer(x)
    layer.eps = 1.0
    assert torch.equal(layer(x), rms_norm(x, layer.weight, variant="llama", eps=1.0, partial=0.3, axis=(1, 2)))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # the built-in's
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_result_dtypes_are_those_of_the_built_in(autocast: Any) -> None:
    for x_dtype, weight_dtype in itertools.product(DTYPES, DTYPES):
        x, layers = randn(2, 8, dtype=x_dtype), [cls(8, dtype=weight_dtype) for cls in (RMSNorm, nn.RMSNorm)]
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            ours, again, theirs = layers[0](x), layers[0](x), layers[1](x)
        assert ours.dtype == again.dtype == theirs.dtype


@contextlib.contextmanager
def autocast_on(device: str) -> Iterator[None]:
    """Also on a device that is not there, of fake tensors: torch.autocast would stay off."""
    try:
        torch.set_autocast_enabled(device, True)
    except RuntimeError:
        pytest.skip(f"PyTorch {torch.__version__} has no autocast of {device}")
    try:
        with FakeTensorMode(), torch.no_grad():
            yield
    finally:
        torch.set_autocast_enabled(device, False)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # the built-in's
@pytest.mark.filterwarnings("ignore:rmsnorm. triton is not installed:UserWarning")
@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", MPS, "mtia"])
def test_autocast_of_every_device_gives_the_dtypes_of_the_built_in(device: str) -> None:
    """Those of which there can be a fake tensor. LLaMA's class has no such list."""
    for x_dtype, weight_dtype in itertools.product(DTYPES, DTYPES):
        with autocast_on(device):
            x = torch.empty(2, 8, dtype=x_dtype, device=device)
            layers = [cls(8, dtype=weight_dtype, device=device) for cls in (RMSNorm, nn.RMSNorm)]
            ours, theirs = (layer(x) for layer in layers)
            with torch.device(device):
                llamas = [layer(x) for layer in (RMSNorm(8, variant="llama"), LlamaRMSNorm(8))]
        assert ours.dtype == theirs.dtype
        assert llamas[0].dtype == llamas[1].dtype


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inside the compiler
def test_autocast_of_other_devices_in_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device whose built-in layer has float32 results, with the state of autocast at each call."""
    monkeypatch.setattr(private, "is_widened", lambda device: True)
    layer, x = RMSNorm(8), randn(4, 8, dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for enabled in (False, True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            y = compiled(x)
        want = RMSNorm(8)(x.float() if enabled else x)
        assert y.dtype == want.dtype
        assert ((y - want).abs() <= ulp_bound(8, y.dtype) * want.abs()).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inside the compiler
def test_autocast_trains() -> None:
    """Eagerly and compiled."""
    model, found = nn.Sequential(nn.Linear(8, 8), RMSNorm(8), nn.Linear(8, 1)), []
    for each in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = each(randn(4, 8))
        y.sum().backward()
        assert y.dtype == torch.bfloat16
        assert all(p.grad.dtype == torch.float32 and p.grad.abs().sum() > 0 for p in model.parameters())
        model.zero_grad()
        found.append(y)
    assert torch.equal(*found)


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


def test_repr_shows_what_differs() -> None:
    shown = repr(RMSNorm((2, 8), 1e-5, bias=True, partial=0.5, variant="llama"))
    assert shown == "RMSNorm((2, 8), eps=1e-05, elementwise_affine=True, bias=True, partial=1/2, variant='llama')"
    assert repr(RMSNorm(8, variant="equinox")) == "RMSNorm((8,), eps=1e-05, elementwise_affine=True, variant='equinox')"


def test_state_dicts_of_other_classes() -> None:
    x, theirs, ours = randn(4, 8), randomised(LlamaRMSNorm(8)), RMSNorm(8, variant="llama")
    assert ours.load_state_dict(theirs.state_dict(), strict=True)
    assert ((ours(x) - theirs(x)).abs() <= ulp_bound(8, torch.float32) * theirs(x).abs()).all()
    theirs.load_state_dict(randomised(ours, seed=5).state_dict(), strict=True)
    assert torch.equal(ours.weight, theirs.weight)
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        RMSNorm(8, bias=True).load_state_dict(nn.RMSNorm(8).state_dict())
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        RMSNorm(8).load_state_dict(nn.RMSNorm(6).state_dict())


def test_llama_bit_for_bit_in_bf16() -> None:
    """The rounding of a variant is that of the class it is named after: float32 inside hardly ever shows in 8 bits."""
    x, theirs = randn(64, 256, dtype=torch.bfloat16), randomised(LlamaRMSNorm(256)).bfloat16()
    for variant, least, most in (("llama", 0.999, 1.0), ("torch", 0.5, 0.9)):
        ours = RMSNorm(256, 1e-6, dtype=torch.bfloat16, variant=variant)
        ours.load_state_dict(theirs.state_dict())
        assert least <= (ours(x) == theirs(x)).double().mean() <= most


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: RMSNorm(8)(torch.ones(4, 6)),
            ValueError,
            r"RMSNorm: the end of x has shape \(6,\), expected \(8,\) to ma",
        ),
        (lambda: RMSNorm((4, 8))(torch.ones(8)), ValueError, r"shape \(8,\), expected \(4, 8\) .* x being f32\[8\]"),
        (lambda: RMSNorm(8)(torch.tensor(1.0)), ValueError, r"the end of x has shape \(\), expected \(8,\)"),
        (lambda: RMSNorm(8)([1.0]), TypeError, r"x is \[1.0\] \(list\), expected a torch.Tensor"),
        (lambda: RMSNorm(()), ValueError, r"RMSNorm: normalized_shape is \(\), expected one size >= 0 or a sequence"),
        (lambda: RMSNorm(3.5), ValueError, "normalized_shape is 3.5, expected one size"),
        (lambda: RMSNorm((4, -1)), ValueError, r"normalized_shape is \(4, -1\), expected one size"),
    ],
)
def test_errors(make: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        make()
