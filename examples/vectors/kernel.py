"""Two kernels, one of which is wrong, judged by files of vectors/.

python examples/vectors/kernel.py right vectors/llama.*.json    prints the count alone
python examples/vectors/kernel.py wrong vectors/llama.*.json    prints a line for each output that is wrong
"""

import math
import sys

from reader import BITS, tests


def rounded(v, dtype):
    """To nearest, ties to even, in a format of 16 or 32 bits."""
    if v == 0 or not math.isfinite(v):
        return v
    bits, half = BITS[dtype], dtype == "float16"
    step = math.ldexp(1, max(math.frexp(v)[1], -13 if half else -125) - bits)
    result = round(v / step) * step
    return math.copysign(math.inf, v) if abs(result) >= 2.0 ** (16 if half else 128) else result


def rms_norm(test, eps_outside):
    """y and 1 / rho; an output that is not returned is not judged."""
    x, scale, residual, n = (*(test["inputs"].get(name) for name in ("x", "scale", "residual")), test["n"])
    y, inverses, norm, dtype = [], [], test["norm"], test["outputs"]["y"]["dtype"]
    for start in range(0, len(x), n):
        row = x[start : start + n]
        if residual is not None:
            kept = test["outputs"]["h"]["dtype"]
            row = [rounded(a + b, kept) for a, b in zip(row, residual[start : start + n], strict=True)]
        mean = sum(h * h for h in row) / n
        rho = math.sqrt(mean) + test["eps"] if eps_outside else math.sqrt(mean + test["eps"])
        inverses.append(1 / rho)
        for h, gain in zip(row, scale, strict=True):
            normed = h * (1 / rho) if norm == "none" else rounded(h * (1 / rho), norm)
            y.append(rounded(rounded(normed * (test["offset"] + gain), "float32"), dtype))
    return {"y": y, "inverse_rms": [rounded(value, "float32") for value in inverses]}


def is_wrong(entry, got):
    block, ends = entry["block"], zip(entry["lo"], entry["hi"], strict=True)
    for j, (low, high) in enumerate(ends):
        value = sum((i + 1) * a for i, a in enumerate(got[j * block : (j + 1) * block]))  # if block is 1, an element
        if not (math.isnan(value) if math.isnan(low) else low <= value <= high):
            return True
    return False


def main(kernel="", *paths):
    if kernel not in ("right", "wrong") or not paths:
        raise ValueError("usage: kernel.py right|wrong vectors/VARIANT.DTYPE.json ...")
    count = judged = wrong = 0
    for path in paths:
        for test in tests(path):
            count += 1
            for name, got in rms_norm(test, kernel == "wrong").items():
                if name not in test["outputs"]:
                    raise ValueError(f"test {test['id']} has no {name}")
                judged += 1
                if is_wrong(test["outputs"][name], got):
                    print(test["file"], test["id"], ",".join(test["flags"]), name)
                    wrong += 1
    print(f"{count} tests, {judged} outputs judged, {wrong} wrong", file=sys.stderr)
    return int(wrong > 0) if judged else 2


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except (OSError, ValueError) as error:  # of a file, too
        print(error, file=sys.stderr)
        sys.exit(2)
