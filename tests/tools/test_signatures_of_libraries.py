"""Functions with the signatures of libraries: a right one is checked as it is, a wrong one is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import rmsnorm
from zoo import mean_square, wide

from rmsnorm import Variant
from rmsnorm.identify import identify
from rmsnorm.parity import check
from rmsnorm.targets import open_target

pytestmark = pytest.mark.usefixtures("few_circumstances")

LLAMA_LIKE = Variant.get("standard").replace(eps=1e-3)


def inverse_rms(x: Any, eps: float) -> Any:
    return 1 / (mean_square(wide(x)) + eps) ** 0.5


def norm(x: Any, weight: Any, eps: float, wrong: bool = False) -> Any:
    gain = 1.0 if weight is None else np.asarray(weight, np.float64)
    y = np.asarray(x, np.float64) * inverse_rms(x, eps) * gain
    return (y * (1.01 if wrong else 1)).astype(x.dtype)


# By library: the signature, what the function does before its end, what it returns, and the places of a mistake, where
# ``wrong`` is the place of its own.
FIELD: dict[str, tuple[str, str, str, str]] = {
    "vllm": (
        "rms_norm(out, input, weight, epsilon)", "out[...] = norm(input, weight, epsilon, wrong == 'y')", "None", "y"
    ),
    "vllm_add": (
        "fused_add_rms_norm(input, residual, weight, epsilon)",
        "total = input + residual; input[...] = norm(total, weight, epsilon, wrong == 'y'); "
        "residual[...] = residual if wrong == 'h' else total", "None", "y h",
    ),
    "flashinfer": (
        "rmsnorm(input, weight, eps=1e-3, out=None, enable_pdl=None)", "",
        "norm(input, weight, 1e-3 if wrong == 'eps' else eps)", "eps",
    ),
    "liger": (
        "rms_norm_forward(X, W, eps, offset, casting_mode='none')",
        "rstd = inverse_rms(X, eps)[..., 0].astype(X.dtype)",
        "norm(X, W + offset, eps), X, rstd * (2 if wrong == 'rstd' else 1), 64, 4, casting_mode", "rstd",
    ),
    "quack": (
        "rmsnorm_fwd(x, weight, residual, eps=1e-3)",
        "total = x + residual; rstd = inverse_rms(x if wrong == 'rstd' else total, eps)[..., 0].astype(x.dtype)",
        "norm(total, weight, eps), total + (wrong == 'h'), rstd", "h rstd",
    ),
    "apex": (
        "rms_forward_affine(input, normalized_shape, weight, eps)", "assert tuple(normalized_shape) == weight.shape",
        "norm(input, weight, eps), inverse_rms(input, 0.1 if wrong == 'rstd' else eps).astype(input.dtype)", "rstd",
    ),
    "transformer_engine": (
        "rmsnorm_fwd(input, weight, eps, zero_centered_gamma)", "assert zero_centered_gamma is False",
        "norm(input, weight, eps, wrong == 'y'), None, inverse_rms(input, eps).reshape(-1).astype(np.float32)", "y",
    ),
    "deepspeed": (
        "pre_rms_norm(vals, residual, gamma, epsilon)", "total = vals + residual",
        "norm(total, gamma, 1e-3 if wrong == 'eps' else epsilon), total", "eps",
    ),
    "xformers": (
        "rms_norm_add(x, y, weight, eps)", "x += y; result = norm(x, weight, eps); x -= wrong == 'h'", "result", "h"
    ),
    "aiter": (
        "rmsnorm2d_fwd_with_add(out, input, residual_in, residual_out, weight, epsilon)",
        "total = input + residual_in; residual_out[...] = input if wrong == 'h' else total; "
        "out[...] = norm(total, weight, epsilon)", "None", "h",
    ),
    "mamba": (
        "rms_norm_ref(x, weight, bias, residual=None, eps=1e-3, prenorm=False, upcast=False)",
        "total = x if residual is None else x + residual; y = norm(total, weight, eps) + (0 if bias is None else bias)",
        "y if residual is None else (y, total * (2 if wrong == 'h' else 1))", "h",
    ),
    "flash_linear_attention": (
        "rms_norm_gated(x, g, weight, eps)", "z = g.astype(np.float64)",
        "(norm(x, weight, eps) * z / (1 + np.exp(-z)) * (2 if wrong == 'y' else 1)).astype(x.dtype)", "y",
    ),
    "flashinfer_cute": (
        "rmsnorm_cute(input, weight, out, M, eps, weight_bias)",
        "assert input.size == M * weight.size; "
        "out[...] = norm(input, weight + weight_bias * (1 + (wrong == 'offset')), eps)", "None", "offset",
    ),
    "tokamax": (
        "layer_norm(x, scale, offset=None, *, axis=-1, epsilon=1e-3, scale_offset=0.0)",
        "y = norm(x, scale + scale_offset, epsilon); shift = 0 if offset is None else offset",
        "y - shift if wrong == 'y' else y + shift", "y",
    ),
    "onnx": (
        "skip_simplified_layer_normalization(input, skip, gamma, epsilon)",
        "total = input + skip; inv_std = inverse_rms(total, epsilon).astype(input.dtype)",
        "norm(total, gamma, epsilon), None, inv_std, total * (2 if wrong == 'h' else 1)", "h",
    ),
    "compiled": ("rms_norm(x, weight, eps)", "", "norm(x, weight, eps, wrong == 'y')", "y"),
}  # fmt: skip
CALLS = {
    "compiled": "x, weight, eps",
    "flashinfer_cute": "x, weight, out, rows, eps, weight_bias",
    "vllm_add": "x as out, residual as h_out, weight, eps",
    "xformers": "x as h_out, residual, weight, eps",
}
VARIANTS = {
    "flash_linear_attention": LLAMA_LIKE.replace(gate_function="silu", gate_position="after"),
    "flashinfer_cute": Variant.get("gemma").replace(eps=1e-3),
}


@pytest.mark.parametrize(
    ("library", "wrong"), [(name, place) for name, row in FIELD.items() for place in (None, *row[3].split())]
)
def test_a_right_function_needs_no_adapter_and_a_wrong_one_is_found(library: str, wrong: str | None) -> None:
    signature, statements, result, _ = FIELD[library]
    space = {**globals(), "wrong": wrong}
    exec(f"def {signature}:\n    {statements or 'pass'}\n    return {result}", space)
    function = space[signature.partition("(")[0]]
    if library == "compiled":
        function.__signature__ = "none"  # as a compiled function is: its parameters are not known
    variant = VARIANTS.get(library, LLAMA_LIKE)
    found = check(function, variant, framework="numpy", dtypes="float32", call=CALLS.get(library))
    assert found.passed == (wrong is None), found.text
    if wrong == "rstd":
        assert {record.quantity for record in found.run.failures} == {"inverse_rms"}
    if wrong == "eps":
        assert "it ignores its eps" in found.text


UNTOLD = {
    "def norm(input, residual, weight, eps): pass": "it returns None, expected numpy.ndarray; return y, or say "
    "where it is written, as by --call 'x as out, residual as h_out, weight, eps'",
    "def norm(x, residual, weight, eps): x += residual; return x": "inputs written to: x",
    "def norm(params, x): pass": "requires 'params' before 'x', whose value cannot be guessed; name a function of x, "
    "of (x, weight) or of (x, weight, bias) that calls it, as lambda x, weight: norm(...)",
    "def norm(x, weight, dout, rstd): pass": "requires 'dout', whose value cannot be guessed; pass an option in init, "
    "such as --init dout=1, or name a function of x, of (x, weight) or of (x, weight, bias) that calls it",
}


@pytest.mark.parametrize("text", UNTOLD)
def test_what_is_not_called_as_it_is_says_how_it_would_be(text: str) -> None:
    space: dict[str, Any] = {}
    exec(text, space)
    try:
        said = check(space["norm"], LLAMA_LIKE, framework="numpy", dtypes="float32").details
    except ValueError as error:
        said = str(error)
    assert UNTOLD[text] in " ".join(said.split())


def layer_of(forward: Any) -> Any:
    """A class of layers of PyTorch with an eps, whose flags must keep their default."""
    torch = pytest.importorskip("torch")

    class Norm(torch.nn.Module):
        def __init__(self, dim: int, eps: float) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(dim)), eps

        def forward(self, x: Any, return_residual: Any = False, output_gate: bool = False, store_gate: Any = None):
            assert (return_residual, output_gate, store_gate) == (False, False, None)
            return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, forward(self.eps))

    return Norm


def test_eps_is_a_finding_of_identify_and_a_layer_that_ignores_it_is_found() -> None:
    obeys = identify(lambda x, weight, eps: norm(x, weight, eps), framework="numpy")
    assert (obeys.variant.eps, obeys.recognised) == (1e-6, True)
    ignores = identify(lambda x, weight, eps=1e-6: norm(x, weight, 1e-6), framework="numpy")
    assert ignores.defects == ("it ignores its eps: y is the same whatever is passed",)
    for forward, words in ((lambda eps: eps, ""), (lambda eps: 1e-3, ignores.defects[0])):
        result = check(layer_of(forward), LLAMA_LIKE, dtypes="float32", gradients=False)
        assert (result.passed, words in result.text) == (not words, True), result.text


@pytest.mark.parametrize("returns", [False, True])
def test_a_function_of_torch_gives_what_it_wrote_and_its_inputs_are_as_before(returns: bool) -> None:
    torch = pytest.importorskip("torch")

    def fused_add_rms_norm(input: Any, residual: Any, weight: Any, epsilon: float) -> Any:
        residual.add_(input)
        input.copy_(torch.nn.functional.rms_norm(residual, weight.shape, weight, epsilon))
        return (input, residual) if returns else None

    target = open_target(fused_add_rms_norm, framework="torch", call=CALLS["vllm_add"])
    x, residual = np.ones((2, 8), "float32"), np.full((2, 8), 2, "float32")
    called = target.called({"x": x, "scale": np.ones(8, "float32"), "residual": residual})
    assert np.allclose(called.y, 1)
    assert np.array_equal(called.sum, x + residual)
    assert (target.touched, target.differentiable) == (set(), False)


def test_a_compiled_function_is_called_as_the_command_says(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import numpy as np\n"
        "def norm(out, x, weight, eps, /):\n"
        "    h = x.astype('float64')\n"
        "    out[...] = h / np.sqrt((h * h).mean(-1, keepdims=True) + eps) * weight\n"
        "norm.__signature__ = 'none'\n"
    )
    asked = [f"{tmp_path}/own.py:norm", "--framework", "numpy", "--call", "out, x, weight, eps"]
    assert rmsnorm("check", *asked, "--dtype", "float32", "--eps", "1e-3").exit_code == 0
    assert "variant standard" in rmsnorm("identify", *asked).stdout
    for wrong in ("out, 1x", "x as y, weight"):
        with pytest.raises(ValueError, match=f"has call '{wrong}', expected the arguments in their order"):
            open_target(norm, framework="numpy", call=wrong)
