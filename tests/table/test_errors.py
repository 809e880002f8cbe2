"""Wrong input raises the same class and message in every framework: name, got, wanted and fix in one sentence."""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rmsnorm import PRESETS, Variant, numpy_impl
from rmsnorm.specification import frameworks

X = np.ones((4, 16), np.float32)
G = np.ones(16, np.float32)
FLOATS = "float16, bfloat16, float32 or float64"
NAMES = f"{', '.join(map(repr, list(PRESETS)[:-1]))} or 'x_transformers'"
NUMBER = "expected a finite number >= 0; pass a float such as 1e-6"
FRACTION = "expected a fraction in (0, 1]; pass None for all elements"


class _Stranger:
    def __repr__(self) -> str:
        return "<stranger>"


SIZES = "expected (16,) to match axis -1 of x f32[4, 16]"
RANGE = "expected between -2 and 1 for x f32[4, 16]; count from the last"
AXIS = "expected an integer or a sequence of integers; pass -1 for the last axis"
A_NUMBER, A_PART = ("expected a number or None; pass a float such as 1e-6",
                    "expected a number or None; pass a fraction such as 0.0625")  # fmt: skip
DTYPES = "expected 'float16', 'bfloat16', 'float32' or 'float64'; choose one of these"
INT = np.int32
V, T = ValueError, TypeError
WRONG: list[Any] = [  # class, sentence, arguments, options
    *((V, f"{name} has shape {shape}, {SIZES}", arguments, {}) for name, shape, arguments in (
        ("scale", "(8,)", (X, G[:8])), ("scale", "(4, 16)", (X, X)), ("scale", "(1,)", (X, G[:1])),
        ("bias", "(8,)", (X, G, G[:8])))),
    (V, "scale has shape (16,), expected (4,) to match axis 0 of x f32[4, 16]", (X, G), {"feature_axis": 0}),
    (V, "scale has shape (16,), expected (4, 16) to match axis (0, 1) of x f32[4, 16]", (X, G), {"axis": (0, 1)}),
    *((T, f"{name} has dtype {dtype}, expected {FLOATS}; cast it first", arguments, options)
      for name, dtype, arguments, options in (
        ("x", "complex64", (X.astype("complex64"),), {}), ("x", "bool", (X > 0,), {}),
        ("scale", "int32", (X, G.astype(INT)), {}), ("bias", "int32", (X, None, G.astype(INT)), {}),
        ("residual", "int32", (X,), {"residual": X.astype(INT)}))),
    (V, "x is 0-d, expected at least one axis to normalise; reshape it to (1,)", (np.array(1.0, np.float32),), {}),
    (V, f"axis is 2, {RANGE}", (X,), {"axis": 2}), (V, f"axis is -3, {RANGE}", (X,), {"axis": (-1, -3)}),
    (V, f"feature_axis is 5, {RANGE}", (X, G), {"feature_axis": 5}),
    (V, "axis (1, -1) names an axis of x f32[4, 16] twice, expected distinct ones; drop one", (X,), {"axis": (1, -1)}),
    (V, "axis is empty, expected at least one axis; pass -1 for the last", (X,), {"axis": ()}),
    *((T, f"axis is {said}, {AXIS}", (X,), {"axis": axis})
      for axis, said in ((1.0, "1.0 (float)"), (True, "True (bool)"), ("last", "'last' (str)"))),
    *((V, f"eps is {eps}, {NUMBER}", (X,), {"eps": eps}) for eps in (-1e-6, math.nan, math.inf)),
    (T, f"eps is True (bool), {A_NUMBER}", (X,), {"eps": True}), (T, f"eps is '1e-6' (str), {A_NUMBER}", (X,),
                                                                 {"eps": "1e-6"}),
    *((V, f"partial is {part!r}, {FRACTION}", (X,), {"partial": part})
      for part in (0, -0.5, 1.5, Fraction(3, 2), math.nan)),
    (T, f"partial is '0.5' (str), {A_PART}", (X,), {"partial": "0.5"}),
    (T, f"partial is True (bool), {A_PART}", (X,), {"partial": True}),
    *((V, f"mask has shape {mask.shape}, expected one that broadcasts to x f32[4, 16]; reshape it", (X,),
       {"mask": mask}) for mask in (X[:, :8] > 0, X[None] > 0)),
    (T, "mask has dtype float32, expected bool; cast it first", (X,), {"mask": X}),
    (V, f"variant is 'lama', expected {NAMES}; did you mean 'llama'?", (X,), {"variant": "lama"}),
    (V, f"variant is '???', expected {NAMES}; choose one of these", (X,), {"variant": "???"}),
    (T, "variant is <stranger> (_Stranger), expected a name or a Variant; pass one such as 'llama'", (X,),
     {"variant": _Stranger()}),
    *((V, f"{name} has shape {a.shape}, expected (4, 16) to match x f32[4, 16]", (X,), {name: a})
      for name in ("residual", "gate") for a in (X[:, :8], X[:1])),
    *((V, f"out_dtype is '{name}', {DTYPES}", (X,), {"out_dtype": name}) for name in ("float8", "int32")),
]  # fmt: skip


