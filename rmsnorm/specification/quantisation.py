"""The specification of RMSNorm followed by quantisation: every numerical choice has a name. No array library.

h = x + residual;  y = h / rho * (o + gain);  s = scale of a block, from max |y|;  q = code of y / s

R rounds to T, the dtype of x (of x + residual if there is a residual), to nearest with ties to even.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

from rmsnorm.specification import errors
from rmsnorm.specification.variants import is_real


class Format(NamedTuple):
    """The numbers of an element: its stored mantissa bits, its smallest normal exponent, its largest number."""

    mantissa: int
    least: int
    largest: float

    def has(self, number: float) -> bool:
        """Whether it is one of them and above 0."""
        step = 2.0 ** (max(math.frexp(number)[1] - 1, self.least) - self.mantissa)
        return 0 < number <= self.largest and number % step == 0


FORMATS: Final = {
    "e4m3fn": Format(3, -6, 448.0),
    "e5m2": Format(2, -14, 57344.0),
    "e4m3fnuz": Format(3, -7, 240.0),
    "e2m1fn": Format(1, 0, 6.0),
    "int8": Format(40, 40, 127.0),  # all integers below 2^41, of which those beyond wrap
}


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """One norm followed by one quantisation, with every choice that changes a code or a scale.

    Every operation of the scale is one of float32, rounded once: ``1 / qmax`` and ``1 / s`` are float32 numbers, and
    amax is float32(max |y|). g is the global scale.

    Attributes:
        name: the kernel, and which of its paths.
        element: the format of the codes, by the name that ml_dtypes has for it without ``float8_`` or ``float4_``.
        qmax: the code that amax is mapped to, and the largest that is returned if ``overflow`` is ``saturate``.
        qmin: the smallest code; -qmax, or -128 for int8 if the kernel uses it.
        block: how many neighbours share a scale: ``static``, a scale that the call gets; ``row``; or a number.
        residual_rounding: how x + residual is rounded to T where it is stored and returned.
        statistic_reads: rho is that of the ``stored`` sum, or of the ``sum`` before that rounding.
        values_read: the same, for the elements that are divided by rho.
        order: ``norm_first`` (h / rho) * gain, ``gain_first`` (h * gain) / rho.
        round_norm: whether R follows the division by rho.
        round_gain: whether R follows the product with the gain.
        offset: ``none`` the gain; ``exact`` 1 + gain; ``rounded`` 1 + gain, rounded to the dtype of the gain.
        amax_floor: a lower bound of amax.
        amax_nan: whether a NaN in a block is left out of amax, or makes it NaN.
        scale: s before it is rounded to its format.
        scale_floor: a lower bound of s, before it is rounded to its format.
        scale_format: the format of s.
        scale_round: how s is rounded to that: ``half_even``, e4m3fn with saturation; for e8m0fnu the exponent is
            ``floor`` floor(log2 amax) - floor(log2 qmax), ``ceil`` the same with ceil(log2 amax), ``even`` as floor, of
            amax rounded to the mantissa of the element, ``rceil`` ceil(log2 s), ``nearest`` log2 s to nearest.
        global_scale: whether there is a g: ``given`` with the call, or ``amax``, 448 qmax / amax of the whole array,
            which is 1 where that is 0 or infinite.
        quantise_with: whether y is divided by the ``stored`` s or by the one before it was rounded to its format.
        apply: how y is divided by s.
        zero_scale: the reciprocal of an s that is 0: ``zero``, ``infinity``, or ``largest`` number of float32, which is
            then a bound of every reciprocal.
        round_scaled: the format to which y / s is rounded before its code is decided. ``none`` decides the exact real.
        rounding: to a code.
        overflow: of a y / s beyond the codes: ``saturate`` the nearest code; ``nan`` what the format has for it, NaN or
            infinity; ``wrap`` the last eight bits of the integer, which are 0 for infinity.
        nan: the code of NaN.
        source: where it is defined.

    Raises:
        ValueError, TypeError: a field is out of its domain, or does not go with another one; the message says which.

    Example:
        >>> Quantisation.get("vllm.static").replace(element="e5m2", qmax=57344, qmin=-57344).apply
        'y * (1 / s)'
    """

    name: str
    element: Literal["e4m3fn", "e5m2", "e4m3fnuz", "e2m1fn", "int8"] = "e4m3fn"
    qmax: float = 448.0
    qmin: float = -448.0
    block: Literal["static", "row"] | int = "row"
    residual_rounding: Literal["nearest", "truncate"] = "nearest"
    statistic_reads: Literal["stored", "sum"] = "stored"
    values_read: Literal["stored", "sum"] = "stored"
    order: Literal["norm_first", "gain_first"] = "norm_first"
    round_norm: bool = False
    round_gain: bool = True
    offset: Literal["none", "exact", "rounded"] = "none"
    amax_floor: float = 0.0
    amax_nan: Literal["drop", "keep"] = "drop"
    scale: Literal[
        "amax / qmax", "amax * (1 / qmax)", "(g * amax) * (1 / qmax)", "g * (amax * (1 / qmax))",
        "amax * (g * (1 / qmax))",
    ] = "amax / qmax"  # fmt: skip
    scale_floor: float = 0.0
    scale_format: Literal["float32", "float16", "e8m0fnu", "e4m3fn"] = "float32"
    scale_round: Literal["half_even", "floor", "ceil", "rceil", "even", "nearest"] = "half_even"
    global_scale: Literal["none", "given", "amax"] = "none"
    quantise_with: Literal["stored", "unrounded"] = "stored"
    apply: Literal["y / s", "y * (1 / s)", "y * (g * (1 / s))", "y * (1 / (s * (1 / g)))"] = "y / s"
    zero_scale: Literal["zero", "infinity", "largest"] = "infinity"
    round_scaled: Literal["none", "float32", "bfloat16"] = "float32"
    rounding: Literal["half_even", "half_away", "half_down", "truncate"] = "half_even"
    overflow: Literal["saturate", "nan", "wrap"] = "saturate"
    nan: Literal["nan", "qmax", "zero"] = "nan"
    source: str = ""

    def __post_init__(self) -> None:
        for name, known in choices().items():
            value = getattr(self, name)
            if value not in known or type(value) is not type(known[0]):
                raise errors.not_a_choice("Quantisation", name, value, known)
        for name, is_kept, want, fix in self._rules():
            if not is_kept:
                raise errors.out_of_domain("Quantisation", name, getattr(self, name), want, fix)

    def _rules(self) -> Iterator[tuple[str, bool, str, str]]:
        """Of a field: its name, whether it is in its domain and goes with another field, what it may be, and a fix."""
        for name in ("amax_floor", "scale_floor"):
            number = getattr(self, name)
            yield name, is_real(number) and 0 <= number < math.inf, "a finite number >= 0", "pass 0 for none"
        numbers = FORMATS[self.element]
        want = f"a number of {self.element} above 0, at most {numbers.largest:g}"
        yield "qmax", is_real(self.qmax) and numbers.has(self.qmax), want, f"pass {numbers.largest:g}"
        is_size = isinstance(self.block, int) and self.block > 0 and self.block is not True
        want = "'static', 'row' or a number of elements"
        yield "block", self.block in ("static", "row") or is_size, want, "pass 16 or 32"
        every, is_static, is_mx = choices(), self.block == "static", self.scale_format == "e8m0fnu"
        has_no_nan, overflows = self.element in ("int8", "e2m1fn"), {"int8": "wrap", "e2m1fn": "saturate"}
        is_of_amax = self.scale_round in ("floor", "ceil", "even")
        of_g = {
            name: [text for text in every[name] if ("g" in re.findall(r"\w+", text)) == (self.global_scale != "none")]
            for name in ("scale", "apply")
        }
        pairs: dict[str, tuple[str, Sequence[Any]]] = {
            "qmin": ("qmax", (-self.qmax, -128.0) if self.element == "int8" else (-self.qmax,)),
            "scale_format": ("block", ("float32",) if is_static else every["scale_format"]),
            "global_scale": ("block", ("none",) if is_static else every["global_scale"]),
            "scale": ("global_scale", of_g["scale"]),
            "apply": ("global_scale", of_g["apply"]),
            "scale_round": ("scale_format", every["scale_round"][1:] if is_mx else ("half_even",)),
            "scale_floor": ("scale_round", (0.0,) if is_of_amax else (self.scale_floor,)),
            "zero_scale": ("apply", ("infinity",) if self.apply == "y / s" else every["zero_scale"]),
            "overflow": ("element", ("saturate", overflows.get(self.element, "nan"))),
            "nan": ("element", ("qmax", "zero") if has_no_nan else every["nan"]),
        }  # fmt: skip
        for name, (other, known) in pairs.items():
            want = f"{' or '.join(map(str, known))} for {other} {getattr(self, other)!r}"
            yield name, getattr(self, name) in known, want, "change the two together"

    @property
    def label(self) -> str:
        """Its name, and what differs from the preset of that name.

        >>> Quantisation.get("torchao.mx").replace(scale_round="ceil").label, Quantisation.get("torchao.mx").label
        ("torchao.mx with scale_round='ceil'", 'torchao.mx')
        """
        own, preset = asdict(self), asdict(QUANTISATIONS.get(self.name, self))
        changed = [f"{name}={own[name]!r}" for name in own if own[name] != preset[name] and name != "source"]
        return f"{self.name} with {', '.join(changed)}" if changed else self.name

    def replace(self, **changes: Any) -> Quantisation:
        """One with other fields, which are checked as in a new one.

        >>> Quantisation.get("torchao.mx").replace(scale_round="rceil").scale_round
        'rceil'
        """
        for name in changes:
            if name not in asdict(self):
                raise errors.not_a_choice("Quantisation.replace", "field", name, asdict(self))
        return replace(self, **changes)

    @staticmethod
    def get(quantisation: str | Quantisation) -> Quantisation:
        """The preset of that name; a Quantisation is returned unchanged.

        >>> Quantisation.get("te.mxfp8").block
        32
        """
        return get_quantisation("Quantisation.get", quantisation)


@lru_cache(maxsize=1)
def choices() -> dict[str, tuple[Any, ...]]:
    """The choices of each field that has some."""
    hints = get_type_hints(Quantisation)
    known = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
    return known | {name: (True, False) for name, hint in hints.items() if hint is bool}


def get_quantisation(op: str, quantisation: Any) -> Quantisation:
    if isinstance(quantisation, Quantisation):
        return quantisation
    if not isinstance(quantisation, str):
        want, fix = "a name or a Quantisation", "pass one such as 'vllm.static'"
        raise errors.wrong_type(op, "quantisation", quantisation, want, fix)
    if quantisation not in QUANTISATIONS:
        near = difflib.get_close_matches(quantisation.lower(), QUANTISATIONS, n=1)
        raise errors.not_a_choice(op, "quantisation", quantisation, tuple(QUANTISATIONS), near[0] if near else None)
    return QUANTISATIONS[quantisation]


_INT8: Final[dict[str, Any]] = {"element": "int8", "qmax": 127.0}
_E2M1: Final[dict[str, Any]] = {
    "element": "e2m1fn", "qmax": 6.0, "qmin": -6.0, "block": 16, "scale_format": "e4m3fn", "nan": "qmax",
}  # fmt: skip
_PRESETS: Final = (
    Quantisation(
        name="vllm.static", block="static", round_norm=True, apply="y * (1 / s)", nan="qmax",
        source="vLLM, csrc layernorm_quant_kernels.cu: rms_norm_static_fp8_quant"),
    Quantisation(
        name="vllm.dynamic_fp8", statistic_reads="sum", values_read="sum", round_norm=True, nan="qmax",
        scale_floor=1 / (448 * 512),
        source="vLLM, fused_layernorm_dynamic_per_token_quant.cu: rms_norm_dynamic_per_token_quant"),
    Quantisation(
        name="flashinfer.static", block="static", statistic_reads="sum", values_read="sum", round_gain=False,
        apply="y * (1 / s)", round_scaled="none", nan="qmax",
        source="FlashInfer, include/flashinfer/norm.cuh: RMSNormQuant, FusedAddRMSNormQuant"),
    Quantisation(
        name="flashinfer.fp4", order="gain_first", scale="(g * amax) * (1 / qmax)", global_scale="given",
        apply="y * (g * (1 / s))", zero_scale="zero", round_scaled="none", **_E2M1,
        source="FlashInfer, cute_dsl/rmsnorm_fp4quant.py: rmsnorm_fp4quant, NVFP4"),
    Quantisation(
        name="trtllm.add_nvfp4", statistic_reads="sum", values_read="sum", scale="g * (amax * (1 / qmax))",
        global_scale="given", apply="y * (1 / (s * (1 / g)))", **_E2M1,
        source="TensorRT-LLM, fusedLayernormKernels/low_latency_layernorm.cuh, fp4_converter.cuh"),
    Quantisation(
        name="te.mxfp8", block=32, scale="amax * (1 / qmax)", scale_format="e8m0fnu", scale_round="rceil",
        round_scaled="none",
        source="Transformer Engine, RMSNorm to the dtype of x, then the MXFP8 quantiser: the default, without cuDNN"),
    Quantisation(
        name="te.nvfp4", scale="amax * (g * (1 / qmax))", global_scale="amax", apply="y * (1 / (s * (1 / g)))",
        zero_scale="largest", **_E2M1,
        source="Transformer Engine, RMSNorm to the dtype of x, then core_nvfp4.cuh"),
    Quantisation(
        name="torchao.mx", block=32, amax_nan="keep", scale_format="e8m0fnu", scale_round="floor", round_scaled="none",
        source="torchao, mx_formats/mx_tensor.py: to_mx of RMSNorm in the dtype of x; scale_round is its mode"),
    Quantisation(
        name="aiter.int8", statistic_reads="sum", values_read="sum", residual_rounding="truncate", round_gain=False,
        qmin=-128.0, amax_floor=1e-10, scale="amax * (1 / qmax)", apply="y * (1 / s)", round_scaled="none",
        rounding="truncate", overflow="wrap", nan="zero", **_INT8,
        source="aiter, rmsnorm_quant_kernels.hip on gfx942, before its int8 was rounded to nearest"),
    Quantisation(
        name="llama.q8_0", block=32, round_norm=True, scale_format="float16", quantise_with="unrounded",
        apply="y * (1 / s)", zero_scale="zero", rounding="half_away", qmin=-128.0, overflow="wrap", nan="zero", **_INT8,
        source="llama.cpp, ggml-quants.c: quantize_row_q8_0_ref of norm and mul in float32"),
    Quantisation(
        name="onnx.qdq", block="static", round_norm=True, qmin=-128.0, nan="zero", **_INT8,
        source="ONNX, RMSNormalization-23 and QuantizeLinear-25 without a zero point, to int8"),
)  # fmt: skip
QUANTISATIONS: Final = MappingProxyType({preset.name: preset for preset in _PRESETS})
