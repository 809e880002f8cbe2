"""The fixture `rmsnorm_parity` and `rmsnorm.parity.check`: right verdicts on other code, and clear messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rmsnorm import PRESETS, Variant, numpy_impl
from rmsnorm.numpy_impl import fast
from rmsnorm.parity import check, report


def _pytest(folder: Path, *arguments: str, **environment: str) -> Any:
    """Runs pytest in a user's project."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **environment},
    )  # fmt: skip


def _loaded(folder: Path, *arguments: str) -> set[str]:
    (folder / "test_empty.py").write_text("def test_nothing():\n    pass\n")
    (folder / "conftest.py").write_text(
        "import json, pathlib, sys\n\n"
        "def pytest_unconfigure():\n"
        "    pathlib.Path('loaded.json').write_text(json.dumps(sorted(sys.modules)))\n"
    )
    done = _pytest(folder, "--collect-only", *arguments, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return set(json.loads((folder / "loaded.json").read_text()))


def test_a_session_that_does_not_use_it_loads_nothing(tmp_path: Path) -> None:
    with_it = _loaded(tmp_path, "-p", "rmsnorm.parity.pytest_plugin")
    without = _loaded(tmp_path)
    ours = {name for name in with_it - without if not name.startswith("rmsnorm")}
    assert "rmsnorm.parity.pytest_plugin" in with_it
    assert not {name.split(".")[0] for name in ours} & {"numpy", "ml_dtypes", "rich", "torch", "jax", "tensorflow"}
    assert {name for name in with_it if name.startswith("rmsnorm.parity")} == {
        "rmsnorm.parity", "rmsnorm.parity.pytest_plugin",
    }  # fmt: skip
    assert "numpy" in _loaded(tmp_path, "-p", "rmsnorm.parity.checking"), "the test can see what is loaded"


PROJECT = """
import numpy as np

def mine(x, weight):
    wide = x.astype(np.float64)
    return (wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * weight.astype(np.float64)).astype(x.dtype)

def test_right(rmsnorm_parity):
    report = rmsnorm_parity(mine, variant="transformer_engine", framework="numpy", dtypes="float32")
    assert report.passed

def test_wrong(rmsnorm_parity):
    rmsnorm_parity(mine, variant="standard", framework="numpy", dtypes="float32")

def test_mistaken(rmsnorm_parity):
    rmsnorm_parity(mine, variant="standrad")
"""


def test_a_users_test(tmp_path: Path) -> None:
    """pytest loads the plugin by its entry point. A failure shows the report without a traceback, in JUnit too."""
    (tmp_path / "test_mine.py").write_text(PROJECT)
    done = _pytest(tmp_path, "--junitxml", "parity.xml")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 1 passed" in done.stdout
    text = (tmp_path / "parity.xml").read_text()
    for output in (done.stdout, text):
        assert "test_mine:mine is not standard: " in output
        assert "'rows' f32 y: at (" in output
    assert "parity ratio" in done.stdout
    assert "eps is 1e-05, standard has 1e-06" in done.stdout
    assert "did you mean 'standard'?" in done.stdout
    assert "rmsnorm/parity/checking.py" not in done.stdout.split("test_mistaken")[0], "no traceback through rmsnorm"


def right(x: Any, weight: Any) -> Any:
    """The RMSNorm of LLaMA."""
    wide = x.astype(np.float64)
    normalised = (wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)
    promoted = x.dtype if x.dtype == weight.dtype else np.promote_types(x.dtype, weight.dtype)
    return (normalised.astype(np.float64) * weight.astype(np.float64)).astype(promoted)


def test_a_right_function_passes_in_every_dtype() -> None:
    result = check(right, "llama", dtypes=["float32", "float64"])
    assert result.passed
    assert result.text.startswith("test_pytest_plugin:right is llama: all ")
    assert {(r.dtype, r.quantity) for r in result.run.records} == {("float32", "y"), ("float64", "y")}
    names = {record.case for record in result.run.records}
    assert {"rows", "odd", "wide", "vector", "zero rows", "gain bf16"} <= names
    assert not names & {"mask", "residual", "bias", "no gain", "channels", "partial 0.3", "huge"}
    assert "huge" in {record.case for record in check(right, "llama", dtypes="float32", extremes=True).run.records}


def test_the_text_says_where_and_what_it_is_instead(tmp_path: Path) -> None:
    def wrong(x: Any, weight: Any) -> Any:
        y = right(x, weight)
        if y.size > 3000:
            y[1, 2] = -y[1, 2]
        return y

    result = check(wrong, "llama", dtypes="float32")
    assert str(result) == repr(result) == result.text
    assert "<svg" in result._repr_html_()
    result.write_html(tmp_path / "a.html")
    assert "is not llama" in (tmp_path / "a.html").read_text()
    assert not result.passed
    lines = result.text.splitlines()
    first = lines[0].split(": ")
    assert first[0].endswith("wrong is not llama")
    assert (
        first[1]
        == f"{len(result.run.failures)} of {len(result.run.records)} comparisons differ (numpy {np.__version__} on cpu)"
    )
    data = next(r for r in result.run.failures if r.case == "rows")
    assert data.detail.startswith("at (1, 2) got ")
    assert f"  'rows' f32 y: {data.detail}; parity ratio {data.parity_ratio:.3g}, bound {data.bound:.3g}" in lines
    assert "identify says:" in lines

    other = check(right, Variant.get("llama").replace(eps=1e-3), dtypes="float32")
    assert "  eps is 1e-06, llama has 0.001" in other.text.splitlines()


def test_the_report_goes_to_junit(tmp_path: Path) -> None:
    result = check(right, "gemma", dtypes="float32")
    report.write_junit([result.run], tmp_path / "parity.xml")
    assert f'failures="{len(result.run.failures)}"' in (tmp_path / "parity.xml").read_text()
    assert result.run.failures


def test_parameters_follow_the_signature() -> None:
    def bare(x: Any) -> Any:
        return fast.rms_norm(x)

    def with_bias(x: Any, weight: Any, bias: Any) -> Any:
        return fast.rms_norm(x, weight, bias)

    def swapped(x: Any, weight: Any, bias: Any) -> Any:
        return fast.rms_norm(x, bias, weight)

    def with_residual(x: Any, weight: Any, residual: Any = None) -> Any:
        return fast.rms_norm(x, weight, residual=residual)

    options: Any = {"framework": "numpy", "dtypes": "float32"}
    assert check(bare, **options).passed
    assert check(with_bias, **options).passed
    assert not check(swapped, **options).passed
    result = check(with_residual, **options)
    assert result.passed, result.text
    assert "residual" in {record.case for record in result.run.records}
    for second, words in (
        (lambda x, h: x, "the second result is another f32[16, 48], expected x + residual, f32[16, 48]"),
        (lambda x, h: h.astype("float64"), "the second result is another f64[16, 48], expected x + residual, f32"),
        (lambda x, h: None, "it returns a tuple of 2 whose second entry is None, expected numpy.ndarray"),
    ):

        def wrong_sum(x: Any, weight: Any, residual: Any = None, second: Any = second) -> Any:
            y = fast.rms_norm(x, weight, residual=residual)
            return y if residual is None else (y[0], second(x, y[1]))

        result = check(wrong_sum, **options)
        assert not result.passed
        assert words in result.text
    result = check(fast.rms_norm, extremes=True, **options)
    assert result.passed, result.text
    assert {"mask", "huge", "residual"} <= {record.case for record in result.run.records}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.sample(2)
def test_the_golden_is_every_preset(preset: str) -> None:
    """With every option that a case can pass to a function; every second one in 16 bits."""

    dtype = [["bfloat16"], ["float32"]][list(PRESETS).index(preset) % 2]

    def golden(x: Any, weight: Any, bias: Any, mask: Any = None, residual: Any = None) -> Any:
        return fast.rms_norm(x, weight, bias, variant=preset, mask=mask, residual=residual)

    result = check(golden, preset, framework="numpy", dtypes=dtype, extremes=True)
    assert result.passed, result.text


def test_what_a_function_does_wrong_is_a_sentence() -> None:
    def raises(x: Any, weight: Any) -> Any:
        raise RuntimeError("out of luck")

    def cut(x: Any, weight: Any) -> Any:
        return right(x, weight)[..., :-1]

    def in_place(x: Any, weight: Any) -> Any:
        y = right(x, weight)
        x[...] = 0
        return y

    def widens(x: Any, weight: Any) -> Any:
        return right(x, weight).astype(np.float64)

    options: Any = {"framework": "numpy", "dtypes": "float32"}
    for function, words in (
        (raises, "raised on x f32[48, 96], scale f32[96]: RuntimeError: out of luck"),
        (cut, "returned f32[48, 95] for x f32[48, 96], expected the shape of x"),
        (in_place, "inputs written to: x"),
        (widens, "got f64[48, 96], want f32[48, 96]"),
    ):
        result = check(function, "llama", **options)
        assert not result.passed
        assert words in result.text, function.__name__
        assert "parity ratio inf" not in result.text


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(ValueError, match=r"check: dtype is 'float8', expected 'float16', 'bfloat16', 'float32' or"):
        check(right, dtypes="float8")
    with pytest.raises(ValueError, match=r"check: variant is 'lama', expected .*did you mean 'llama'\?"):
        check(right, "lama")
    with pytest.raises(ValueError, match="no_such_module cannot be imported"):
        check("no_such_module:norm")
    with pytest.raises(ValueError, match=r"check: dtype is None, expected 'float16', 'bfloat16', 'float32' or"):
        check(right, dtypes=[])


def test_a_function_in_bfloat16_must_have_the_right_bits() -> None:
    """One that rounds after the gain is not llama, although hardly any element is two ulps off."""
    assert check(right, "llama", dtypes="bfloat16", framework="numpy").passed

    def once(x: Any, weight: Any) -> Any:
        y = numpy_impl.rms_norm(x, weight, variant="standard")
        return y if x.dtype == weight.dtype else y.astype(np.promote_types(x.dtype, weight.dtype))

    result = check(once, "llama", dtypes="bfloat16", framework="numpy")
    assert not result.passed
    rows = next(r for r in result.run.failures if (r.case, r.quantity) == ("rows", "y"))
    assert rows.parity_ratio <= rows.bound
    assert rows.bit_identical < rows.identical_bound
    assert np.dtype(ml_dtypes.bfloat16).name == rows.dtype


def doubled_after(first: Any) -> Any:
    """The mistake starts with the second call."""
    calls: list[int] = []

    def norm(x: Any, weight: Any) -> Any:
        calls.append(1)
        return right(x, weight) * (2 if len(calls) > first else 1)

    return norm


def dense(x: Any) -> Any:
    """What a kernel reads that ignores strides."""
    return np.lib.stride_tricks.as_strided(x, x.shape, np.empty(x.shape, x.dtype).strides)


def clipped(x: Any, weight: Any, limit: float) -> Any:
    largest = limit * np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True) + 1e-6)
    return np.where(np.abs(x) > largest, np.sign(x) * weight * limit, right(x, weight)).astype(x.dtype)