def _raised(kind, sentence, function, *arguments, **options):
    with pytest.raises((TypeError, ValueError), match=r".") as raised:
        function(*arguments, **options)
    assert str(raised.value) == sentence
    assert isinstance(raised.value, kind)


def test_every_function_says_what_is_wrong(framework):
    for kind, sentence, arguments, options in WRONG:
        _raised(kind, f"rms_norm: {sentence}", framework.rms_norm, *arguments, **options)
        _raised(kind, f"rms_norm_vjp: {sentence}", framework.rms_norm_vjp, X, *arguments, **options)
        if framework.name == "numpy":
            _raised(kind, f"rms_norm_jvp: {sentence}", numpy_impl.rms_norm_jvp, arguments, (None,), **options)


SHAPE = "has shape (4, 8), expected (4, 16) to match x f32[4, 16]"


def test_gradients_of_the_wrong_shape(framework):
    short = X[:, :8]
    _raised(ValueError, f"rms_norm_vjp: dy {SHAPE}", framework.rms_norm_vjp, short, X)
    _raised(ValueError, f"rms_norm_vjp: dy {SHAPE}", framework.rms_norm_vjp, (short, X), X, residual=X)
    _raised(ValueError, f"rms_norm_vjp: dh {SHAPE}", framework.rms_norm_vjp, (X, short), X, residual=X)
    sentence = f"rms_norm_vjp: dy has dtype int32, expected {FLOATS}; cast it first"
    _raised(TypeError, sentence, framework.rms_norm_vjp, X.astype(np.int32), X)


def test_tangents_that_do_not_fit():
    jvp = numpy_impl.rms_norm_jvp
    _raised(ValueError, f"rms_norm_jvp: dx {SHAPE}", jvp, (X,), (X[:, :8],))
    sentence = "rms_norm_jvp: dscale has shape (8,), expected (16,) to match axis -1 of x f32[4, 16]"
    _raised(ValueError, sentence, jvp, (X, G), (X, G[:8]))
    for name, primals, tangents in (("scale", (X,), (X, G)), ("bias", (X, G), (X, G, G)), ("bias", (X,), (X, None, G))):
        sentence = f"rms_norm_jvp: d{name} is given without {name}, expected both or neither; pass {name} too"
        _raised(ValueError, sentence, jvp, primals, tangents)


ARGUMENTS = [
    ("epsilon", 1e-6, "eps"), ("weight", G, "scale"), ("gamma", G, "scale"), ("dim", -1, "axis"),
    ("varient", "llama", "variant"), ("Eps", 1e-6, "eps"),
]  # fmt: skip


def test_an_argument_by_its_name_elsewhere(framework):
    calls = {"rms_norm": (X,), "rms_norm_vjp": (X, X)}
    calls |= {"rms_norm_jvp": ((X,), (X,))} if framework.name == "numpy" else {}
    for (op, positional), (name, value, meant) in itertools.product(calls.items(), ARGUMENTS):
        fix = "choose one" if op == "rms_norm_jvp" and meant == "scale" else f"did you mean {meant!r}"
        with pytest.raises(TypeError, match=f"^{op}: there is no argument {name!r}, expected .*; {fix}"):
            getattr(framework.functional, op)(*positional, **{name: value})


def _layers():
    """What makes a layer, and the name of its eps, gain and size; None where the size comes from the input."""
    torch, tf, flax = (pytest.importorskip(f"rmsnorm.{framework}_impl") for framework in ("torch", "tf", "flax"))
    nnx, linen = pytest.importorskip("flax.nnx"), pytest.importorskip("rmsnorm.flax_impl.linen")
    return {
        "torch": (torch.RMSNorm, {}, "eps", "elementwise_affine", "normalized_shape", 8),
        "keras": (tf.RMSNormalization, {}, "epsilon", "scale", None, None),
        "nnx": (flax.RMSNorm, {"rngs": nnx.Rngs(0)}, "epsilon", "use_scale", "num_features", 8),
        "linen": (linen.RMSNorm, {}, "epsilon", "use_scale", None, None),
    }


