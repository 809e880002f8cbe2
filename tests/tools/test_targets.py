"""Whatever a target is made of, it takes NumPy arrays and returns them; what is no target gets a sentence."""

from __future__ import annotations

import py_compile
import sys
from pathlib import Path

import numpy as np
import pytest

from rmsnorm.targets import NoTarget, TargetError, open_target

torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")


def test_a_target_takes_numpy_and_gives_numpy():
    target = open_target(torch.nn.RMSNorm, width=8)
    x = np.random.default_rng(0).normal(size=(3, 8)).astype("bfloat16")
    y = target.forward(x, np.ones(8, "bfloat16"))
    gradients = target.all_gradients(x, x=x, scale=np.ones(8, "bfloat16"))
    assert [array.dtype.name for array in (y, *gradients.values())] == ["bfloat16"] * 3
    assert {name: array.shape for name, array in gradients.items()} == {"x": (3, 8), "scale": (8,)}


@pytest.mark.parametrize(("name", "reported"), [("pytorch", "torch"), ("torch", "torch"), ("np", "numpy")])
def test_a_framework_has_several_names(name, reported):
    target = open_target(lambda x: x / 2, framework=name)
    assert target.framework == reported
    assert target.forward(np.ones((2, 4), "float32"))[0, 0] == 0.5
    with pytest.raises(
        NoTarget, match="framework is 'caffe', expected 'torch', 'tf', 'keras', 'jax', 'flax' or 'numpy'"
    ):
        open_target(lambda x: x, framework="caffe")


@pytest.mark.parametrize(
    ("target", "init", "words"),
    [
        ("torch.nn:RMSNor", None, "torch.nn has no 'RMSNor'"),
        ("torhc.nn:RMSNorm", None, "torhc.nn cannot be imported"),
        ("RMSNorm", None, "expected module:attribute such as torch.nn:RMSNorm"),
        ("no/such.onnx", None, "there is no file no/such.onnx"),
        (torch.nn.Bilinear, None, "requires 'in1_features', whose value cannot be guessed; pass it in init, .*in1_f"),
        (torch.nn.RMSNorm, {"dmi": 4}, "takes no argument 'dmi'.* pass one of these in init"),
        (lambda x, weight: x, {"epps": 1}, "takes no argument 'epps', expected some of x, weight"),
        (torch.jit.ScriptModule(), None, "is a scripted module, expected the layer itself"),
        ("norms.py", None, "or an .onnx file; name what it has, as norms.py:NAME"),
        (lambda **options: options, None, "is of type dict, expected a function, a layer or a class of layers"),
        (3, None, "is of type int, expected a function, a layer or a class of layers"),
    ],
)
def test_no_target_is_bad_usage(target, init, words):
    with pytest.raises(NoTarget, match=words.replace("(", r"\(")):
        open_target(target, init=init)


@pytest.mark.parametrize(
    ("message", "needs"),
    [
        ("Found no NVIDIA driver on your system.", True),
        ("x must be a CUDA tensor", True),
        ("kernels/triton_norm.py has no size for 65 columns; the gpu path has", False),
    ],
)
def test_only_an_error_for_want_of_a_gpu_says_that_one_is_needed(message, needs):
    def norm(x):
        raise RuntimeError(message)

    with pytest.raises(TargetError, match="needs a GPU" if needs else f"raised on x .*RuntimeError: {message[:20]}"):
        open_target(norm, framework="numpy").forward(np.ones((2, 4), "float32"))


def test_two_files_of_one_name_stay_apart_and_one_that_fails_leaves_nothing(tmp_path):
    answers = []
    for factor in (2, 3):
        folder = tmp_path / str(factor)
        folder.mkdir()
        (folder / "norms.py").write_text(
            f"def norm(x):\n    return helper(x)\n\ndef helper(x):\n    return {factor} * x\n"
        )
        target = open_target(f"{folder / 'norms.py'}:norm", framework="numpy")
        again = open_target(f"{folder / 'norms.py'}:norm", framework="numpy")
        module = sys.modules[
            next(name for name in sys.modules if getattr(sys.modules[name], "__file__", "") == str(folder / "norms.py"))
        ]
        answers.append((module.norm(1), *(float(t.forward(np.ones((2, 4), "float32"))[0, 0]) for t in (target, again))))
    assert answers == [(2, 2.0, 2.0), (3, 3.0, 3.0)]
    before = set(sys.modules)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(NoTarget, match="ZeroDivisionError"):
        open_target(f"{tmp_path / 'broken.py'}:norm")
    assert set(sys.modules) == before


