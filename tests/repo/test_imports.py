"""What loads what: nothing loads a framework unasked, and NumPy alone is enough for what NumPy can do."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from programs import finished, printed

import rmsnorm
from rmsnorm.specification.frameworks import FRAMEWORKS

PACKAGES = ("torch", "tensorflow", "keras", "jax", "flax")


def _loaded(*statements, path=None):
    """The top-level packages and modules of rmsnorm that are loaded after each statement, in a process of their own."""
    show = "print('|' + json.dumps([n for n in sys.modules if n.count('.') == 0 or n.startswith('rmsnorm.')]))"
    code = "\n".join(["import sys, json", *(f"{statement}\n{show}" for statement in statements)])
    lines = printed("-c", code, path=path).splitlines()
    return [set(json.loads(line[1:])) for line in lines if line.startswith("|")]


STATEMENTS = {
    "specification": "import rmsnorm, rmsnorm.specification.errors, rmsnorm.specification.resolve",
    "names": "import rmsnorm.nematus.names",
    "numpy_impl": "rmsnorm.numpy_impl.rms_norm([1.0, 2.0]); rmsnorm.numpy_impl.rms_norm_vjp([1.0, 2.0], [1.0, 2.0])",
    "derivation": "import rmsnorm.numpy_impl.paper.derivation",
    "tools": "import rmsnorm.numpy_impl.fast, rmsnorm.conversion, rmsnorm.identify",
    "models": "import rmsnorm.nematus.model, rmsnorm.nematus.numpy_models, rmsnorm.conversion.layer_norm",
    "backends": "import rmsnorm.parity.backends as b; b.open_backend('numpy', 'cpu')",
    "help": "from rmsnorm.cli import app\ntry: app(['--help'])\nexcept SystemExit as end: assert not end.code",
    "a framework": "import jax",
}


def test_no_framework_is_loaded_unasked(tmp_path):
    """Each statement after the ones before it. The last one shows that the test sees a package that is loaded."""
    (tmp_path / "jax.py").write_text("")
    loaded = dict(zip(STATEMENTS, _loaded(*STATEMENTS.values(), path=tmp_path), strict=True))
    assert not loaded["names"] & {"numpy", "ml_dtypes"}, "the specification and the names load no array library"
    assert "rmsnorm.numpy_impl" not in loaded["specification"], "a folder is loaded at its first use"
    assert {"numpy", "rmsnorm.numpy_impl"} <= loaded["numpy_impl"]
    asked = {*PACKAGES}
    assert {name: modules & asked for name, modules in loaded.items() if modules & asked} == {"a framework": {"jax"}}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_framework_loads_no_other(framework):
    backend = FRAMEWORKS[framework]
    if find_spec(backend.package) is None:
        pytest.skip(f"{backend.package} is not installed; pip install '.[{backend.extra}]'")
    # TensorFlow loads Keras, and Keras loads other frameworks.
    functions = f"from rmsnorm.{framework}_impl import rms_norm, rms_norm_vjp"
    models = f"import rmsnorm.nematus.{framework}_models"
    own, loaded, with_models = _loaded(f"import {backend.package}", functions, models)
    here, later = (re.findall(r"rmsnorm\.\w+_impl\b(?!\.)", " ".join(names)) for names in (loaded, with_models))
    assert {*here} == {f"rmsnorm.{framework}_impl"} >= {*later} - {"rmsnorm.numpy_impl"}
    assert not {name for name in loaded if name.startswith(("rmsnorm.parity", "rmsnorm.cli", "rmsnorm.nematus"))}
    assert not (loaded - own) & {*PACKAGES}, "the functions need only the package of their arrays"
    if framework != "torch":
        assert not loaded & {f"rmsnorm.{framework}_impl.layers", f"rmsnorm.{framework}_impl.linen"}


@pytest.mark.parametrize(("name", "path"), [
    ("jax_impl", "rmsnorm.flax_impl"), ("keras_impl", "rmsnorm.tf_impl"), ("replace", "rmsnorm.conversion.replace"),
    ("RMSNorm", "rmsnorm.torch_impl.RMSNorm, rmsnorm.tf_impl.RMSNormalization or rmsnorm.flax_impl.RMSNorm"),
    ("rms_norm", "rmsnorm.numpy_impl.rms_norm or rmsnorm.torch_impl.rms_norm"), ("nothing", None),
])  # fmt: skip
def test_the_error_for_a_misplaced_name_says_its_path(name, path):
    """Any other name is the usual error."""
    message = re.escape(f"has no attribute {name!r}") + (f", expected {path}" if path else "$")
    assert not hasattr(rmsnorm, name)
    with pytest.raises(AttributeError, match=message):
        getattr(rmsnorm, name)
    with pytest.raises(ImportError, match=message if path else "cannot import name 'nothing'"):
        exec(f"from rmsnorm import {name}")


EACH = """
import traceback
from rmsnorm.cli import app
for statement in {}:
    print("@")
    try:
        exec(statement)
    except ImportError:
        print(traceback.format_exc())
    except SystemExit as end:
        print("status", end.code)