def test_layers_say_which_argument_is_meant():
    for layer, options, eps, gain, size, width in _layers().values():
        first = () if width is None else (width,)
        for name, meant in (("eps" if eps == "epsilon" else "epsilon", eps), ("weight", gain), ("varient", "variant")):
            with pytest.raises(TypeError, match=f"there is no argument {name!r}, expected .*; did you mean {meant!r}"):
                layer(*first, **options, **{name: 1})
        fix = f"did you mean {size!r}" if size else "leave it out, as the layer takes the size from its input"
        with pytest.raises(TypeError, match=f"there is no argument 'hidden_size', expected .*; {fix}"):
            layer(hidden_size=8, **options)


def test_layers_say_what_is_wrong():
    """With their own name and that of the argument; what comes with a call has the sentences of the functions."""
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    keras = pytest.importorskip("keras")
    own = {"torch": torch.ones, "keras": keras.ops.ones, "nnx": jnp.ones, "linen": jnp.ones}
    for name, (layer, options, eps, _, _, width) in _layers().items():
        first = () if width is None else (width,)
        op = "RMSNormalization" if name == "keras" else "RMSNorm"
        for wrong, kind, sentence in (
            ({"variant": "LLaMA"}, ValueError, r"variant is 'LLaMA', expected .*; did you mean 'llama'\?"),
            ({"partial": 2}, ValueError, r"partial is 2, expected a fraction in \(0, 1\]"),
            ({eps: -1.0}, ValueError, r"eps is -1\.0, expected a finite number >= 0"),
            ({eps: False}, TypeError, r"eps is False \(bool\), expected a number or None"),
            ({eps: "1e-6"}, TypeError, r"eps is '1e-6' \(str\), expected a number or None"),
        ):
            with pytest.raises(kind, match=f"^{op}: {sentence}"):
                layer(*first, **options, **wrong)
        if name != "linen":  # whose modules have no parameters of their own
            with pytest.raises(TypeError, match=r"x has dtype int32, expected float16"):
                layer(*first, **options)(own[name]((2, 8), dtype=torch.int32 if name == "torch" else "int32"))