BLIND_SPOTS: dict[str, tuple[Any, str]] = {
    "factor beyond two axes": (lambda x, weight: right(x, weight) * (1.1 if x.ndim > 2 else 1), "'odd' f32 y: at ("),
    "factor on five axes": (lambda x, weight: right(x, weight) * (1.1 if x.ndim == 5 else 1), "'tall' f32 y: at ("),
    "strides ignored": (lambda x, weight: right(dense(x), weight), "y: x transposed in memory: at ("),
    "strides of the rows ignored": (
        lambda x, weight: right(x if x.strides[-1] > x.itemsize else dense(x), weight),
        "'rows' f32 y: x a slice of wider rows: at (",
    ),
    "clipped at 4.5": (lambda x, weight: clipped(x, weight, 4.5), "'rows' f32 y: at ("),
    "clipped at 120": (lambda x, weight: clipped(x, weight, 120.0), "'wide' f32 y: at ("),
    "row of an outlier doubled": (
        lambda x, weight: np.where(
            x[..., :1] > 3 * np.sqrt(np.mean(x * x, axis=-1, keepdims=True)), 2 * right(x, weight), right(x, weight)
        ),
        "'rows' f32 y: at (",
    ),
    "tuple": (lambda x, weight: (right(x, weight), None), "it returns a tuple of 2, expected numpy.ndarray"),
    "nothing": (lambda x, weight: None, "it returns None, expected numpy.ndarray"),
    "another array": (lambda x, weight: memoryview(right(x, weight)), "it returns a builtins.memoryview"),
    "state": (doubled_after(1), "'rows' f32 y: called again: at ("),
}


