"""Executes short inline assembly of the Triton kernels (PTX), which Triton's interpreter cannot, in exact arithmetic.

Registers are bit patterns. A floating-point instruction decodes them to exact numbers, computes, and rounds once.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
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
MODES = ("rn", "rz", "rm", "rp")


def rounded(value: Fraction, target: Format, mode: str, sign_of_zero: int = 0) -> int:
    """The bits of a number rounded to a format; an exact 0 gets the sign bit `sign_of_zero`."""
    sign = int(value < 0) if value else sign_of_zero
    size = abs(value)
    exponent = target.least_exponent
    if size:
        above = size.numerator.bit_length() - size.denominator.bit_length()  # the exponent, or one more
        exponent = max(exponent, above - (size < Fraction(2) ** above))
    whole, rest = divmod(size / Fraction(2) ** (exponent - target.precision + 1), 1)
    grows = {"rn": (2 * rest, whole % 2) > (1, 0), "rz": False, "rm": bool(sign), "rp": not sign}[mode]
    bits = (exponent - target.least_exponent << target.precision - 1) + whole + (grows and rest > 0)
    if bits >= target.infinity:
        bits = target.infinity - (mode != "rn" and not grows)
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


def encoded(number: Number, target: Format, mode: str = "rn", flush: str = "") -> int:
    """The bit pattern of a number, rounded; `flush`, if it is not "", makes 0 of a subnormal one."""
    if isinstance(number, Fraction):
        bits = rounded(number, target, mode)
        is_subnormal = bits % (1 << target.bits - 1) < 1 << target.precision - 1
        return bits >> target.bits - 1 << target.bits - 1 if flush and is_subnormal else bits
    if math.isnan(number):
        return target.nan
    sign = int(math.copysign(1, number) < 0)
    return sign << target.bits - 1 | target.infinity if math.isinf(number) else rounded(Fraction(0), target, mode, sign)


def small(number: Number) -> float:
    """A float with the sign of a number, and 0, infinite or NaN where it is."""
    return number if isinstance(number, float) else 1.0 if number > 0 else -1.0


def multiplied(a: Number, b: Number) -> Number:
    return a * b if isinstance(a, Fraction) and isinstance(b, Fraction) else small(a) * small(b)


def added(a: Number, b: Number, mode: str) -> Number:
    """The exact sum; one that is 0 has the sign of both addends, or else that of the rounding mode."""
    if not (math.isfinite(small(a)) and math.isfinite(small(b))):
        return small(a) + small(b)
    sign = math.copysign(1, small(a))
    cancelled = sign if sign == math.copysign(1, small(b)) else -1.0 if mode == "rm" else 1.0
    return Fraction(a) + Fraction(b) or math.copysign(0.0, cancelled)


ARITHMETIC: dict[str, tuple[int, Callable[..., Number]]] = {  # how many operands, and the exact result of them
    "add": (2, added),
    "sub": (2, lambda a, b, mode: added(a, -b, mode)),
    "mul": (2, lambda a, b, mode: multiplied(a, b)),
    "fma": (3, lambda a, b, c, mode: added(multiplied(a, b), c, mode)),
}


def chosen(a: Number, b: Number, largest: bool, keeps_nan: bool) -> Number:
    """The larger or smaller number, where -0 is below 0; of a number and NaN the number, unless NaN is kept."""
    if a != a or b != b:
        return math.nan if keeps_nan else b if a != a else a
    return (max if largest else min)(a, b, key=lambda number: (number, math.copysign(1, small(number))))


def rsqrt(bits: int, kind: str, flush: str, error: int) -> int:
    """The nearest to 1 / sqrt; of a float64, and of its result, only the upper word counts."""
    unused, target = (32, UPPER_F64) if kind == "f64" else (0, FORMATS[kind])
    number = decoded(bits >> unused << unused, FORMATS[kind], flush)
    if isinstance(number, float) or number < 0:
        special = 0.0 if number == math.inf else math.copysign(math.inf, number) if number == 0 else math.nan
        return encoded(special, target) << unused
    square = Fraction(4) ** 640 / number
    whole = math.isqrt(math.floor(square))  # more than 100 bits: nothing halfway is between it and the next integer
    root = Fraction(whole) if whole * whole == square else whole + Fraction(1, 2)
    return encoded(root / Fraction(2) ** 640, target) + error << unused


def signed(bits: int, width: int) -> int:
    return bits - (bits >> width - 1 << width)


def shifted(name: str, kind: str, a: int, amount: int) -> int:
    amount = min(amount, width_of(kind))
    return a << amount if name == "shl" else (signed(a, width_of(kind)) if kind[0] == "s" else a) >> amount


def funnel(low: int, high: int, amount: int, right: bool, clamp: bool) -> int:
    amount = min(amount, 32) if clamp else amount % 32
    return (high << 32 | low) >> (amount if right else 32 - amount)


def looked_up(a: int, b: int, c: int, table: int) -> int:
    return sum((table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32))


def permuted(a: int, b: int, selector: int) -> int:
    """Each digit of the selector chooses a byte of a and b, or repeats the byte's sign bit if it is 8 or more."""
    result = 0
    for i in range(4):
        digit = selector >> 4 * i & 15
        byte = (b << 32 | a) >> 8 * (digit % 8) & 255
        result |= (byte if digit < 8 else (byte >> 7) * 255) << 8 * i
    return result