def test_a_file_imports_what_lies_beside_it(tmp_path):
    (tmp_path / "beside.py").write_text("FACTOR = 2\n")
    (tmp_path / "beside_later.py").write_text("")
    (tmp_path / "its.py").write_text(
        "import beside\ndef norm(x):\n    import beside_later\n    return beside.FACTOR * x"
    )
    path = list(sys.path)
    try:
        target = open_target(f"{tmp_path / 'its.py'}:norm", framework="numpy")
        assert target.forward(np.ones((2, 4), "float32"))[0, 0] == 2
        (tmp_path / "relative.py").write_text("from . import beside")
        with pytest.raises(NoTarget, match=r"relative import.*; let Python import it first: name a file of a package"):
            open_target(f"{tmp_path / 'relative.py'}:norm")
        (tmp_path / "program.py").write_text("raise SystemExit(0)")
        with pytest.raises(NoTarget, match=r"SystemExit: 0\); let Python import it first"):
            open_target(f"{tmp_path / 'program.py'}:norm")
    finally:
        sys.path[:] = path


def _by_name(*, x, weight):
    return x * weight


def _by_schema():
    return torch.jit.CompilationUnit("def norm(x, weight):\n    return x * weight\n").norm


@torch.library.custom_op("rmsnorm_tests::norm", mutates_args=())
def _operator(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * weight


@pytest.mark.parametrize(
    "make",
    [
        lambda: _by_name,
        lambda: lambda weight, x: 0 * weight + x * weight,
        _by_schema,
        lambda: _operator,
        lambda: torch.ops.rmsnorm_tests.norm,
    ],
    ids=range(5),
)
def test_arguments_are_known_however_a_function_declares_them(make):
    target = open_target(make(), framework="torch")
    x = np.ones((2, 4), "float32")
    assert target.arguments == ("scale",)
    assert target.forward(x, 3 * x[0])[0, 0] == 3


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (
            lambda x: x.tolist(),
            r"returned a list of 2 whose first entry is a list of 4 for x f32\[2, 4\], expected torch.Tensor; return y",
        ),
        (lambda x: x.int(), r"returned int32\[2, 4\] for x f32\[2, 4\], expected one of float16"),
        (lambda x: sys.exit(0), r"raised on x f32\[2, 4\]: SystemExit: 0"),
    ],
    ids=range(3),
)
def test_a_result_that_is_no_y_is_described(result, words):
    with pytest.raises(TargetError, match=words):
        open_target(result, framework="torch").forward(np.ones((2, 4), "float32"))


def test_a_file_that_was_edited_is_loaded_again_and_what_its_user_compiled_stays(tmp_path):
    """Within one second, and of one size, which is all that Python's own cache of a module knows of it."""
    path, file = list(sys.path), tmp_path / "edited.py"

    def factor() -> float:
        return float(open_target(f"{file}:norm", framework="numpy").forward(np.ones((2, 4), "float32"))[0, 0])

    try:
        for expected in (1, 2, 2):
            file.write_text(f"def norm(x):\n    return {expected} * x")
            compiled = Path(py_compile.compile(str(file)) or "")
            assert factor() == expected
            assert compiled.exists()
    finally:
        sys.path[:] = path


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inside the compiler
def test_what_torch_compile_made_has_gradients():
    """Its backward pass frees what it read, and so each one gets a call of its own."""

    def norm(x, weight):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype)

    x, scale = np.random.default_rng(0).normal(size=(48, 96)).astype("float32"), np.ones(96, "float32")
    called = open_target(torch.compile(norm, dynamic=True), framework="torch").called(
        {"x": x, "scale": scale}, ["x", "scale"]
    )
    first, second = called.gradients(x), called.gradients(x)
    want = open_target(norm).all_gradients(x, x=x, scale=scale)
    for name, gradient in want.items():
        assert np.allclose(first[name], gradient, rtol=1e-4, atol=1e-5)
        assert np.array_equal(first[name], second[name])
