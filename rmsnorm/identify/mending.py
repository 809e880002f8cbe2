"""How to mend a norm: what each value of a field does, how to make it so, and what to do about a defect."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from rmsnorm.targets.arguments import IN_PLACE

# by field and value: what a function does that has it (empty where "field is value" says it), and how to make it so
_FIELDS: Final[Mapping[tuple[str, Any], tuple[str, str]]] = {
    ("rounding", "after_scale"): (
        "it rounds once, after the gain",
        "compute all of it in float32, the gain too, and round once: y.astype(x.dtype)"),
    ("rounding", "before_scale"): (
        "it rounds x / rho before the gain", "compute x / rho in float32, round it to the dtype of x, then multiply"),
    ("rounding", "input_dtype"): ("it rounds every operation to the dtype of x", "compute in the dtype of x"),
    ("eps_position", "inside"): ("it adds eps inside the root", "add eps inside the root: sqrt(mean(x * x) + eps)"),
    ("eps_position", "outside"): ("it adds eps outside the root", "add eps to the root: sqrt(mean(x * x)) + eps"),
    ("eps_position", "clamp"): (
        "it takes eps as the least norm", "take eps as the least norm: maximum(norm(x), eps) / sqrt(n)"),
    ("scale_offset", 0.0): ("it multiplies by the gain, not by 1 + gain", "multiply by the gain, not by 1 + gain"),
    ("scale_offset", 1.0): ("it multiplies by 1 + gain, not by the gain", "multiply by 1 + gain"),
    ("bias", True): ("", "add the bias"),
    ("bias", False): ("", "leave the bias out"),
    ("partial_rounding", "ceil"): ("", "count ceil(n p) elements"),
    ("partial_rounding", "floor"): ("", "count floor(n p) elements"),
    ("result_dtype", "x"): ("", "return y in the dtype of x"),
    ("result_dtype", "scale"): ("", "return y in the dtype of the gain"),
    ("result_dtype", "promote"): ("", "return y in the wider dtype of x and gain"),
    ("result_dtype", "promote_first"): ("", "round x / rho and y to the wider dtype of x and gain"),
    ("result_dtype", "half_scale"): ("", "return y in the dtype of a 16-bit gain, else in float32"),
    ("gate_function", "silu"): ("", "take silu of the gate"),
    ("gate_function", "sigmoid"): ("", "take sigmoid of the gate"),
    ("gate_position", "after"): ("it multiplies x / rho by f(gate)", "multiply x / rho by f(gate), not x"),
    ("gate_position", "before"): ("it multiplies x by f(gate)", "multiply x by f(gate), then normalise"),
    ("residual_rounding", "before"): ("", "round x + residual to the dtype of x, then normalise it"),
    ("residual_rounding", "after"): ("", "normalise x + residual before it is rounded"),
    ("scale_dtype", "own"): ("", "take the gain as it is"),
    ("scale_dtype", "x"): ("it casts the gain to the dtype of x first", "cast the gain to the dtype of x first"),
}  # fmt: skip
# by words of a defect, or a kind
_DEFECTS: Final = (
    (r"layernorm", "do not subtract the mean, and divide by the root of the mean of x * x"),
    (r"of its variance, not of", "take the mean of x * x, from which no mean of x was subtracted"),
    (r"l2norm", "divide by the root of the mean of x * x, not of its sum"),
    (r"not divided by|not by the (root|square root)", "divide x by sqrt(q + eps), or multiply it by rsqrt(q + eps)"),
    (r"divided by n - 1", "divide the sum of squares by n"),
    (r"divided by all \d+ elements", "divide the sum of squares by the number of summed elements"),
    (r"last \d+ elements", "take the statistic of the first elements"),
    (r"computed in floating point", "compute k in whole numbers: -(-n * a // b) for p = a / b"),
    (r"gain is rounded to the dtype of the gain", "cast the gain to float32 before the sum"),
    (r"accumulated in 16 bits", "add up the rows in float32, and round the sum once"),
    (r"\beps is rounded to|\beps is .* dtypes", "take one eps for all dtypes, and keep it in float32"),
    (r"the gain is rounded to", "keep the gain in its own dtype"),
    (r"the gain of an earlier call is kept", "take the gain anew in every call"),
    (r"writes to the gradient of y", "write the gradient for x to memory of its own"),
    (r"writes to the memory of y", "give every y memory of its own"),
    (r"lacks that of the returned sum", "add the gradient of x + residual to that for x"),
    (
        r"after the last full block|only the first \d+|whole blocks of \d+ elements",
        "sum all n elements of a row, with a mask for its end",
    ),
    (r"last one of an odd number of rows", "take the statistic of each row for itself, with a mask for the last one"),
    (r"is cut off at", "cut nothing off"),
    (r"\b(are|is) rounded to|larger error than float32", "cast x to float32 first, and round y alone"),
    (r"is float\d+ whatever x is", "return y in the dtype of x"),
    (r"the (gain|bias|gate) is not applied", r"apply the \1"),
    (r"the mask is ignored", "sum and count only the elements under a true mask"),
    (r"the residual is not added", "add the residual to x before the norm"),
    (r"before the statistic is taken", "multiply the normalised row by the gain, not x"),
    (r"its gain g starts|gain of a new layer", "begin with a gain that multiplies by 1"),
    (r"bias of a new layer", "begin with a bias of 0"),
    (r"writes to its arguments", f"write to a copy, or say what it writes, as by --call {IN_PLACE!r}"),
    (r"\b1 / rho for a constant", "differentiate 1 / rho, too"),
    (r"the gradient for x leaves (the gain|eps) out", r"take \1 into the gradient for x"),
)


def seen(field: str, value: Any) -> str:
    """What a function does in which a field has this value; empty if nothing is plainer than the field.

    >>> seen("rounding", "input_dtype"), seen("eps", 1e-6)
    ('it rounds every operation to the dtype of x', '')
    """
    return _FIELDS.get((field, value), ("", ""))[0]


def field_mended(field: str, wanted: Any) -> str:
    """How to give a function this value of a field.

    >>> field_mended("eps", 1e-5)
    'take eps 1e-05'
    """
    if field == "eps":
        return f"take eps {'the machine epsilon of float32' if wanted is None else wanted}"
    if field == "partial":
        return f"take the statistic of {'all elements' if wanted is None else f'the first {wanted} of each row'}"
    return _FIELDS.get((field, wanted), ("", ""))[1]


def defect_mended(sentence: str) -> str:
    """How to mend a defect, or another kind of norm; empty if it is not among those that are known.

    >>> defect_mended("the gain is not applied"), defect_mended("the sum of squares is divided by n - 1 = 63")
    ('apply the gain', 'divide the sum of squares by n')
    """
    for pattern, advice in _DEFECTS:
        if match := re.search(pattern, sentence):
            return match.expand(advice)
    return ""
