"""Executes short inline assembly of the Triton kernels (PTX), which Triton's interpreter cannot, in exact arithmetic.

Registers are bit patterns. A floating-point instruction decodes them to exact numbers, computes, and rounds once.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import NamedTuple

Number = Fraction | float  # a Fraction other than 0, or one of the floats ±0, ±infinity and NaN
Operation = Callable[..., int]


class Format(NamedTuple):
    bits: int
    precision: int  # of the significand, with its first bit, which is not stored
    nan: int  # what arithmetic gives as NaN

    @property
    def infinity(self) -> int:
        return (1 << self.bits - 1) - (1 << self.precision - 1)

    @property
    def least_exponent(self) -> int:  # of a normal number
        return 2 - (1 << self.bits - self.precision - 1)


FORMATS = {"f16": Format(16, 11, 0x7FFF), "bf16": Format(16, 8, 0x7FFF)}
FORMATS |= {"f32": Format(32, 24, 0x7FFFFFFF), "f64": Format(64, 53, 0x7FFFFFFFFFFFFFFF)}
UPPER_F64 = Format(32, 21, 0x7FFFFFFF)  # the upper word of a float64, alone


def rounded(value: Fraction, target: Format, mode: str, sign_of_zero: int = 0) -> int:
    """The bits of a number rounded to a format; an exact 0 gets the sign bit `sign_of_zero`."""
    sign = int(value < 0) if value else sign_of_zero
    size = abs(value)
    exponent = target.least_exponent
    if size:
        above = size.numerator.bit_length() - size.denominator.bit_length()  # the exponent, or one more
        exponent = max(exponent, above - (size < Fraction(2) ** above))
    whole, rest = divmod(size / Fraction(2) ** (exponent - target.precision + 1), 1)
    grows = mode == "rn" and (2 * rest, whole % 2) > (1, 0)
    bits = (exponent - target.least_exponent << target.precision - 1) + whole + grows
    if bits >= target.infinity:
        bits = target.infinity - (mode == "rz")
    return sign << target.bits - 1 | bits


def decoded(bits: int, source: Format, flush: str = "") -> Number:
    """The number of a bit pattern; `flush`, if it is not "", makes 0 of subnormal ones."""
    sign, size = divmod(bits, 1 << source.bits - 1)
    field, fraction = divmod(size, 1 << source.precision - 1)
    number: Number = math.inf if size == source.infinity else 0.0
    if size > source.infinity:
        return math.nan
    if size < source.infinity and size and (field or not flush):
        significand = fraction + (bool(field) << source.precision - 1)
        number = significand * Fraction(2) ** (max(field, 1) - 1 + source.least_exponent - source.precision + 1)
    return -number if sign else number


def encoded(number: Number, target: Format, mode: str = "rn") -> int:
    """The bit pattern of a number, rounded to the nearest ("rn") or towards 0 ("rz")."""
    if isinstance(number, Fraction):
        return rounded(number, target, mode)
    if math.isnan(number):
        return target.nan
    sign = int(math.copysign(1, number) < 0)
    return sign << target.bits - 1 | target.infinity if math.isinf(number) else rounded(Fraction(0), target, mode, sign)


def small(number: Number) -> float:
    """A float with the sign of a number, and 0, infinite or NaN where it is."""
    return number if isinstance(number, float) else 1.0 if number > 0 else -1.0


def multiplied(a: Number, b: Number) -> Number:
    return a * b if isinstance(a, Fraction) and isinstance(b, Fraction) else small(a) * small(b)


def added(a: Number, b: Number) -> Number:
    """The exact sum; one that is 0 has the sign of both addends, or else none."""
    if not (math.isfinite(small(a)) and math.isfinite(small(b))):
        return small(a) + small(b)
    sign = math.copysign(1, small(a))
    return Fraction(a) + Fraction(b) or math.copysign(0.0, sign if sign == math.copysign(1, small(b)) else 1.0)


EXACT: dict[str, Callable[..., Number]] = {  # the exact result of numbers
    "add": lambda a, b: added(a, b),
    "sub": lambda a, b: added(a, -b),
    "mul": lambda a, b: multiplied(a, b),
    "fma": lambda a, b, c: added(multiplied(a, b), c),
    "cvt": lambda number: number,
    "abs": abs,
    "neg": operator.neg,
}


def rsqrt(bits: int, error: int) -> int:
    """The nearest to 1 / sqrt of a float64, of which, and of its result, only the upper word counts."""
    number = decoded(bits >> 32 << 32, FORMATS["f64"], "flushed")
    if isinstance(number, float) or number < 0:
        special = 0.0 if number == math.inf else math.copysign(math.inf, number) if number == 0 else math.nan
        return encoded(special, UPPER_F64) << 32
    square = Fraction(4) ** 640 / number
    whole = math.isqrt(math.floor(square))  # more than 100 bits: nothing halfway is between it and the next integer
    root = Fraction(whole) if whole * whole == square else whole + Fraction(1, 2)
    return encoded(root / Fraction(2) ** 640, UPPER_F64) + error << 32


def floating(name: str, source: str, target: str, mode: str = "rn") -> Operation:
    """An operation on numbers as one on bits."""
    return lambda *bits: encoded(EXACT[name](*(decoded(a, FORMATS[source]) for a in bits)), FORMATS[target], mode)


def in_lanes(compute: Operation) -> Operation:
    """The same in the lower and in the upper half of 32 bits."""
    return lambda *operands: compute(*(a & 0xFFFF for a in operands)) | compute(*(a >> 16 for a in operands)) << 16


def narrowed(kind: str) -> Operation:
    """Two numbers in one register, the first in its upper half."""
    half = floating("cvt", "f32", kind)
    return lambda a, b: half(a) << 16 | half(b)


def width_of(kind: str) -> int:
    return 1 if kind == "pred" else int(kind.lstrip("bfsux"))


def shifted(a: int, amount: int) -> int:
    """To the right, with copies of the sign."""
    return a - (a >> 31 << 32) >> min(amount, 32)


# The name of an instruction; the types of its result and its operands; what it computes. Beside PTX's types there are
# x16 and x32: registers, never an immediate number. These are the instructions that the kernels have.
INSTRUCTIONS: dict[str, tuple[list[str], Operation]] = {
    "and.b32": (["b32"] * 3, operator.and_),
    "or.b32": (["b32"] * 3, operator.or_),
    "mov.b32": (["b32"] * 2, int),
    "mov.b64": (["b64"] * 2, int),
    "shl.b32": (["b32", "b32", "u32"], lambda a, amount: a << min(amount, 32)),
    "shr.s32": (["s32", "s32", "u32"], shifted),
    "setp.ne.u32": (["pred", "u32", "u32"], lambda a, b: int(a != b)),
    "rsqrt.approx.ftz.f64": (["f64"] * 2, rsqrt),
    "cvt.f32.f16": (["f32", "x16"], floating("cvt", "f16", "f32")),
    "cvt.f64.f32": (["f64", "f32"], floating("cvt", "f32", "f64")),
}
for _mode in ("rn", "rz"):
    INSTRUCTIONS[f"cvt.{_mode}.f32.f64"] = ["f32", "f64"], floating("cvt", "f64", "f32", _mode)
    for _name, _kind in product(("add", "sub", "mul", "fma"), ("f32", "f64")):
        _types = [_kind] * (4 if _name == "fma" else 3)
        INSTRUCTIONS[f"{_name}.{_mode}.{_kind}"] = _types, floating(_name, _kind, _kind, _mode)
for _kind in ("f16", "bf16"):
    INSTRUCTIONS[f"cvt.rn.{_kind}x2.f32"] = ["x32", "f32", "f32"], narrowed(_kind)
    INSTRUCTIONS[f"fma.rn.{_kind}x2"] = ["x32"] * 4, in_lanes(floating("fma", _kind, _kind))
for _name in ("abs", "neg"):
    INSTRUCTIONS[f"{_name}.f32"] = ["f32"] * 2, floating(_name, "f32", "f32")
CONSTRAINTS = {"r": "b32", "f": "f32", "l": "b64", "d": "f64", "h": "b16"}
IMMEDIATE = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}")


def immediate(text: str, kind: str) -> int:
    if (letter := text[1:2].lower()) in ("f", "d"):
        assert (kind[0] in "bf", width_of(kind)) == (True, 64 if letter == "d" else 32), f"{text} has not type {kind}"
        return int(text[2:], 16)
    assert kind[0] in "bsu", f"{text} has not type {kind}"
    return int(text.rstrip("U"), 0) % (1 << width_of(kind))


class Registers:
    """Their types, and the bits of those that are written. Reading others, or a wrong width, is an error."""

    def __init__(self, kinds: list[str]) -> None:
        self.kinds = {f"%{i}": kind for i, kind in enumerate(kinds)}
        self.values: dict[str, int] = {}

    def parts(self, operand: str, kind: str) -> list[tuple[str, int]]:
        """The registers of an operand, the lowest bits first, each with the bit where it begins."""
        names = re.findall(r"[^{},\s]+", operand)
        width = width_of(kind) // len(names)
        assert all(width_of(self.kinds[name]) == width for name in names), f"{operand} must have {width} bits each"
        return [(name, i * width) for i, name in enumerate(names)]

    def read(self, operand: str, kind: str) -> int:
        if IMMEDIATE.fullmatch(operand) and kind[0] != "x":
            return immediate(operand, kind)
        return sum(self.values[name] << begin for name, begin in self.parts(operand, kind))

    def write(self, operand: str, kind: str, value: int) -> None:
        for name, begin in self.parts(operand, kind):
            self.values[name] = value >> begin & (1 << width_of(self.kinds[name])) - 1


def step(statement: str, registers: Registers, error: int) -> None:
    """Executes one statement."""
    if declaration := re.fullmatch(r"\.reg\s+\.([bsuf]\d+|pred)\s+([\w$%,\s]+)", statement):
        registers.kinds |= dict.fromkeys(re.findall(r"[^,\s]+", declaration[2]), declaration[1])
        return
    match = re.fullmatch(r"(?:@(!?)([\w$%]+)\s+)?([\w.]+)\s*(.*)", statement, re.DOTALL)
    assert match, statement
    kinds, compute = INSTRUCTIONS[match[3]]  # add to the table what is not there
    operands = re.findall(r"\{[^}]*\}|[^,\s]+", match[4])
    assert len(operands) == len(kinds), statement
    if match[2] and registers.read(match[2], "pred") == bool(match[1]):
        return
    options = {"error": error} if ".approx" in match[3] else {}
    registers.write(operands[0], kinds[0], compute(*map(registers.read, operands[1:], kinds[1:]), **options))


def execute(asm: str, constraints: str, *inputs: int, error: int = 0) -> tuple[int, ...]:
    """The output registers of inline assembly; approximate results are `error` units of their last place away."""
    kinds = [CONSTRAINTS[constraint.strip("=& ")] for constraint in constraints.split(",")]
    outputs = constraints.count("=")
    registers = Registers(kinds)
    for i, (kind, value) in enumerate(zip(kinds[outputs:], inputs, strict=True), outputs):
        registers.write(f"%{i}", kind, int(value))
    text = re.sub(r"\$(\$|\d+)", lambda match: "$" if match[1] == "$" else f"%{match[1]}", asm)
    *statements, rest = (statement.lstrip("{} \t\r\n").rstrip() for statement in text.split(";"))
    assert not rest, f"{rest!r} does not end with a semicolon"
    for statement in statements:
        step(statement, registers, error)
    return tuple(registers.read(f"%{i}", kinds[i]) for i in range(outputs))
