"""The specification of RMSNorm followed by quantisation: every numerical choice has a name. No array library.

h = x + residual;  y = h / rho * (o + gain);  s = scale of a block, from max |y|;  q = code of y / s

R rounds to T, the dtype of x (of x + residual if there is a residual), to nearest with ties to even.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

from rmsnorm.specification import errors
from rmsnorm.specification.variants import is_real


class Format(NamedTuple):
    """The dtype of a format, its stored mantissa bits, its smallest normal exponent, its largest number."""

    dtype: str
    mantissa: int
    least: int
    largest: float


FORMATS: Final = {
    "e4m3fn": Format("float8_e4m3fn", 3, -6, 448.0),
    "e5m2": Format("float8_e5m2", 2, -14, 57344.0),
    "e4m3fnuz": Format("float8_e4m3fnuz", 3, -7, 240.0),
    "e2m1fn": Format("float4_e2m1fn", 1, 0, 6.0),
    "int8": Format("int8", 40, 40, 127.0),  # all integers below 2^41, of which those beyond wrap
    "e8m0fnu": Format("float8_e8m0fnu", 0, -127, 2.0**127),
    "float16": Format("float16", 10, -14, 65504.0),
    "float32": Format("float32", 23, -126, 2.0**128 - 2.0**104),
}
# The share of the distance of two neighbours above which a size becomes the larger one, and what it becomes at it.
ROUNDINGS: Final = {
    "half_even": (0.5, "even"), "half_away": (0.5, "larger"), "half_down": (0.5, "smaller"),
    "truncate": (1.0, "smaller"), "floor": (1.0, "smaller"), "ceil": (0.0, "smaller"), "rceil": (0.0, "smaller"),
    "nearest": (2 * math.sqrt(0.5) - 1, "smaller"),
}  # fmt: skip
SCALES: Final[Mapping[str, Callable[..., Any]]] = {
    "amax / qmax": lambda amax, qmax, g: amax / qmax,
    "amax * (1 / qmax)": lambda amax, qmax, g: amax * (1 / qmax),
    "(g * amax) * (1 / qmax)": lambda amax, qmax, g: (g * amax) * (1 / qmax),
    "g * (amax * (1 / qmax))": lambda amax, qmax, g: g * (amax * (1 / qmax)),
    "amax * (g * (1 / qmax))": lambda amax, qmax, g: amax * (g * (1 / qmax)),
}
FACTORS: Final[Mapping[str, Callable[..., Any]]] = {  # by which y is multiplied; "y / s" is one division instead
    "y / s": lambda s, g: 1 / s,
    "y * (1 / s)": lambda s, g: 1 / s,
    "y * (g * (1 / s))": lambda s, g: g * (1 / s),
    "y * (1 / (s * (1 / g)))": lambda s, g: 1 / (s * (1 / g)),
}
OF_AMAX: Final = ("floor", "ceil", "even")  # which round amax to a power of two, and not s


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
        statistic_reads, values_read: rho is that of the ``stored`` sum, or of the ``sum`` before that rounding; and
            which of them is divided by rho.
        order: ``norm_first`` (h / rho) * gain, ``gain_first`` (h * gain) / rho.
        round_norm, round_gain: whether R follows the division by rho, and the product with the gain.
        offset: ``none`` the gain; ``exact`` 1 + gain; ``rounded`` 1 + gain, rounded to the dtype of the gain.
        amax_floor: a lower bound of amax.
        amax_nan: whether a NaN in a block is left out of amax, or makes it NaN.
        scale, scale_floor: s before it is rounded to its format, and a lower bound of that.
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
    scale: str = "amax / qmax"
    scale_floor: float = 0.0
    scale_format: Literal["float32", "float16", "e8m0fnu", "e4m3fn"] = "float32"
    scale_round: Literal["half_even", "floor", "ceil", "rceil", "even", "nearest"] = "half_even"
    global_scale: Literal["none", "given", "amax"] = "none"
    quantise_with: Literal["stored", "unrounded"] = "stored"
    apply: str = "y / s"
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
        _, mantissa, least, largest = FORMATS[self.element]
        is_one = is_real(self.qmax) and 0 < self.qmax <= largest
        step = 2.0 ** (max(math.frexp(self.qmax)[1] - 1, least) - mantissa) if is_one else 1.0
        want = f"a number of {self.element} above 0, at most {largest:g}"
        yield "qmax", is_one and self.qmax % step == 0, want, f"pass {largest:g}"
        is_size = isinstance(self.block, int) and self.block > 0 and self.block is not True
        want = "'static', 'row' or a number of elements"
        yield "block", self.block in ("static", "row") or is_size, want, "pass 16 or 32"
        is_int, is_static, every = self.element == "int8", self.block == "static", choices()
        beyond = {"int8": ("saturate", "wrap"), "e2m1fn": ("saturate",)}.get(self.element, ("saturate", "nan"))
        has_g = self.global_scale != "none"
        of_g = {text: "g *" in text or "/ g" in text for text in (*SCALES, *FACTORS)}
        pairs: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
            ("qmin", "qmax", (-self.qmax, *[-128.0] * is_int)),
            ("scale_format", "block", ("float32",) if is_static else every["scale_format"]),
            ("global_scale", "block", ("none",) if is_static else every["global_scale"]),
            ("scale", "global_scale", tuple(text for text in SCALES if of_g[text] == has_g)),
            ("apply", "global_scale", tuple(text for text in FACTORS if of_g[text] == has_g)),
            ("scale_round", "scale_format",
             every["scale_round"][1:] if self.scale_format == "e8m0fnu" else ("half_even",)),
            ("scale_floor", "scale_round", (0.0 if self.scale_round in OF_AMAX else self.scale_floor,)),
            ("zero_scale", "apply", ("infinity",) if self.apply == "y / s" else every["zero_scale"]),
            ("overflow", "element", beyond),
            ("nan", "element", ("qmax", "zero") if "nan" not in beyond else every["nan"]),
        )  # fmt: skip
        for name, other, known in pairs:
            want = f"{' or '.join(map(str, known))} for {other} {getattr(self, other)!r}"
            yield name, getattr(self, name) in known, want, "change the two together"

    @property
    def size(self) -> int:
        """How many elements a block has at least: 1 where it is no number."""
        return self.block if isinstance(self.block, int) else 1

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
    def get(quantisation: str | Quantisation, op: str = "Quantisation.get") -> Quantisation:
        """The preset of that name; a Quantisation is returned unchanged. ``op`` is who asks, for errors.

        >>> Quantisation.get("te.mxfp8").block
        32
        """
        if isinstance(quantisation, Quantisation):
            return quantisation
        if not isinstance(quantisation, str):
            want, fix = "a name or a Quantisation", "pass one such as 'vllm.static'"
            raise errors.wrong_type(op, "quantisation", quantisation, want, fix)
        if quantisation not in QUANTISATIONS:
            near = difflib.get_close_matches(quantisation.lower(), QUANTISATIONS, n=1)
            raise errors.not_a_choice(op, "quantisation", quantisation, tuple(QUANTISATIONS), near[0] if near else None)
        return QUANTISATIONS[quantisation]


@lru_cache(maxsize=1)
def choices() -> dict[str, tuple[Any, ...]]:
    """The choices of each field that has some."""
    hints = get_type_hints(Quantisation)
    known = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
    known |= {name: (True, False) for name, hint in hints.items() if hint is bool}
    return known | {"scale": tuple(SCALES), "apply": tuple(FACTORS)}


_INT8: Final = {"element": "int8", "qmax": 127.0, "qmin": -128.0, "nan": "zero"}
_NVFP4: Final = {
    "element": "e2m1fn", "qmax": 6.0, "qmin": -6.0, "block": 16, "scale_format": "e4m3fn", "nan": "qmax",
}  # fmt: skip
_MX: Final = {"block": 32, "scale_format": "e8m0fnu", "round_scaled": "none"}
_STATIC: Final = {"block": "static", "apply": "y * (1 / s)", "nan": "qmax"}
_SUM: Final = {"statistic_reads": "sum", "values_read": "sum"}
_PRESETS: Final[dict[tuple[str, str], dict[str, Any]]] = {  # by the name and the source
    ("vllm.static", "vLLM, csrc layernorm_quant_kernels.cu: rms_norm_static_fp8_quant"): {
        **_STATIC, "round_norm": True},
    ("vllm.dynamic_fp8", "vLLM, fused_layernorm_dynamic_per_token_quant.cu: rms_norm_dynamic_per_token_quant"): {
        **_SUM, "round_norm": True, "nan": "qmax", "scale_floor": 1 / (448 * 512)},
    ("flashinfer.static", "FlashInfer, include/flashinfer/norm.cuh: RMSNormQuant, FusedAddRMSNormQuant"): {
        **_STATIC, **_SUM, "round_gain": False, "round_scaled": "none"},
    ("flashinfer.fp4", "FlashInfer, cute_dsl/rmsnorm_fp4quant.py: rmsnorm_fp4quant, NVFP4"): {
        **_NVFP4, "order": "gain_first", "scale": "(g * amax) * (1 / qmax)", "global_scale": "given",
        "apply": "y * (g * (1 / s))", "zero_scale": "zero", "round_scaled": "none"},
    ("trtllm.add_nvfp4", "TensorRT-LLM, fusedLayernormKernels/low_latency_layernorm.cuh, fp4_converter.cuh"): {
        **_NVFP4, **_SUM, "scale": "g * (amax * (1 / qmax))", "global_scale": "given",
        "apply": "y * (1 / (s * (1 / g)))"},
    ("te.mxfp8", "Transformer Engine, RMSNorm to the dtype of x, then the MXFP8 quantiser: its default, not cuDNN"): {
        **_MX, "scale": "amax * (1 / qmax)", "scale_round": "rceil"},
    ("te.nvfp4", "Transformer Engine, RMSNorm to the dtype of x, then core_nvfp4.cuh"): {
        **_NVFP4, "scale": "amax * (g * (1 / qmax))", "global_scale": "amax", "apply": "y * (1 / (s * (1 / g)))",
        "zero_scale": "largest"},
    ("torchao.mx", "torchao, mx_formats/mx_tensor.py: to_mx of RMSNorm in the dtype of x; scale_round is its mode"): {
        **_MX, "amax_nan": "keep", "scale_round": "floor"},
    ("aiter.int8", "aiter, rmsnorm_quant_kernels.hip on gfx942, before its int8 was rounded to nearest"): {
        **_INT8, **_SUM, "residual_rounding": "truncate", "round_gain": False, "amax_floor": 1e-10,
        "scale": "amax * (1 / qmax)", "apply": "y * (1 / s)", "round_scaled": "none", "rounding": "truncate",
        "overflow": "wrap"},
    ("llama.q8_0", "llama.cpp, ggml-quants.c: quantize_row_q8_0_ref of norm and mul in float32"): {
        **_INT8, "block": 32, "round_norm": True, "scale_format": "float16", "quantise_with": "unrounded",
        "apply": "y * (1 / s)", "zero_scale": "zero", "rounding": "half_away", "overflow": "wrap"},
    ("onnx.qdq", "ONNX, RMSNormalization-23 and QuantizeLinear-25 without a zero point, to int8"): {
        **_INT8, "block": "static", "round_norm": True},
}  # fmt: skip
QUANTISATIONS: Final = MappingProxyType(
    {name: Quantisation(name=name, source=source, **fields) for (name, source), fields in _PRESETS.items()}
)