@pytest.mark.parametrize("name", BLIND_SPOTS)
def test_blind_spots(name: str) -> None:
    """Each fails, in a dozen lines; a wrong return type is one comparison and not one for each case."""
    function, words = BLIND_SPOTS[name]
    result = check(lambda x, weight: function(x, weight), "llama", framework="numpy", dtypes="float32")
    assert not result.passed
    assert words in result.text
    assert len([line for line in result.text.splitlines() if not line.startswith("not compared: ")]) <= 12
    assert len(result.run.records) == 1 or "returns" not in result.text
    assert len(result.details.splitlines()) > len(result.run.failures)


class TestFrameworks:
    """The layers of frameworks and of transformers are what they should be, gradients included."""

    def test_torch(self) -> None:
        torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
        result = check(torch.nn.RMSNorm, "torch", dtypes="bfloat16")
        assert result.passed, result.text
        assert {record.quantity for record in result.run.records} == {"y", "dx", "dscale"}
        assert check(torch.nn.RMSNorm(24), "torch", dtypes="float32").passed
        assert check(torch.nn.RMSNorm((3, 4), eps=1e-6), "standard", dtypes="float32").passed
        assert check(torch.nn.functional.rms_norm, "torch", dtypes="float32").passed
        assert not check(torch.nn.RMSNorm(24), "llama", dtypes="float32").passed

        def detached(x: Any, weight: Any) -> Any:
            rms = (x * x).mean(-1, keepdim=True).add(1e-6).sqrt().detach()
            return x / rms * weight

        result = check(detached, dtypes="float32")
        assert {record.quantity for record in result.run.failures} == {"dx"}
        assert check(detached, dtypes="float32", gradients=False).passed

        class WithDropout(torch.nn.RMSNorm):  # type: ignore[misc, name-defined, unused-ignore]
            def forward(self, x: Any) -> Any:
                return torch.nn.functional.dropout(super().forward(x), 0.1, self.training)

        layer = WithDropout(24).eval()
        result = check(layer, "torch", dtypes="float32")
        assert "y: in training: at (" in result.text
        assert not layer.training

        def dense_gradient(x: Any, weight: Any) -> Any:
            y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-6)
            if y.requires_grad:
                y.register_hook(lambda dy: dy.as_strided(dy.shape, torch.empty(dy.shape).stride()))
            return y

        result = check(dense_gradient, dtypes="float32")
        assert {record.quantity for record in result.run.failures} == {"dx", "dscale"}

    def test_a_gate(self) -> None:
        """Optional in Mamba-2's class, so that one case has it, and required in Qwen3-Next's, where all have."""
        torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")

        class Mamba2(torch.nn.RMSNorm):  # type: ignore[misc, name-defined, unused-ignore]
            def forward(self, x: Any, gate: Any = None) -> Any:
                wide = x.float() if gate is None else x.float() * torch.nn.functional.silu(gate.float())
                wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
                return self.weight * wide.to(x.dtype)

        class Qwen3Next(Mamba2):
            def forward(self, x: Any, gate: Any) -> Any:
                return (super().forward(x) * self.act(gate.float())).to(x.dtype)

            def act(self, gate: Any) -> Any:
                return torch.nn.functional.silu(gate)

        class CutOff(Qwen3Next):
            def act(self, gate: Any) -> Any:
                return super().act(gate.clamp(-10, 10))

        class Constant(Qwen3Next):
            def act(self, gate: Any) -> Any:
                return super().act(gate.detach())

        before, apex = Variant.get("llama").replace(gate_position="before"), Variant.get("apex").replace(eps=1e-6)
        optional, required = check(Mamba2, before, dtypes="bfloat16"), check(Qwen3Next, apex, dtypes="bfloat16")
        for result, cases in ((optional, 1), (required, required.run.cases)):
            assert result.passed, result.text
            assert len({r.case for r in result.run.records if r.quantity == "dgate"}) == cases
        assert {r.case for r in check(Mamba2, "llama", dtypes="bfloat16").run.failures} == {"gate"}
        assert "gate_position is 'after', llama has 'before'" in check(Qwen3Next, before, dtypes="bfloat16").text
        assert not check(CutOff, apex, dtypes="bfloat16", gradients=False).passed
        assert {r.quantity for r in check(Constant, apex, dtypes="float32").run.failures} == {"dgate"}

    @pytest.mark.slow
    def test_groups(self) -> None:
        """Of 16 elements, of 8, of all, and every fourth element: each is right for itself alone."""
        torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")

        class Grouped(torch.nn.RMSNorm):  # type: ignore[misc, name-defined, unused-ignore]
            size, axis = 16, -1

            def forward(self, x: Any, gate: Any = None) -> Any:
                wide = x.float() if gate is None else x.float() * torch.nn.functional.silu(gate.float())
                wide = wide.unflatten(-1, (-1, self.size) if self.axis == -1 else (self.size, -1))
                wide = wide * torch.rsqrt(wide.pow(2).mean(self.axis, keepdim=True) + 1e-6)
                return self.weight * wide.flatten(-2).to(x.dtype)

        class Eight(Grouped):
            size = 8

        class Apart(Grouped):
            axis = -2

        variant = Variant.get("llama").replace(gate_position="before")
        options: dict[str, Any] = {"dtypes": "bfloat16", "group_size": 16}
        right = check(Grouped, variant, **options)
        assert right.passed, right.text
        assert {"gate", "rows", "odd", "tall", "constant", "wide"} <= {record.case for record in right.run.records}
        for wrong in (Eight, Apart, torch.nn.RMSNorm):
            failures = check(wrong, variant, **options).run.failures
            assert {"y", "dx"} <= {record.quantity for record in failures}
        assert check(Grouped(48), variant, **options).passed
        with pytest.raises(ValueError, match="group_size is 7, expected a positive divisor of the width"):
            check(Grouped(48), variant, group_size=7)

    def test_transformers(self) -> None:
        pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
        pytest.importorskip("transformers", reason="transformers is not installed; pip install '.[dev]'")
        for path, variant in (
            ("llama.modeling_llama:LlamaRMSNorm", "llama"),
            ("gemma.modeling_gemma:GemmaRMSNorm", "gemma"),
            ("t5.modeling_t5:T5LayerNorm", "t5"),
        ):
            result = check(f"transformers.models.{path}", variant, dtypes="bfloat16")
            assert result.passed, result.text
        result = check("transformers.models.llama.modeling_llama:LlamaRMSNorm", "llama", dtypes="float64")
        assert not result.passed, "it computes in float32"

    @pytest.mark.slow
    def test_keras(self) -> None:
        pytest.importorskip("tensorflow", reason="tensorflow is not installed; pip install '.[tf]'")
        keras = pytest.importorskip("keras", reason="keras is not installed; pip install '.[tf]'")
        result = check(keras.layers.RMSNormalization(), "keras", dtypes=["float32", "bfloat16"])
        assert result.passed, result.text
        assert {record.quantity for record in result.run.records} == {"y", "dx", "dscale"}
        assert not check(keras.layers.LayerNormalization(epsilon=1e-6), "keras", dtypes="float32").passed

        import tensorflow as tf

        def eager_only(x: Any, weight: Any) -> Any:
            y = x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True) + 1e-6) * tf.cast(weight, x.dtype)
            return y if tf.executing_eagerly() else 2 * y

        assert check(eager_only, dtypes="float32").passed
        assert "y: compiled: at (" in check(eager_only, dtypes="float32", compiled=True).text

    @pytest.mark.slow
    def test_flax(self) -> None:
        nnx = pytest.importorskip("flax.nnx", reason="flax is not installed; pip install '.[flax]'")
        result = check(nnx.RMSNorm(12, rngs=nnx.Rngs(0)), "flax", dtypes="float32", extremes=True)
        assert {record.case for record in result.run.failures} == {"mask", "huge"}
        assert {record.quantity for record in result.run.records} == {"y", "dx", "dscale"}

    def test_on_a_device(self) -> None:
        torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        result = check(torch.nn.RMSNorm, "torch", device="cuda")
        assert result.passed, result.text
