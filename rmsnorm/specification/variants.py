"""The specification of RMSNorm: every numerical choice has a name. No array library.

q = mean of h_i^2 over the counted elements
rho = sqrt(q + eps) | sqrt(q) + eps | max(sqrt(q), eps / sqrt(k))
y = h / rho * (scale_offset + scale) + bias
and with a gate z, which is an argument of the call: y * f(z), or h = x * f(z)
"""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from numbers import Real
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from rmsnorm.specification import dtypes, errors
from rmsnorm.specification.families import families, family_named

Preset = Literal[
    "standard",
    "paper",
    "zhang_torch",
    "zhang_tf",
    "theano",
    "nematus",
    "lasagne",
    "zero",
    "llama",
    "gemma",
    "gemma4",
    "t5",
    "olmo2",
    "torch",
    "keras",
    "flax",
    "equinox",
    "onnx",
    "apex",
    "transformer_engine",
    "mlx",
    "t5x",
    "x_transformers",
]
EpsPosition = Literal["inside", "outside", "clamp"]
Rounding = Literal["before_scale", "after_scale", "input_dtype"]
PartialRounding = Literal["ceil", "floor"]
ResultDtype = Literal["x", "scale", "promote", "promote_first", "half_scale"]
GateFunction = Literal["silu", "sigmoid"]
GatePosition = Literal["after", "before"]
ResidualRounding = Literal["before", "after"]
ScaleDtype = Literal["own", "x"]
# Below so much of eps / sqrt(k) a root is clamped, and rho has no derivative. A row of norm eps that was computed, such
# as one that was normalised before, has a root within a few 2^-53 of eps / sqrt(k): on one side for everybody.
CLAMPED: Final = 1 - 2.0**-48
CHOICES: Final = {
    "eps_position": get_args(EpsPosition),
    "rounding": get_args(Rounding),
    "partial_rounding": get_args(PartialRounding),
    "result_dtype": get_args(ResultDtype),
    "gate_function": get_args(GateFunction),
    "gate_position": get_args(GatePosition),
    "residual_rounding": get_args(ResidualRounding),
    "scale_dtype": get_args(ScaleDtype),
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One RMSNorm, with every choice that distinguishes it from the others.

    T is the dtype of x (of x + residual if there is a residual) and G the dtype of the parameters.

    Attributes:
        name: its name in messages and tables.
        eps: a finite number >= 0, or None for the machine epsilon of the arithmetic dtype (float32 for 16-bit T).
        eps_position: where eps enters the denominator rho, with q the mean square over k elements:
            ``inside`` sqrt(q + eps), ``outside`` sqrt(q) + eps, ``clamp`` max(sqrt(q), eps / sqrt(k)),
            so that eps is a lower bound of the norm. In a row whose norm is eps, up to rounding (``CLAMPED``), rho has
            the derivative of sqrt(q), as in torch.nn.functional.normalize.
        rounding: ``after_scale`` rounds once, at the end. ``before_scale`` rounds h / rho to T, then each
            operation with the parameters to promote(T, G). ``input_dtype`` allows an implementation to
            round every operation to T; all frameworks here round once, and the parity bound is wider.
        scale_offset: o in (o + scale); 1 if checkpoints store zero-centred gains.
        bias: whether layers of this variant have a bias by default.
        partial: fraction p of the elements, from the first, that enter q; None for all of them.
        partial_rounding: k = ceil(n p) or floor(n p), exact, and at least 1.
        result_dtype: the dtype of y: ``x`` T; ``scale`` G; ``promote`` promote(T, G); ``promote_first`` the same, to
            which ``before_scale`` rounds h / rho, too; ``half_scale`` G if that is a 16-bit format (and only then
            h / rho is rounded, to G), else at least float32. Without parameters T.
        gate_function: f of a gate z, where a call has one: ``sigmoid`` 1 / (1 + exp(-z)), or ``silu``, z times that.
        gate_position: ``after`` multiplies y by f(z) before its last rounding; ``before`` normalises x * f(z), which is
            not rounded to T. The product is taken in promote(T, the dtype of z, that of the products with the
            parameters), in float32 at least.
        residual_rounding: when x + residual is rounded to T, where a call has a residual: ``before`` it is normalised;
            or ``after``, so that the sum itself is normalised, which is taken in float32 at least, and only the
            returned sum is rounded.
        scale_dtype: ``own`` takes the gain as it is; ``x`` rounds it to T first, so that G is no wider than T. Its
            gradient keeps the dtype of the gain.
        scale_name: the name of the gain in this variant's checkpoints.
        source: where it is defined.

    Raises:
        ValueError, TypeError: a field is out of its domain; the message says which field, and what is allowed.

    Example:
        >>> Variant.get("llama").replace(eps=1e-5).rounding
        'before_scale'
    """

    name: str
    eps: float | None = 1e-6
    eps_position: EpsPosition = "inside"
    rounding: Rounding = "after_scale"
    scale_offset: float = 0.0
    bias: bool = False
    partial: float | Fraction | None = None
    partial_rounding: PartialRounding = "ceil"
    result_dtype: ResultDtype = "x"
    gate_function: GateFunction = "silu"
    gate_position: GatePosition = "after"
    residual_rounding: ResidualRounding = "before"
    scale_dtype: ScaleDtype = "own"
    scale_name: str = "scale"
    source: str = ""

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise errors.not_a_choice("Variant", name, getattr(self, name), choices)
        if self.eps is not None:
            check_eps("Variant", self.eps)
            object.__setattr__(self, "eps", _plain("eps", self.eps))
        if self.partial is not None:
            check_partial("Variant", self.partial)
            object.__setattr__(self, "partial", Fraction(str(self.partial)))  # 0.07 is 7/100, not a binary number
        if not is_real(self.scale_offset) or not -math.inf < self.scale_offset < math.inf:
            raise errors.out_of_domain("Variant", "scale_offset", self.scale_offset, "a finite number", "use 0 or 1")
        object.__setattr__(self, "scale_offset", _plain("scale_offset", self.scale_offset))
        if not isinstance(self.bias, bool):
            raise errors.wrong_type("Variant", "bias", self.bias, "a bool", "use True or False")
        # made once: a compiler that traces a call then has one text to compare, not every field
        object.__setattr__(self, "_json", json.dumps(asdict(self), default=str))

    @property
    def json(self) -> str:
        """All fields as a text, which ``from_json`` reads."""
        text: str = self.__dict__["_json"]
        return text

    @staticmethod
    def from_json(text: str) -> Variant:
        """The variant of which that is the ``json``; other text raises ValueError or TypeError.

        >>> Variant.from_json(Variant.get("llama").json) == Variant.get("llama")
        True
        """
        values = json.loads(text)
        partial = values.pop("partial")
        return Variant(**values, partial=None if partial is None else Fraction(partial))

    def __hash__(self) -> int:
        return hash((self.name, self.eps))  # equal variants agree in these; short, as plans are looked up by it

    def replace(self, **changes: Any) -> Variant:
        """A variant with other fields, which are checked as in a new one.

        >>> Variant.get("gemma").replace(eps=1e-5).eps
        1e-05
        """
        known = [field.name for field in fields(self)]
        for name in changes:
            if name not in known:
                raise errors.not_a_choice("Variant.replace", "field", name, known)
        return replace(self, **changes)

    @staticmethod
    def get(variant: str | Variant) -> Variant:
        """The preset of that name, which may be any str to a type checker; a Variant is returned unchanged.

        >>> Variant.get("standard").eps
        1e-06
        """
        return get_variant("Variant.get", variant)

    @property
    def label(self) -> str:
        """Its name, and what differs from the preset of that name.

        >>> Variant.get("llama").replace(eps=1e-5).label, Variant.get("llama").label
        ('llama with eps=1e-05', 'llama')
        """
        preset = PRESETS.get(self.name)
        if preset is None:
            return self.name
        changed = {
            f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(preset, f.name)
        }
        texts = [
            f"{name}={str(value) if isinstance(value, Fraction) else repr(value)}" for name, value in changed.items()
        ]
        return f"{self.name} with {', '.join(texts)}" if texts else self.name

    def eps_for(self, dtype: str) -> float:
        """Eps as a number, for x of that dtype. None becomes the machine epsilon of the arithmetic dtype.

        >>> Variant.get("torch").eps_for("bfloat16") == 2.0**-23
        True
        """
        return dtypes.epsilon(dtypes.arithmetic(dtype)) if self.eps is None else float(self.eps)

    def counted(self, n: int) -> int:
        """k, the number of elements out of n that enter the statistic, in exact arithmetic.

        >>> Variant.get("paper").replace(partial=0.07).counted(100)
        7
        """
        if self.partial is None:
            return n
        p = Fraction(self.partial)
        up = p.denominator - 1 if self.partial_rounding == "ceil" else 0
        k = (n * p.numerator + up) // p.denominator  # of numbers >= 0: in ONNX, // of others rounds towards 0
        return min(n, max(1, k))


def _plain(name: str, value: Any) -> float:
    """A number of any library as one of Python, which compilers and JSON know."""
    if type(value) is float:  # what a compiler traces
        return value
    try:
        return float(value)
    except OverflowError:
        raise errors.out_of_domain("Variant", name, value, "a number that float64 holds", "pass a float") from None


def is_real(value: object) -> bool:
    return isinstance(value, (int, float, Real)) and not isinstance(value, bool)


def check_eps(op: str, eps: Any) -> None:
    if not is_real(eps):
        raise errors.wrong_type(op, "eps", eps, "a number or None", "pass a float such as 1e-6")
    if not 0 <= eps < math.inf:  # this also rejects NaN
        raise errors.out_of_domain(op, "eps", eps, "a finite number >= 0", "pass a float such as 1e-6")


def check_partial(op: str, partial: Any) -> None:
    if not is_real(partial):
        raise errors.wrong_type(op, "partial", partial, "a number or None", "pass a fraction such as 0.0625")
    if not 0 < partial <= 1:
        raise errors.out_of_domain(op, "partial", partial, "a fraction in (0, 1]", "pass None for all elements")


def derive(op: str, variant: str | Variant, eps: float | None, partial: float | Fraction | None) -> Variant:
    """The variant of a call: a preset or a Variant, with the eps and partial of the call if there are any."""
    chosen = get_variant(op, variant)
    if eps is not None:
        check_eps(op, eps)
        chosen = chosen.replace(eps=eps)
    if partial is not None:
        check_partial(op, partial)
        chosen = chosen.replace(partial=partial)
    return chosen


def get_variant(op: str, variant: str | Variant) -> Variant:
    if isinstance(variant, Variant):
        return variant
    if not isinstance(variant, str):
        raise errors.wrong_type(op, "variant", variant, "a name or a Variant", "pass one such as 'llama'")
    if variant not in PRESETS:
        family = family_named(variant)
        if family is not None and variant.lower() not in PRESETS:
            raise errors.family(op, variant, [(norm.computes, norm.eps) for norm in families()[family]])
        near = difflib.get_close_matches(variant.lower(), PRESETS, n=1)
        raise errors.not_a_choice(op, "variant", variant, tuple(PRESETS), near[0] if near else None)
    return PRESETS[variant]


_ZHANG: Final = "Zhang & Sennrich 2019, "
_PRESETS: Final = (
    Variant(name="standard", source="the majority: Keras, Flax, OLMo 2, Gemma 4"),
    Variant(name="paper", eps=0.0, scale_name="g", source="arXiv 1910.07467"),
    Variant(
        name="zhang_torch",
        eps=1e-8,
        eps_position="outside",
        rounding="input_dtype",
        partial_rounding="floor",
        result_dtype="promote",
        source=_ZHANG + "rmsnorm_torch.py",
    ),
    Variant(
        name="zhang_tf",
        eps=1e-8,
        rounding="input_dtype",
        partial_rounding="floor",
        source=_ZHANG + "rmsnorm_tensorflow.py",
    ),
    Variant(name="theano", eps=1e-5, rounding="input_dtype", scale_name="s", source=_ZHANG + "layers.py"),
    Variant(name="nematus", eps=1e-5, rounding="input_dtype", source="Nematus, RMSNormLayer (`new_std` in v0.3)"),
    Variant(
        name="lasagne",
        rounding="input_dtype",
        bias=True,
        scale_name="g",
        source=_ZHANG + "README, nn.py: axis (2, 3), feature_axis 1",
    ),
    Variant(name="zero", eps=1e-8, rounding="input_dtype", source="bzhangGo/zero, func.py"),
    Variant(
        name="llama",
        rounding="before_scale",
        result_dtype="promote",
        scale_name="weight",
        source="LLaMA, Mistral, Qwen in transformers",
    ),
    Variant(name="gemma", scale_offset=1.0, scale_name="weight", source="Gemma 1 to 3 in transformers"),
    Variant(name="gemma4", scale_name="weight", source="Gemma 3n and 4 in transformers"),
    Variant(
        name="t5",
        rounding="before_scale",
        result_dtype="half_scale",
        scale_name="weight",
        source="T5 in transformers",
    ),
    Variant(name="olmo2", scale_name="weight", source="OLMo 2 and gpt-oss in transformers"),
    Variant(name="torch", eps=None, scale_name="weight", source="torch.nn.RMSNorm"),
    Variant(name="keras", source="keras.layers.RMSNormalization"),
    Variant(name="flax", result_dtype="promote", source="flax.linen.RMSNorm, flax.nnx.RMSNorm"),
    Variant(name="equinox", eps=1e-5, bias=True, scale_name="weight", source="equinox.nn.RMSNorm"),
    Variant(
        name="onnx",
        eps=1e-5,
        rounding="before_scale",
        result_dtype="scale",
        source="ONNX RMSNormalization, opset 23",
    ),
    Variant(name="apex", eps=1e-5, rounding="before_scale", scale_name="weight", source="apex FusedRMSNorm"),
    Variant(
        name="transformer_engine",
        eps=1e-5,
        scale_name="weight",
        source="Transformer Engine (offset 1 with zero_centered_gamma)",
    ),
    Variant(
        name="mlx",
        eps=1e-5,
        rounding="before_scale",
        result_dtype="promote_first",
        scale_name="weight",
        source="MLX 0.32, mlx/fast.cpp: mx.fast.rms_norm",
    ),
    Variant(
        name="t5x",
        rounding="before_scale",
        scale_dtype="x",
        source="T5X, MaxText, EasyLM and Praxis: the gain is cast to the dtype of x first",
    ),
    Variant(
        name="x_transformers",
        eps=1e-12,
        eps_position="clamp",
        rounding="input_dtype",
        result_dtype="promote",
        scale_name="g",
        source="x-transformers RMSNorm",
    ),
)
PRESETS: Final = MappingProxyType({variant.name: variant for variant in _PRESETS})