def width_of(kind: str) -> int:
    return 1 if kind == "pred" else int(kind.lstrip("bfsux"))


def reader(kind: str, flush: str = "") -> Callable[[int], Number]:
    """The function from bits of a type to their number."""
    if kind in FORMATS:
        return partial(decoded, source=FORMATS[kind], flush=flush)
    return lambda bits: Fraction(signed(bits, width_of(kind)) if kind[0] == "s" else bits)


def floating(compute: Callable[..., Number], source: str, target: str, mode: str, flush: str) -> Operation:
    """An operation on numbers as one on bits; only float32 and float16 are flushed."""
    read = reader(source, "" if source == "f64" else flush)
    result_flush = "" if target == "f64" else flush
    return lambda *operands: encoded(compute(*map(read, operands)), FORMATS[target], mode, result_flush)


def compared(order: Callable[[Number, Number], bool], kind: str, flush: str, with_nan: bool, *operands: int) -> int:
    a, b = map(reader(kind, flush), operands)
    return int(with_nan if a != a or b != b else order(a, b))


def in_lanes(compute: Operation) -> Operation:
    """The same in the lower and in the upper half of 32 bits."""
    return lambda *operands: compute(*(a & 0xFFFF for a in operands)) | compute(*(a >> 16 for a in operands)) << 16


# The name of an instruction; the types of its result and its operands; what it computes. Beside PTX's types there are
# x16 and x32: registers, never an immediate number.
Entries = Iterator[tuple[str, list[str], Operation]]
INTEGERS = ("s32", "u32", "s64", "u64")


def bits_and_integers() -> Entries:
    for kind in ("pred", "b32", "b64"):
        for name, compute in {"and": operator.and_, "or": operator.or_, "xor": operator.xor}.items():
            yield f"{name}.{kind}", [kind] * 3, compute
        yield f"not.{kind}", [kind] * 2, operator.invert
    yield "mov.pred", ["pred"] * 2, int
    for kind in (*INTEGERS, "b32", "b64", "f32", "f64"):
        yield f"mov.{kind}", [kind] * 2, int
        yield f"selp.{kind}", [kind, kind, kind, "pred"], lambda a, b, condition: a if condition else b
    for name, kind in (("shl", "b32"), ("shl", "b64"), *(("shr", kind) for kind in ("b32", "b64", *INTEGERS))):
        yield f"{name}.{kind}", [kind, kind, "u32"], partial(shifted, name, kind)
    for side, end in product("lr", ("wrap", "clamp")):
        compute = partial(funnel, right=side == "r", clamp=end == "clamp")
        yield f"shf.{side}.{end}.b32", ["b32", "b32", "b32", "u32"], compute
    yield "lop3.b32", ["b32"] * 5, looked_up
    yield "prmt.b32", ["b32"] * 4, permuted
    for kind in INTEGERS:
        value = reader(kind)
        arithmetic = {"add": operator.add, "sub": operator.sub, "mul.lo": operator.mul}
        arithmetic |= {"min": partial(min, key=value), "max": partial(max, key=value)}
        for name, compute in arithmetic.items():
            yield f"{name}.{kind}", [kind] * 3, compute
        yield f"mad.lo.{kind}", [kind] * 4, lambda a, b, c: a * b + c
        if kind[0] == "s":
            yield f"neg.{kind}", [kind] * 2, operator.neg
            yield f"abs.{kind}", [kind] * 2, lambda a, value=value: int(abs(value(a)))


