"""The four floating-point formats, by name, and how they combine. No array library."""

from __future__ import annotations

from typing import Any, Final

# name: (short name, bits of the significand including the hidden one, smallest normal exponent, largest exponent)
_FORMATS: Final = {
    "float16": ("f16", 11, -14, 15),
    "bfloat16": ("bf16", 8, -126, 127),
    "float32": ("f32", 24, -126, 127),
    "float64": ("f64", 53, -1022, 1023),
}
FLOATS: Final = tuple(_FORMATS)
HALF: Final = ("float16", "bfloat16")
_SHORT: Final = {short: name for name, (short, *_) in _FORMATS.items()}
_MODULES: Final = ("", "torch", "jnp", "jax.numpy", "tf", "tensorflow", "np", "numpy", "ml_dtypes")
_MEANT: Final = {  # "float" and "f8" are not here: they are two formats each, as who reads them learned them
    "half": "float16", "fp16": "float16", "f2": "float16", "bfloat": "bfloat16",
    "single": "float32", "fp32": "float32", "f4": "float32", "double": "float64", "fp64": "float64",
}  # fmt: skip


def spelled(dtype: Any) -> str:
    """The name of a dtype of any framework, of such a name or its short form; anything else as a text.

    A dtype whose bytes are swapped is none of the four formats.

    >>> import numpy as np
    >>> spelled("bf16"), spelled("torch.bfloat16"), spelled(np.dtype("float32")), spelled(np.float64), spelled("int8")
    ('bfloat16', 'bfloat16', 'float32', 'float64', 'int8')
    """
    if isinstance(dtype, str):
        module, _, name = dtype.rpartition(".")
        return _SHORT.get(name, name) if module in _MODULES else dtype
    if not getattr(dtype, "isnative", True):
        return str(dtype)
    return str(getattr(dtype, "__name__", None) or getattr(dtype, "name", dtype)).rpartition(".")[2]


def meant(text: str) -> str | None:
    """The format that somebody means who spells it in another way; None if that is not clear.

    >>> meant("Float_32"), meant("half"), meant(">f4"), meant("float")
    ('float32', 'float16', 'float32', None)
    """
    plain = "".join(filter(str.isalnum, text.rpartition(".")[2])).lower()
    name = _SHORT.get(plain) or _MEANT.get(plain, plain)
    return name if name in _FORMATS else None


def native(array: Any) -> Any:
    """The array with the bytes of its numbers in the order of this machine: JAX and PyTorch take no other.

    >>> import numpy as np
    >>> native(np.ones(2, ">f4")).dtype == np.float32
    True
    """
    dtype = array.dtype
    return array if getattr(dtype, "isnative", True) else array.astype(dtype.newbyteorder("="))


def short(name: str) -> str:
    """Abbreviates a dtype name: ``float32`` becomes ``f32``; other names do not change.

    >>> short("bfloat16"), short("int32")
    ('bf16', 'int32')
    """
    return _FORMATS[name][0] if name in _FORMATS else name


def epsilon(name: str) -> float:
    """Distance from 1 to the next larger number, 2^(1-p).

    >>> epsilon("bfloat16")
    0.0078125
    """
    return 2.0 ** (1 - _FORMATS[name][1])


def unit_roundoff(name: str) -> float:
    """Largest relative error of one rounding to nearest, 2^-p.

    >>> unit_roundoff("float32") == 2.0**-24
    True
    """
    return 2.0 ** -_FORMATS[name][1]


def smallest_subnormal(name: str) -> float:
    """Spacing of the subnormal numbers, the absolute precision near zero.

    >>> smallest_subnormal("float16") == 2.0**-24
    True
    """
    _, precision, minimum, _ = _FORMATS[name]
    return 2.0 ** (minimum - precision + 1)


def smallest_normal(name: str) -> float:
    """The least number with all digits: rounding a smaller one errs by as much.

    >>> smallest_normal("float16") == 2.0**-14
    True
    """
    return smallest_subnormal(name) / epsilon(name)


def arithmetic(name: str) -> str:
    """The narrowest format that is allowed for statistics of ``name``: at least float32."""
    return "float64" if name == "float64" else "float32"


def promote(*names: str | None) -> str:
    """The narrowest format that contains all of ``names``; ``None`` entries are ignored.

    >>> promote("bfloat16", "float16"), promote("bfloat16", None)
    ('float32', 'bfloat16')
    """
    formats = {name for name in names if name is not None}
    if len(formats) == 1:
        return formats.pop()
    return "float64" if "float64" in formats else "float32"