"""


def _said(statements, **options):
    """What each of them prints, one after the other in a process of their own."""
    return printed("-c", EACH.format(statements), **options).split("@\n")[1:]


ABSENT = {
    "import rmsnorm.torch_impl": ("torch", "torch"),
    "from rmsnorm.tf_impl import rms_norm": ("tensorflow", "tf"),
    "from rmsnorm.tf_impl import RMSNormalization": ("keras", "tf"),
    "import rmsnorm; rmsnorm.flax_impl": ("jax", "flax"),
}


def test_with_numpy_alone_the_golden_is_checked_and_what_is_missing_is_named(tmp_path):
    """Of an import, of a command that asks for it, and of one that asks for all."""
    for package in PACKAGES:
        error = f"ModuleNotFoundError(\"No module named '{package}'\", name='{package}')"
        (tmp_path / f"{package}.py").write_text(f"raise {error}\n")
    asked = [f"selftest --backend {extra} --variant standard --dtype float64" for extra in ("torch", "tf", "flax")]
    asked.append("selftest --variant gemma --dtype float32 --json parity.json")
    commands = [f"app({command.split()})" for command in asked]
    said = _said([*ABSENT, *commands], path=tmp_path, cwd=tmp_path)
    for words, (package, extra) in zip(said, ABSENT.values(), strict=False):
        wanted = f"{package} is not installed, expected for this backend; from a checkout: pip install '.[{extra}]'"
        assert wanted in words
        assert "During handling" not in words
    *alone, every = said[len(ABSENT) :]
    for words, extra in zip(alone, ("torch", "tf", "flax"), strict=True):
        assert f"pip install '.[{extra}]'" in words
        assert words.endswith("status 2\n")
        assert f"pip install '.[{extra}]'" in every
    assert every.endswith("status 0\n")
    records = json.loads((tmp_path / "parity.json").read_text())["records"]
    assert {(record["backend"], record["passed"]) for record in records} == {("numpy", True)}


def test_a_required_framework_that_is_absent_fails_the_session(tmp_path):
    """A framework that is not required is skipped, with a message how to install it."""
    hide = tmp_path / "hide.py"  # the fixture calls find_spec
    hide.write_text(
        "import importlib.util\n_find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'jax' else _find(name, *rest)\n"
    )
    test = Path(__file__).parents[1] / "table/test_signatures.py"
    only = "equal and (numpy or flax)"
    options = ("-m", "pytest", "-p", "hide", "-p", "no:cacheprovider", "-rs", "-q", test, "-k", only)
    failed = finished(*options, path=tmp_path, RMSNORM_REQUIRE="numpy,flax")
    assert failed.returncode not in (0, 5)
    wanted = "RMSNORM_REQUIRE names flax, but jax is not installed; pip install '.[flax]'"
    assert wanted in failed.stderr + failed.stdout
    passed = printed(*options, path=tmp_path, RMSNORM_REQUIRE="numpy")
    assert "jax is not installed; pip install '.[flax]'" in passed
    assert re.search(r"\b1 passed, 1 skipped", passed)


LAZY = """
import sys, torch
from rmsnorm.torch_impl import RMSNorm
layer, x = RMSNorm(8), torch.ones(4, 8)
layer(x).sum().backward()
assert 'torch._dynamo' not in sys.modules
import torch._dynamo
(graph,) = torch._dynamo.explain(lambda x: layer(x))(x).graphs
(node,) = [node for node in graph.graph.nodes if node.op == 'call_function']
assert node.target.__name__ == 'rms_norm_in_graph'
"""


def test_a_training_step_in_pytorch_loads_no_compiler():
    """torch._dynamo takes longer to import than all else; imported later, it has rms_norm as one node nevertheless."""
    pytest.importorskip("torch")
    printed("-c", LAZY)


NOT_INSTALLED = """
import importlib.metadata as m
found = m.Distribution.from_name.__func__
def from_name(cls, name):
    if name == "rmsnorm":
        raise m.PackageNotFoundError(name)
    return found(cls, name)
m.Distribution.from_name = classmethod(from_name)
"""
ASKED = [
    "selftest --backend numpy --variant mlx --dtype float32 --json a.json",
    "check rmsnorm.numpy_impl.fast:rms_norm --framework numpy --dtype float32 --width 64 --max-rows 8 --json c.json",
    "identify rmsnorm.numpy_impl:rms_norm --framework numpy", "explain numpy --shape 2x8", "vectors d",
]  # fmt: skip


def test_a_folder_of_sources_on_the_path_is_enough(tmp_path):
    """As on a machine where nothing can be installed: no command asks for the metadata of this package."""
    (tmp_path / "sitecustomize.py").write_text(NOT_INSTALLED)
    said = _said([f"app({command.split()})" for command in ASKED], path=tmp_path, cwd=tmp_path)
    assert all(words.endswith("status 0\n") for words in said)
    for file in ("a.json", "c.json"):
        assert json.loads((tmp_path / file).read_text())["rmsnorm"] == "not installed"


@pytest.mark.parametrize("name", ["triton", "another"])
def test_triton_is_imported_before_tensorflow(name, tmp_path):
    """The other order would end the process. Where there is no Triton, nothing changes."""
    (tmp_path / f"{name}.py").write_text("print('triton')\n")
    (tmp_path / "tensorflow.py").write_text("print('tensorflow')\n")
    missing = "" if name == "triton" else "sys.modules['triton'] = None\n"
    code = (
        f"import sys\nfrom importlib.util import find_spec\n{missing}"
        "from rmsnorm.targets.apart import import_triton_before_tensorflow\n"
        "import_triton_before_tensorflow()\nassert find_spec('tensorflow')\nprint('first')\nimport tensorflow"
    )
    words = printed("-c", code, path=tmp_path).split()
    assert words == (["first", "triton", "tensorflow"] if name == "triton" else ["first", "tensorflow"])
