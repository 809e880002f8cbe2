"""Reads the files VARIANT.DTYPE.json of vectors/, with Python alone. docs/checking.md describes them."""

import json
import math
import struct

BITS = {"bfloat16": 8, "float16": 11, "float32": 24}  # of the significand


def numbers(dtype, text):
    kind, zeros = {"bfloat16": (">f", "0000"), "float16": (">e", ""), "float32": (">f", "")}.get(dtype, (">d", ""))
    return [struct.unpack(kind, bytes.fromhex(word + zeros))[0] for word in text.split()]


def hashed(seed, size, bits, exponent):
    for i in range(size):
        z = seed + i * 0x9E3779B9 & 0xFFFFFFFF
        z = (z ^ z >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        z = (z ^ z >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        yield math.ldexp((z ^ z >> 16) >> 32 - bits, exponent - bits + 1) - math.ldexp(1, exponent)


def tests(path):
    """Each test, its inputs as lists of numbers, and of its outputs the least and the greatest that are right."""
    with open(path, encoding="utf-8") as file:
        document = json.load(file)
    if document.get("format") != 1:
        raise ValueError(f"{path}: no vectors in format 1")
    for test in document["tests"]:
        for name, entry in test["inputs"].items():
            size, dtype = math.prod(entry["shape"]), entry["dtype"]
            test["inputs"][name] = numbers(dtype, entry["bits"]) if "bits" in entry else list(
                hashed(entry["seed"], size, BITS[dtype], entry["exponent"]))  # fmt: skip
        for entry in test["outputs"].values():
            dtype = entry["dtype"] if entry["block"] == 1 else "float32"
            entry |= {end: numbers(dtype, entry[end]) for end in ("lo", "hi")}
        name, (eps,) = f"{document['variant']}.{document['dtype']}", numbers("float64", test["eps"])
        yield test | {"eps": eps, "file": name}
