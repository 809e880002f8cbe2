"""The faults that the tests must notice, at the public surface of the package: `make faults` tries them.

The names of the surfaces are those that users have, so the table outlives what is behind them. A surface that moves to
another module changes one line of ``SURFACES``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from fault_changes import (
    Call,
    axes,
    double_last,
    dtype,
    flushed,
    framework,
    gain_misses_last_row,
    in_memory,
    nth,
    overflows,
    passing,
    preset,
    replaced,
    rounded_twice,
    slope,
    status,
    stop,
    traced,
    ulp,
    with_array,
    with_first,
    without_last_row,
    writes,
)  # fmt: skip


class Surface(NamedTuple):
    """Where something public is defined, and the tests that should notice a fault of it first."""

    module: str
    tests: str


FUNCTIONS: Final = "tests/table --ignore tests/table/test_layers_alike.py"
LAYERS: Final = "tests/table/test_layers_alike.py tests/table/test_errors.py"
SURFACES: Final = {
    "numpy": Surface("rmsnorm.numpy_impl.functional", "tests/golden tests/table -k 'not tf and not flax'"),
    "fast": Surface("rmsnorm.numpy_impl.fast", "tests/kernels tests/table"),
    "torch": Surface("rmsnorm.torch_impl.functional", f"{FUNCTIONS} tests/torch_impl -k 'not tf and not flax'"),
    "torch layer": Surface("rmsnorm.torch_impl.layers", f"{LAYERS} tests/torch_impl -k 'not tf and not flax'"),
    "tf": Surface("rmsnorm.tf_impl.functional", f"{FUNCTIONS} tests/tf_impl -k 'not torch and not flax'"),
    "keras": Surface("rmsnorm.tf_impl.layers", f"{LAYERS} tests/tf_impl -k 'not torch and not flax'"),
    "jax": Surface("rmsnorm.flax_impl.functional", f"{FUNCTIONS} tests/flax_impl -k 'not torch and not tf'"),
    "nnx": Surface("rmsnorm.flax_impl.layers", f"{LAYERS} tests/flax_impl -k 'not torch and not tf'"),
    "linen": Surface("rmsnorm.flax_impl.linen", f"{LAYERS} tests/flax_impl -k 'not torch and not tf'"),
    "variants": Surface(
        "rmsnorm.specification.variants", "tests/specification tests/table/test_errors.py tests/golden"
    ),
    "check": Surface(
        "rmsnorm.parity.checking",
        "tests/tools/test_zoo.py tests/tools/test_reports.py tests/tools/test_check.py tests/tools/test_design.py",
    ),
    "report": Surface("rmsnorm.parity.report", "tests/tools/test_reports.py tests/tools/test_zoo.py"),
    "quantised": Surface("rmsnorm.parity.quantised", "tests/test_quantised.py"),
    "quantised golden": Surface("rmsnorm.numpy_impl.quantised", "tests/test_quantised.py"),
    "vectors": Surface("rmsnorm.parity.static", "tests/tools/test_vectors.py"),
    "identify": Surface("rmsnorm.identify.search", "tests/tools/test_zoo.py tests/tools/test_equations.py"),
    "identity": Surface(
        "rmsnorm.identify.identity",
        "tests/tools/test_zoo.py tests/tools/test_identify.py",
    ),
    "replace": Surface("rmsnorm.conversion.replacement", "tests/conversion"),
    "to_rms_norm": Surface("rmsnorm.conversion.layer_norm", "tests/conversion/test_layer_norm.py"),
    "nematus": Surface(
        "rmsnorm.nematus.model",
        "tests/nematus/test_options.py tests/nematus/test_files.py tests/nematus/test_models.py",
    ),
    "translate": Surface("rmsnorm.nematus.translate", "tests/cli tests/nematus"),
    "nematus models": Surface("rmsnorm.nematus.protocol", "tests/nematus tests/cli"),
    "convert": Surface("rmsnorm.nematus.convert", "tests/cli tests/nematus"),
    "files": Surface("rmsnorm.files.tensors", "tests/nematus tests/tools/test_checkpoint.py"),
    "command": Surface("rmsnorm.cli", "tests/tools/test_commands.py tests/tools/test_identify.py tests/cli"),
    "explain": Surface("rmsnorm.explaining", "tests/tools/test_explain.py"),
}


class Fault(NamedTuple):
    """A surface, the name there (dotted for a method), what is wrong, and the change of a call that makes it wrong."""

    surface: str
    attribute: str
    name: str
    change: Callable[[Call], Any]

    @property
    def title(self) -> str:
        return f"{self.surface}: {self.name}"


FOUR_AXES: Final = "y is one ulp off where x has four axes"
OF_FRAMEWORKS: Final[list[tuple[str, str, Callable[[Call], Any]]]] = [
    ("rms_norm", FOUR_AXES, lambda c: with_first(c(), ulp) if axes(c, 4) else c()),
    ("rms_norm", "eps is ignored in a compiled program", lambda c: c(eps=None) if traced(c) else c()),
    ("rms_norm", "a mask with one column for all is read as dense",
     lambda c: c(mask=None) if getattr(c["mask"], "shape", ())[-1:] == (1,) else c()),
    ("rms_norm", "dx is off by 2^-12 of itself in float32",
     lambda c: c(x=slope(c["x"], 1 + 2.0**-12)) if dtype(c["x"]) == "float32" else c()),
    ("rms_norm", "the gradient for the residual is dropped",
     lambda c: c(residual=stop(c["residual"])) if c["residual"] is not None else c()),
    ("rms_norm", "the gradient for the gate is dropped",
     lambda c: c(gate=stop(c["gate"])) if c["gate"] is not None else c()),
    ("rms_norm_vjp", "dscale lacks the last row", without_last_row),
]  # fmt: skip

FAULTS: Final = [
    # the golden
    Fault("numpy", "rms_norm", FOUR_AXES, lambda c: with_first(c(), ulp) if axes(c, 4) else c()),
    Fault("numpy", "rms_norm", "y of bfloat16 is rounded twice", rounded_twice),
    Fault("numpy", "rms_norm", "eps is ignored beside a variant that is an object",
          lambda c: c() if isinstance(c["variant"], (str, type(None))) else c(eps=None)),
    Fault("numpy", "rms_norm", "partial is ignored for float16",
          lambda c: c(partial=None) if dtype(c["x"]) == "float16" else c()),
    Fault("numpy", "rms_norm", "a mask with one column for all is read as dense",
          lambda c: c(mask=None) if getattr(c["mask"], "shape", ())[-1:] == (1,) else c()),
    Fault("numpy", "rms_norm", "x is written to", writes),
    Fault("numpy", "rms_norm", "subnormal numbers are 0", flushed),
    Fault("numpy", "rms_norm", "the squares of large numbers overflow", overflows),
    Fault("numpy", "rms_norm", "out_dtype is ignored for float64",
          lambda c: c(out_dtype=None) if dtype(c["x"]) == "float64" else c()),
    Fault("numpy", "rms_norm", "1 / rho is one ulp off",
          lambda c: (*c()[:-1], ulp(c()[-1])) if c["return_inverse_rms"] else c()),
    Fault("numpy", "rms_norm_vjp", "dx is off by 2^-20 of itself in float32",
          lambda c: nth(c(), 0, lambda dx: dx * (1 + 2.0**-20) if dtype(dx) == "float32" else dx)),
    Fault("numpy", "rms_norm_vjp", "dscale lacks the last row", without_last_row),
    Fault("numpy", "rms_norm_vjp", "dbias of one row is 0",
          lambda c: nth(c(), 2, lambda d: d * 0) if c["x"].size and c["x"].size == c["x"].shape[-1] else c()),
    Fault("numpy", "rms_norm_vjp", "dresidual is one ulp off",
          lambda c: nth(c(), 3, ulp) if c["residual"] is not None else c()),
    Fault("numpy", "rms_norm_vjp", "dgate has the wrong sign",
          lambda c: (*c()[:-1], -c()[-1]) if c["gate"] is not None else c()),
    Fault("numpy", "rms_norm_jvp", "the tangent of the bias is dropped",
          lambda c: c(tangents=(*c["tangents"][:2], None)) if len(c["tangents"]) > 2 else c()),
    Fault("fast", "rms_norm", "y is one ulp off in rows of more than 1,024",
          lambda c: with_first(c(), ulp) if c["x"].shape[-1] > 1024 else c()),
    Fault("fast", "rms_norm_vjp", "dscale is one ulp off", lambda c: nth(c(), 1, ulp)),
    # the functions of three frameworks
    *(Fault(surface, *fault) for surface in ("torch", "tf", "jax") for fault in OF_FRAMEWORKS),
    Fault("torch", "rms_norm", "dx of a frozen gain is halved",
          lambda c: c(x=slope(c["x"], 0.5)) if c["scale"] is not None and not c["scale"].requires_grad else c()),
    Fault("torch", "rms_norm", "automatic differentiation leaves the last row out of dscale", gain_misses_last_row),
    Fault("torch", "rms_norm", "a tensor that is not dense is read as if it were", in_memory),
    Fault("torch", "rms_norm", "partial is ignored where there is no gain",
          lambda c: c(partial=None) if c["scale"] is None else c()),
    Fault("torch", "rms_norm", "the squares of large numbers overflow", overflows),
    Fault("tf", "rms_norm", "out_dtype is ignored in a graph", lambda c: c(out_dtype=None) if traced(c) else c()),
    # the layer of PyTorch
    Fault("torch layer", "RMSNorm.forward", "dx is halved in bfloat16",
          lambda c: c(x=slope(c["x"], 0.5)) if dtype(c["x"]) == "bfloat16" else c()),
    Fault("torch layer", "RMSNorm.forward", "y in training is one ulp off",
          lambda c: with_first(c(), ulp) if c["self"].training else c()),
    Fault("torch layer", "RMSNorm.__setattr__", "an eps that is set later is ignored",
          lambda c: None if c["name"] == "eps" and "eps" in c["self"].__dict__ else c()),
    Fault("torch layer", "RMSNorm.state_dict", "a key of the state_dict is renamed",
          lambda c: type(c())((k.replace("weight", "scale"), v) for k, v in c().items())),
    Fault("torch layer", "RMSNorm.reset_parameters", "the gain of Gemma is 1 at first",
          lambda c: (c(), c["self"].weight is not None and c["self"].weight.data.fill_(1))[0]),
    Fault("torch layer", "RMSNorm.forward", "y is one ulp off with two normalised axes",
          lambda c: with_first(c(), ulp) if len(c["self"].normalized_shape) > 1 else c()),
    Fault("torch layer", "RMSNorm.extra_repr", "it does not say its eps", lambda c: re.sub(r"eps=[^,]*, ", "", c())),
    # the layer of Keras
    Fault("keras", "RMSNormalization.call", FOUR_AXES, lambda c: with_first(c(), ulp) if axes(c, 4) else c()),
    Fault("keras", "RMSNormalization.get_config", "get_config has no epsilon",
          lambda c: {name: value for name, value in c().items() if name != "epsilon"}),
    Fault("keras", "RMSNormalization.get_config", "get_config has no variant",
          lambda c: {name: value for name, value in c().items() if name != "variant"}),
    Fault("keras", "RMSNormalization.call", "the gate is ignored", lambda c: c(gate=None)),
    Fault("keras", "RMSNormalization.call", "dx is halved in a graph",
          lambda c: c(x=slope(c["x"], 0.5)) if framework(c["x"]) == "tensorflow" and traced(c) else c()),
    Fault("keras", "RMSNormalization.compute_output_shape", "the shape of y has one more axis", lambda c: (*c(), 1)),
    # the layers of Flax
    Fault("nnx", "RMSNorm.__call__", FOUR_AXES, lambda c: with_first(c(), ulp) if axes(c, 4) else c()),
    Fault("nnx", "RMSNorm.__call__", "the mask is ignored", lambda c: c(mask=None)),
    Fault("nnx", "RMSNorm.__call__", "dx is halved", lambda c: c(x=slope(c["x"], 0.5))),
    Fault("nnx", "RMSNorm.__call__", "the sum with the residual is not returned",
          lambda c: (c()[0], c["x"]) if c["residual"] is not None else c()),
    Fault("linen", "RMSNorm.__call__", FOUR_AXES, lambda c: with_first(c(), ulp) if axes(c, 4) else c()),
    Fault("linen", "RMSNorm.__call__", "dx is halved", lambda c: c(x=slope(c["x"], 0.5))),
    # variants
    Fault("variants", "get_variant", "llama has another eps", preset("llama", eps=1e-5)),
    Fault("variants", "get_variant", "gemma has no offset", preset("gemma", scale_offset=0)),
    Fault("variants", "get_variant", "t5 rounds after the gain", preset("t5", rounding="after_scale")),
    Fault("variants", "get_variant", "lasagne has no bias", preset("lasagne", bias=False)),
    Fault("variants", "check_eps", "an eps below 0 is taken",
          lambda c: None if isinstance(c["eps"], float) and c["eps"] < 0 else c()),
    # check
    Fault("check", "check", "what fails only with other axes passes", lambda c: passing(c, lambda r: "axes" in r.case)),
    Fault("check", "check", "everything in float16 passes", lambda c: passing(c, lambda r: r.dtype == "float16")),
    Fault("check", "check", "every dscale passes", lambda c: passing(c, lambda r: r.quantity == "dscale")),
    Fault("check", "check", "every dresidual passes", lambda c: passing(c, lambda r: r.quantity == "dresidual")),
    Fault("check", "check", "gradients are never asked", lambda c: c(gradients=False)),
    Fault("check", "check", "a compiled program is never asked", lambda c: c(compiled=False)),
    Fault("check", "check", "whether rows depend on the batch is never asked", lambda c: c(batch_invariant=False)),
    Fault("report", "Report.text", "a report that fails says it passed", lambda c: c().replace(" is not ", " is ")),
    Fault("quantised", "check_quantised", "wrong codes pass", lambda c: passing(c, lambda r: r.quantity == "q")),
    Fault("quantised golden", "rms_norm_quantised", "a scale is one ulp off", lambda c: nth(c(), 1, ulp)),
    Fault("vectors", "hashed", "the vectors have another input", lambda c: c(seed=c["seed"] + 1)),
    Fault("vectors", "_end", "the intervals of the vectors are twice as wide", lambda c: c(factor=2 * c["factor"])),
    # identify
    Fault("identify", "identify", "a wrong gradient is no defect", lambda c: c(gradients=False)),
    Fault("identify", "identify", "what has a variant is recognised, whatever its defects",
          lambda c: replaced(c(), recognised=c().variant is not None)),
    Fault("identify", "identify_opened", "eps outside of the root is said to be inside",
          lambda c: (lambda i: replaced(i, variant=i.variant and i.variant.replace(eps_position="inside")))(c())),
    Fault("identity", "Identity.headline", "gemma is called llama", lambda c: c().replace("gemma", "llama")),
    Fault("identity", "Identity.text", "only the headline is said", lambda c: "\n".join(c().splitlines()[:1])),
    Fault("identity", "Identity.unlike", "every variant is said to be the same", lambda c: {}),
    # conversion
    Fault("replace", "replace", "a dry run changes the model", lambda c: c(dry_run=False)),
    Fault("replace", "replace", "the last norm is replaced without a word", lambda c: c()[:-1]),
    Fault("replace", "replace", "the variant that was asked for is ignored", lambda c: c(variant=None)),
    Fault("replace", "replace", "nothing is replaced", lambda c: c(dry_run=True)),
    Fault("to_rms_norm", "to_rms_norm", "no difference is said", lambda c: replaced(c(), exact=0.0, error=0.0)),
    Fault("to_rms_norm", "to_rms_norm", "the old model is returned", lambda c: replaced(c(), model=c["model"])),
    # models of Nematus
    Fault("nematus", "load", "one parameter is one ulp off",
          lambda c: (lambda m: replaced(m, parameters=with_array(m.parameters, ulp)))(c())),
    Fault("nematus", "load", "the norm that was asked for is ignored", lambda c: c(norm=None)),
    Fault("nematus", "load", "the dialect that was asked for is ignored", lambda c: c(dialect=None)),
    Fault("nematus models", "Model.translate", "the beam has one sentence", lambda c: c(beam_size=1)),
    Fault("nematus models", "Model.loss", "the loss of the last sentence is doubled", double_last),
    Fault("translate", "score", "alpha is ignored", lambda c: c(alpha=0.0)),
    Fault("translate", "translate", "the lines are in another order", lambda c: iter([*c()][::-1])),
    Fault("convert", "convert", "LayerNorm stays LayerNorm", lambda c: c(rms_norm=False)),
    Fault("files", "npz", "arrays of a .npz are float32",
          lambda c: (lambda tensors: (tensors[0], lambda name: tensors[1](name).astype("float32")))(c())),
    # commands
    Fault("command", "main", "a difference ends with status 0", status),
    Fault("explain", "explain", "the recipe is called a kernel",
          lambda c: re.sub("the (recipe|golden), as", "the kernel of", c())),
]  # fmt: skip