def comparisons() -> Entries:
    orders = {name: (getattr(operator, name), False) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
    tests = {f"{name}u": (order, True) for name, (order, _) in orders.items()}
    tests |= {**orders, "num": (lambda a, b: True, False), "nan": (lambda a, b: False, True)}
    kinds = [("", kind, orders) for kind in INTEGERS]
    kinds += [("", kind, {name: orders[name] for name in ("eq", "ne")}) for kind in ("b32", "b64")]
    kinds += [("", "f32", tests), (".ftz", "f32", tests), ("", "f64", tests)]
    for flush, kind, names in kinds:
        for name, (order, with_nan) in names.items():
            yield f"setp.{name}{flush}.{kind}", ["pred", kind, kind], partial(compared, order, kind, flush, with_nan)


def float_arithmetic() -> Entries:
    for kind, flush in (*product(FORMATS, ("",)), ("f32", ".ftz"), ("f16", ".ftz")):
        register = kind if kind in ("f32", "f64") else "x16"
        make = partial(floating, source=kind, target=kind, flush=flush)
        made: dict[str, tuple[int, Operation]] = {}  # beginning of the name: operands, what it computes
        for mode in MODES if kind in ("f32", "f64") else ("rn",):
            for name, (count, exact) in ARITHMETIC.items():
                made[f"{name}.{mode}{flush}"] = count, make(partial(exact, mode=mode), mode=mode)
        for name in ("add", "sub", "mul"):  # rn is meant where no mode is written
            made[f"{name}{flush}"] = made[f"{name}.rn{flush}"]
        for name, nan in product(("min", "max"), ("",) if kind == "f64" else ("", ".NaN")):
            choice = partial(chosen, largest=name == "max", keeps_nan=bool(nan))
            made[f"{name}{flush}{nan}"] = 2, make(choice, mode="rn")
        made |= {f"neg{flush}": (1, make(operator.neg, mode="rn")), f"abs{flush}": (1, make(abs, mode="rn"))}
        for beginning, (count, compute) in made.items():
            yield f"{beginning}.{kind}", [register] * (count + 1), compute
            if register == "x16":
                yield f"{beginning}.{kind}x2", ["x32"] * (count + 1), in_lanes(compute)


def conversions() -> Entries:
    same = partial(floating, lambda number: number)
    for mode, flush in product(MODES, ("", ".ftz")):
        yield f"cvt.{mode}{flush}.f32.f64", ["f32", "f64"], same("f64", "f32", mode, flush)
    for mode, source, target in product(MODES, INTEGERS, ("f32", "f64")):
        yield f"cvt.{mode}.{target}.{source}", [target, source], same(source, target, mode, "")
    for mode, target in product(("rn", "rz"), ("f16", "bf16")):
        compute = same("f32", target, mode, "")
        yield f"cvt.{mode}.{target}.f32", ["x16", "f32"], compute
        yield f"cvt.{mode}.{target}x2.f32", ["x32", "f32", "f32"], lambda a, b, half=compute: half(a) << 16 | half(b)
    yield "cvt.f32.f16", ["f32", "x16"], same("f16", "f32", "rn", "")
    yield "cvt.f32.bf16", ["f32", "x16"], lambda a: a << 16  # cards shift, also NaN
    for flush in ("", ".ftz"):
        yield f"cvt{flush}.f64.f32", ["f64", "f32"], same("f32", "f64", "rn", flush)
        for kind in ("f32", "f64"):
            yield f"rsqrt.approx{flush}.{kind}", [kind] * 2, partial(rsqrt, kind=kind, flush=flush)


TABLES = (bits_and_integers, comparisons, float_arithmetic, conversions)
INSTRUCTIONS = {name: (kinds, compute) for table in TABLES for name, kinds, compute in table()}
CONSTRAINTS = {"r": "b32", "f": "f32", "l": "b64", "d": "f64", "h": "b16"}
IMMEDIATE = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}")