def test_layers_refuse_options_when_they_are_built():
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    layers = _layers()
    build = {name: lambda entry=entry, **o: entry[0](*[w for w in entry[5:] if w], **entry[1], **o)
             for name, entry in layers.items()}  # fmt: skip
    for name, wrong, sentence in (
        ("torch", {"dtype": torch.int32}, "dtype is 'int32', expected 'float16', .* or 'float64'"),
        ("keras", {"dtype": "int32"}, "dtype is 'int32', expected 'float16'"),
        ("nnx", {"param_dtype": jnp.int32}, "param_dtype is 'int32', expected 'float16'"),
        ("linen", {"param_dtype": jnp.int32}, "param_dtype is 'int32', expected 'float16'"),
        ("keras", {"axis": 8}, "axis is 8, expected an axis up to 7, no size; leave it out"),
        ("nnx", {"reduction_axes": "last"}, "reduction_axes is 'last'"),
        ("linen", {"feature_axes": "last"}, "feature_axes is 'last'"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^RMSNorm(alization)?: {sentence}"):
            build[name](**wrong)
    with pytest.raises(TypeError, match=r"num_features is '8' \(str\), expected a size"):
        layers["nnx"][0]("8", **layers["nnx"][1])
    with pytest.raises(TypeError, match=r"no argument 'mask', expected 'x' or 'gate'; call rmsnorm\.tf_impl\.rms_norm"):
        build["keras"]()(X, mask=X > 0)
    with pytest.raises(TypeError, match=r"^RMSNormalization: x is None \(NoneType\), expected a tensor"):
        build["keras"]()(None)


def test_what_a_layer_shows():
    """The eps that counts, and what is not the preset's."""
    for name, (layer, options, eps, _, _, width) in _layers().items():
        shown = repr(layer(*([width] if width else []), variant=Variant.get("llama").replace(eps=1e-5), **options))
        assert re.search(rf"{eps} ?= ?1e-05\b", shown), (name, shown)


def test_an_array_is_named_by_dtype_and_shape(framework):
    """Never printed whole."""
    big = np.zeros((512, 1024))
    for option, sentence in (("eps", "expected a number"), ("variant", "expected a name"), ("axis", "expected an int")):
        with pytest.raises(TypeError, match=rf"^rms_norm: {option} is f64\[512, 1024\] \(ndarray\), {sentence}"):
            framework.functional.rms_norm(framework.send(X), **{option: big})


TENSOR = {
    "torch": "a torch.Tensor; convert it with torch.as_tensor",
    "tf": "a tf.Tensor; convert it with tf.convert_to_tensor",
    "flax": "a jax.Array; convert it with jnp.asarray",
}


@pytest.mark.parametrize("framework", TENSOR, indirect=True)
def test_a_list_is_no_tensor(framework):
    """NumPy's functions accept lists, as NumPy does; those of the other frameworks accept tensors only."""
    norm, vjp, tensor = framework.functional.rms_norm, framework.functional.rms_norm_vjp, framework.send(X)
    wrong = [([[1.0, 2.0]], "[[1.0, 2.0]] (list)"), (1.0, "1.0 (float)"), (True, "True (bool)")]
    wrong += [(X, "f32[4, 16] (ndarray)")] if framework.name != "flax" else []
    for value, said in (*wrong, (None, "None (NoneType)")):
        got = f"is {said}, expected {TENSOR[framework.name]}"
        _raised(TypeError, f"rms_norm: x {got}", norm, value)
        _raised(TypeError, f"rms_norm_vjp: x {got}", vjp, tensor, value)
        if value is None:
            with pytest.raises(TypeError, match=r"^rms_norm_vjp: dy is None \(NoneType\), expected a"):
                vjp(value, tensor)
        else:
            _raised(TypeError, f"rms_norm_vjp: dy {got}", vjp, value, tensor)
            for name in ("scale", "bias", "mask", "residual"):
                _raised(TypeError, f"rms_norm: {name} {got}", norm, tensor, **{name: value})
    with pytest.raises(TypeError, match=r"(?s)^rms_norm_vjp: dy is .*, expected a "):  # a pair without a residual
        vjp((tensor, tensor), tensor)


def test_a_variant_checks_every_field():
    for kind, sentence, fields in (
        (V, f"eps is -1.0, {NUMBER}", {"eps": -1.0}), (T, f"eps is True (bool), {A_NUMBER}", {"eps": True}),
        (V, f"partial is 0.0, {FRACTION}", {"partial": 0.0}), (T, f"partial is '1/2' (str), {A_PART}",
                                                               {"partial": "1/2"}),
        (V, "eps_position is 'under', expected 'inside', 'outside' or 'clamp'; choose one of these",
         {"eps_position": "under"}),
        (V, "rounding is 'none', expected 'before_scale', 'after_scale' or 'input_dtype'; choose one of these",
         {"rounding": "none"}),
        (V, "partial_rounding is 'round', expected 'ceil' or 'floor'; choose one of these",
         {"partial_rounding": "round"}),
        (V, "result_dtype is 'y', expected 'x', 'scale', 'promote', 'promote_first' or 'half_scale'; choose one of "
            "these", {"result_dtype": "y"}),
        *((V, f"scale_offset is {offset}, expected a finite number; use 0 or 1", {"scale_offset": offset})
          for offset in (math.nan, math.inf)),
        (T, "bias is 1 (int), expected a bool; use True or False", {"bias": 1}),
    ):  # fmt: skip
        _raised(kind, f"Variant: {sentence}", Variant, name="mine", **fields)
        _raised(kind, f"Variant: {sentence}", Variant.get("standard").replace, **fields)


def test_a_variant_names_its_fields():
    with pytest.raises(ValueError, match=r"^Variant.replace: field is 'epsilon', expected 'name', .*; choose one"):
        Variant.get("llama").replace(epsilon=1e-5)
    with pytest.raises(ValueError, match=r"^Variant.get: variant is 'gema', expected .*; did you mean 'gemma'\?$"):
        Variant.get("gema")
    with pytest.raises(TypeError, match=r"^Variant.get: variant is 3 \(int\), expected a name or a Variant; pass one"):
        Variant.get(3)


def test_keras_without_tensorflow_has_other_backends(monkeypatch):
    for installed, words in (
        ({"keras", "jax", "torch"}, "if KERAS_BACKEND=jax or torch is set before Python starts"),
        ({"jax", "torch"}, "pip install '.[tf]'"),
    ):
        monkeypatch.setattr(frameworks, "find_spec", {name: name for name in installed}.get)
        said = r"tensorflow is not installed, expected .*pip install '.\[tf\]'"
        with pytest.raises(ModuleNotFoundError, match=said) as no, frameworks.imported("tf"):
            raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")
        assert str(no.value).endswith(words)
