"""Whatever a target is made of, it takes NumPy arrays and returns them; what is no target gets a sentence."""

from __future__ import annotations

import py_compile
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rmsnorm.targets import NoTarget, TargetError, open_target

torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
ONES = np.ones((2, 4), "float32")


def answer(target: Any, framework: str = "numpy") -> float:
    """The first number of y for x of ones."""
    return float(open_target(target, framework=framework).forward(ONES, ONES[0])[0, 0])


@pytest.fixture
def path() -> Iterator[None]:
    """What Python imports from is as before."""
    folders = list(sys.path)
    yield
    sys.path[:] = folders


def test_a_target_takes_numpy_and_gives_numpy() -> None:
    target = open_target(torch.nn.RMSNorm, width=8)
    x = np.random.default_rng(0).normal(size=(3, 8)).astype("bfloat16")
    y = target.forward(x, np.ones(8, "bfloat16"))
    gradients = target.all_gradients(x, x=x, scale=np.ones(8, "bfloat16"))
    assert [array.dtype.name for array in (y, *gradients.values())] == ["bfloat16"] * 3
    assert {name: array.shape for name, array in gradients.items()} == {"x": (3, 8), "scale": (8,)}


@pytest.mark.parametrize(("name", "reported"), [("pytorch", "torch"), ("torch", "torch"), ("np", "numpy")])
def test_a_framework_has_several_names(name: str, reported: str) -> None:
    target = open_target(lambda x: x / 2, framework=name)
    assert target.framework == reported
    assert target.forward(ONES)[0, 0] == 0.5


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
    ids=range(11),
)
def test_no_target_is_bad_usage(target: Any, init: Any, words: str) -> None:
    with pytest.raises(NoTarget, match=words.replace("(", r"\(")):
        open_target(target, init=init)


def raises(message: str) -> Any:
    def norm(x: Any) -> Any:
        raise RuntimeError(message)

    return norm


@pytest.mark.parametrize(
    ("norm", "words"),
    [
        (raises("Found no NVIDIA driver on your system."), "needs a GPU"),
        (raises("x must be a CUDA tensor"), "needs a GPU"),
        (raises("triton_norm.py has no size for 65 columns; the gpu path has"), "raised on x .*RuntimeError: triton_"),
        (lambda x: x.tolist(), r"returned a list of 2 whose first entry is a list of 4 for x f32\[2, 4\], expected to"),
        (lambda x: x.int(), r"returned int32\[2, 4\] for x f32\[2, 4\], expected one of float16"),
        (lambda x: sys.exit(0), r"raised on x f32\[2, 4\]: SystemExit: 0"),
    ],
    ids=["no driver", "CUDA", "another error", "list", "integers", "exit"],
)
def test_an_error_and_a_result_that_is_no_y_are_described(norm: Any, words: str) -> None:
    with pytest.raises(TargetError, match=words):
        open_target(norm, framework="torch").forward(ONES)


# Files.


@pytest.mark.usefixtures("path")
def test_a_file_imports_what_lies_beside_it_and_one_of_the_same_name_is_another(tmp_path: Path) -> None:
    for factor in (2, 3):
        folder = tmp_path / str(factor)
        folder.mkdir()
        (folder / f"beside_{factor}.py").write_text(f"FACTOR = {factor}\n")
        (folder / f"later_{factor}.py").write_text("")
        (folder / "norms.py").write_text(
            f"from beside_{factor} import FACTOR\ndef norm(x):\n    return helper(x)\n"
            f"def helper(x):\n    import later_{factor}\n    return FACTOR * x\n"
        )
    for factor in (2, 3, 2):
        assert answer(f"{tmp_path / str(factor) / 'norms.py'}:norm") == factor


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("from . import beside", "relative import.*; let Python import it first: name a file of a package"),
        ("raise SystemExit(0)", r"SystemExit: 0\); let Python import it first"),
    ],
)
def test_a_file_that_fails_gets_a_sentence_and_leaves_nothing(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(text)
    before = set(sys.modules)
    with pytest.raises(NoTarget, match=words):
        open_target(f"{tmp_path / 'broken.py'}:norm")
    assert set(sys.modules) == before


@pytest.mark.usefixtures("path")
def test_a_file_that_was_edited_is_loaded_again_and_what_its_user_compiled_stays(tmp_path: Path) -> None:
    """Within one second, and of one size, which is all that Python's own cache of a module knows of it."""
    file = tmp_path / "edited.py"
    for expected in (1, 2, 2):
        file.write_text(f"def norm(x):\n    return {expected} * x")
        compiled = Path(py_compile.compile(str(file)) or "")
        assert answer(f"{file}:norm") == expected
        assert compiled.exists()


# Arguments and gradients.


def by_name(*, x: Any, weight: Any) -> Any:
    return x * weight


@torch.library.custom_op("rmsnorm_tests::norm", mutates_args=())
def operator(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * weight


@pytest.mark.parametrize(
    "norm",
    [by_name, lambda weight, x: 0 * weight + x * weight, operator, "operator", "script"],
    ids=["names", "another order", "custom operator", "operator", "script"],
)
def test_arguments_are_known_however_a_function_declares_them(norm: Any) -> None:
    if norm == "operator":
        norm = torch.ops.rmsnorm_tests.norm
    if norm == "script":
        norm = torch.jit.CompilationUnit("def norm(x, weight):\n    return x * weight\n").norm
    target = open_target(norm, framework="torch")
    assert target.arguments == ("scale",)
    assert target.forward(ONES, 3 * ONES[0])[0, 0] == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inside the compiler
def test_what_torch_compile_made_has_gradients() -> None:
    """Its backward pass frees what it read, and so each one gets a call of its own."""

    def norm(x: Any, weight: Any) -> Any:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype)

    x, scale = np.random.default_rng(0).normal(size=(48, 96)).astype("float32"), np.ones(96, "float32")
    target = open_target(torch.compile(norm, dynamic=True), framework="torch")
    called = target.called({"x": x, "scale": scale}, ["x", "scale"])
    first, second = called.gradients(x), called.gradients(x)
    for name, gradient in open_target(norm).all_gradients(x, x=x, scale=scale).items():
        assert np.allclose(first[name], gradient, rtol=1e-4, atol=1e-5)
        assert np.array_equal(first[name], second[name])