def immediate(text: str, kind: str) -> int:
    letter, width = text[1:2].lower(), width_of(kind)
    if kind[0] in "bf" and (letter, width) in (("f", 32), ("d", 64)):
        return int(text[2:], 16)
    if kind[0] in "bsu" and letter not in ("f", "d"):
        value = int(text.rstrip("U"), 0)
        if -(1 << width - 1) <= value < 1 << width:
            return value % (1 << width)
    raise ValueError(f"{text} is no immediate number of type {kind}")


class Registers:
    def __init__(self, kinds: list[str]) -> None:
        self.kinds = {f"%{i}": kind for i, kind in enumerate(kinds)}
        self.values: dict[str, int] = {}

    def parts(self, operand: str, kind: str) -> list[tuple[str, int]]:
        """The registers of an operand, the lowest bits first, each with the bit where it begins."""
        names = re.findall(r"[^{},\s]+", operand)
        width = width_of(kind) // len(names)
        for name in names:
            if name not in self.kinds or width_of(self.kinds[name]) != width:
                raise ValueError(f"{name} is {self.kinds.get(name, 'not declared')}, but must have {width} bits")
        return [(name, i * width) for i, name in enumerate(names)]

    def read(self, operand: str, kind: str) -> int:
        if IMMEDIATE.fullmatch(operand) and kind[0] != "x":
            return immediate(operand, kind)
        parts = self.parts(operand, kind)
        if unwritten := [name for name, _ in parts if name not in self.values]:
            raise ValueError(f"{', '.join(unwritten)} is read before it is written")
        return sum(self.values[name] << begin for name, begin in parts)

    def write(self, operand: str, kind: str, value: int) -> None:
        for name, begin in self.parts(operand, kind):
            self.values[name] = value >> begin & (1 << width_of(self.kinds[name])) - 1


def step(statement: str, registers: Registers, error: int) -> None:
    """Executes one statement."""
    if declaration := re.fullmatch(r"\.reg\s+\.([bsuf]\d+|pred)\s+([\w$%,\s]+)", statement):
        registers.kinds |= dict.fromkeys(re.findall(r"[^,\s]+", declaration[2]), declaration[1])
        return
    match = re.fullmatch(r"(?:@(!?)([\w$%]+)\s+)?([\w.]+)\s*(.*)", statement, re.DOTALL)
    if not match or match[3] not in INSTRUCTIONS:
        raise NotImplementedError(f"there is no instruction {match[3] if match else statement}, so add it to ptx.py")
    kinds, compute = INSTRUCTIONS[match[3]]
    operands = re.findall(r"\{[^}]*\}|[^,\s]+", match[4])
    if len(operands) != len(kinds):
        raise ValueError(f"{statement!r} has {len(operands)} operands, but must have {len(kinds)}")
    if match[2] and registers.read(match[2], "pred") == bool(match[1]):
        return
    options = {"error": error} if ".approx" in match[3] else {}
    result = compute(*map(registers.read, operands[1:], kinds[1:]), **options)
    registers.write(operands[0], kinds[0], result)


def execute(asm: str, constraints: str, *inputs: int, error: int = 0) -> int | tuple[int, ...]:
    """The output registers of inline assembly; approximate results are `error` units of their last place away."""
    kinds = [CONSTRAINTS[constraint.strip("=& ")] for constraint in constraints.split(",")]
    outputs = constraints.count("=")
    if len(inputs) != len(kinds) - outputs:
        raise ValueError(f"{constraints!r} has {len(kinds) - outputs} inputs, but {len(inputs)} came")
    registers = Registers(kinds)
    for i, value in enumerate(inputs, outputs):
        if not 0 <= value < 1 << width_of(kinds[i]):
            raise ValueError(f"input {value} is no bit pattern of {width_of(kinds[i])} bits")
        registers.write(f"%{i}", kinds[i], int(value))
    text = re.sub(r"\$(\$|\d+)", lambda match: "$" if match[1] == "$" else f"%{match[1]}", asm)
    *statements, rest = (statement.lstrip("{} \t\r\n").rstrip() for statement in text.split(";"))
    for statement in statements:
        step(statement, registers, error)
    if rest:
        raise ValueError(f"{rest!r} does not end with a semicolon")
    results = tuple(registers.read(f"%{i}", kinds[i]) for i in range(outputs))
    return results[0] if outputs == 1 else results
