"""RMSNorm of engines without an implementation here: what identify, check and the golden say of each, forward only.

    python benchmarks/engines.py --install /tmp/engines openvino tinygrad    # each in an environment of its own
    python benchmarks/engines.py --engine openvino                           # in this environment

Each run writes the engine's row of docs/engines.md. An engine that cannot be installed, imported or called is listed
there with its error.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib.metadata
import importlib.util
import platform
import re
import subprocess
import time
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from engine_functions import (
    EPS,
    Norm,
    with_candle,
    with_executorch,
    with_iree,
    with_litert,
    with_mlx,
    with_ncnn,
    with_numpy,
    with_onnx_reference,
    with_onnxruntime,
    with_openvino,
    with_paddle,
    with_tinygrad,
    with_tract,
)

from rmsnorm.accuracy.ulps import ulps
from rmsnorm.identify import Identity, identify, open_target
from rmsnorm.identify.batches import dependences
from rmsnorm.identify.findings import Findings
from rmsnorm.identify.probe import open_probe
from rmsnorm.numpy_impl import rms_norm
from rmsnorm.parity import check
from rmsnorm.specification.variants import Variant

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "engines.md"
DTYPES = ("float32", "float16", "bfloat16")
SHAPE = (256, 1000)  # of the data whose bits are counted
SECONDS = 300.0  # of identify, and of the question about the number of rows


@dataclass(frozen=True)
class Engine:
    """An engine.

    Attributes:
        packages: what pip installs; the first one is the engine, whose version the page names.
        calls: what of it is called, for the page.
        variant: the one that its documentation, or the operators of the model, describe.
        make: imports the engine and returns the function.
        empty: whether it can be called with an x without elements; False where that ends the process.
    """

    packages: tuple[str, ...]
    calls: str
    variant: str
    make: Callable[[], Norm]
    empty: bool = True


OPERATORS = "the operators Mul, ReduceMean, Add, Sqrt, Div, Mul of ONNX"
ENGINES = {
    "numpy": Engine(("numpy",), "three lines in float32", "standard", with_numpy),
    "onnxruntime": Engine(
        ("onnxruntime", "onnx"), "`RMSNormalization` of opset 23", "onnx", functools.partial(with_onnxruntime, True)
    ),
    "onnxruntime-operators": Engine(
        ("onnxruntime", "onnx"), OPERATORS, "onnx", functools.partial(with_onnxruntime, False)
    ),
    "onnx-reference": Engine(("onnx",), "`RMSNormalization` of opset 23, `ReferenceEvaluator`", "onnx",
                             with_onnx_reference),
    "openvino": Engine(
        ("openvino", "onnx"), "`RMSNormalization` of opset 23", "onnx", functools.partial(with_openvino, True)
    ),
    "openvino-operators": Engine(("openvino", "onnx"), OPERATORS, "onnx", functools.partial(with_openvino, False)),
    "litert": Engine(("ai-edge-litert",), "the operators SQUARE, MEAN, ADD, RSQRT, MUL, MUL", "onnx", with_litert),
    "tinygrad": Engine(("tinygrad",), "`tinygrad.nn.RMSNorm`, compiled by clang", "llama", with_tinygrad),
    "mlx": Engine(("mlx[cpu]",), "`mx.fast.rms_norm`", "mlx", functools.partial(with_mlx, True)),
    "mlx-operators": Engine(("mlx[cpu]",), "`x * mx.rsqrt(mx.mean(mx.square(x)) + eps) * weight`", "mlx",
                            functools.partial(with_mlx, False)),
    "paddle": Engine(("paddlepaddle",), "`paddle.nn.functional.rms_norm`", "standard",
                     functools.partial(with_paddle, True)),
    "paddle-operators": Engine(("paddlepaddle",), "`x * rsqrt(mean(square(x)) + eps) * weight`", "standard",
                               functools.partial(with_paddle, False)),
    "tract": Engine(("tract", "onnx"), "`RMSNormalization` of opset 23", "onnx", functools.partial(with_tract, True)),
    "tract-operators": Engine(("tract", "onnx"), OPERATORS, "onnx", functools.partial(with_tract, False), empty=False),
    "iree": Engine(("iree-base-compiler", "iree-base-runtime", "onnx"), "`RMSNormalization` of opset 23", "onnx",
                   functools.partial(with_iree, True)),
    "iree-operators": Engine(("iree-base-compiler", "iree-base-runtime", "onnx"), OPERATORS, "onnx",
                             functools.partial(with_iree, False)),
    "candle": Engine(("candle-nn",), "`candle.models.llama.RmsNorm`", "standard", with_candle),
    "executorch": Engine(("executorch", "torch"), "`torch.nn.functional.rms_norm`, lowered with XNNPACK", "standard",
                         with_executorch, empty=False),
    "ncnn": Engine(("ncnn",), "the layer `RMSNorm`", "standard", with_ncnn, empty=False),
}  # fmt: skip
HEAD = """# RMSNorm of other engines

This page says what RMSNorm computes in other engines on a CPU, and how near it is to the golden, the reference of this
package. `python benchmarks/engines.py --install FOLDER NAME ...` writes it: it makes an environment for each engine,
calls it with NumPy arrays and eps = 1e-5, forward only, with its default settings, and asks this package what it
computes.
"""
TABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "What it computes": (
        "The columns from *identify* on are what `rmsnorm.identify` found out, whatever the documentation says.",
        ("version", "what is called", "identify", "eps", "rounding"),
    ),
    "How near it is to the golden": (
        """\
- *against* is the variant whose golden it is compared with. The variant `onnx` rounds before the gain, as ONNX defines
  it: an engine that rounds once, at the end, differs from it in a quarter of the elements.
- *float32*, *float16*, *bfloat16*: the share of elements with the golden's bits, and the largest distance in ulps, of
  256 rows of 1,000 normal numbers and a gain between 0.5 and 2. In 16 bits the gain has the dtype of x.
- *check* counts the comparisons of `rmsnorm.parity.check` with that variant that hold, in the dtypes that it takes.""",
        ("against", *DTYPES, "check"),
    ),
    "Does a row depend on how many rows there are?": (
        "*rows* says whether a row has the same bits alone and among up to 4,096 rows, at three widths.",
        ("rows", "measured"),
    ),
}
COLUMNS = ("engine", *(name for _, columns in TABLES.values() for name in columns))
MISSING = "## Not measured"


def measured(name: str) -> list[str]:
    """The cells of an engine's row after its name, from its version on."""
    engine = ENGINES[name]
    norm = engine.make() if engine.empty else never_empty(engine.make())
    norm(np.ones((2, 64), np.float32), np.ones(64, np.float32))  # an error of this call is the engine's
    distribution = re.sub(r"\[.*", "", engine.packages[0])
    text, identity = identified(norm)
    text += "" if engine.empty else "; an x without elements ends the process"
    variant = Variant.get(engine.variant).replace(eps=EPS)
    bits = {dtype: agreement(norm, variant, dtype) for dtype in DTYPES}
    taken = [dtype for dtype in DTYPES if bits[dtype]]
    report = check(norm, variant, framework="numpy", gradients=False, dtypes=taken)
    agreeing = len(report.run.records) - len(report.run.failures)
    return [
        importlib.metadata.version(distribution),
        engine.calls,
        text,
        *(str(identity[key]) if identity[key] is not None else "not observable" for key in ("eps", "rounding")),
        engine.variant,
        *(bits[dtype] or "not taken" for dtype in DTYPES),
        f"{agreeing:,} of {len(report.run.records):,}",
        rows(norm),
        f"{datetime.date.today()}, {processor()}",
    ]


def never_empty(norm: Norm) -> Norm:
    def guarded(x: Any, weight: Any) -> Any:
        if not x.size:
            raise ValueError("an x without elements would end the process")
        return norm(x, weight)

    return guarded


def identified(norm: Norm) -> tuple[str, Identity]:
    """What identify says; where float64 alone prevents a name, what it says of the other dtypes."""

    def narrow(x: Any, weight: Any) -> Any:
        if np.float64 in (x.dtype, weight.dtype):
            raise TypeError("float64 is not asked for")
        return norm(x, weight)

    whole, rest = (identify(entry, framework="numpy", gradients=False, time_limit=SECONDS) for entry in (norm, narrow))
    identity = whole if whole.recognised or not rest.recognised else rest
    text = identity.headline.removeprefix(f"{identity.target} ").removeprefix("is RMSNorm: ")
    text = "; ".join([text, *(entry for entry in identity.defects if entry not in text)])
    return (text if identity is whole else f"{text}; in float64 no model predicts its y"), identity


def agreement(norm: Norm, variant: Variant, dtype: str) -> str:
    """The share of elements with the bits of the golden, and the largest distance; empty if it takes no such arrays."""
    random = np.random.default_rng(7)
    x, weight = random.normal(size=SHAPE).astype(dtype), random.uniform(0.5, 2.0, SHAPE[-1:]).astype(dtype)
    want = rms_norm(x, weight, variant=variant)
    try:
        y = np.asarray(norm(x, weight))
    except Exception:  # an engine may raise anything for a dtype that it does not have
        return ""
    if y.dtype != want.dtype:
        return f"returns {y.dtype.name}"
    distances = ulps(y, want)
    different = float(np.mean(distances != 0))
    return f"{100 * (1 - different):.3f} %, {distances.max():.0f} ulp" if different else "100 %"


def rows(norm: Norm) -> str:
    """Whether the bits of a row depend on how many rows there are."""
    target = open_target(norm, framework="numpy")
    probe = open_probe(target, 64, time.monotonic() + SECONDS, SECONDS, Findings())
    answers, asked = dependences(probe, gradients=False)
    return "; ".join(entry.sentence for entry in answers) or f"the same bits alone and among {max(asked.counts):,} rows"


def processor() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        keys = dict(re.findall(r"^(model name|cpu family|model|flags)\s*: (.*)$", text, re.MULTILINE))
        wide = "with" if "avx512f" in keys.get("flags", "").split() else "without"
        return f"{keys['model name']} (family {keys['cpu family']}, model {keys['model']}), {wide} AVX-512"
    return platform.processor() or platform.machine()


def written(text: str, name: str, row: list[str] | None, error: str = "") -> str:
    """The page with an engine's row, or with the error of one that has none."""
    cells: dict[str, list[str]] = {}
    for key, rest in re.findall(r"^\| `([^`]+)` \| (.*) \|$", text, re.MULTILINE):
        cells.setdefault(key, []).extend(re.split(r" (?<!\\)\| ", rest))
    errors = dict(re.findall(r"^- `([^`]+)`: (.*)$", text, re.MULTILINE))
    for entries in (cells, errors):
        entries.pop(name, None)
    if row is None:
        errors[name] = error
    else:
        cells[name] = [" ".join(cell.replace("|", "\\|").split()) for cell in row]
    tables: list[str] = []
    first = 0
    for title, (about, columns) in TABLES.items():
        tables += ["", f"## {title}", "", about, ""]
        tables += [f"| engine | {' | '.join(columns)} |", "|" + " --- |" * (1 + len(columns))]
        last = first + len(columns)
        tables += [f"| `{key}` | {' | '.join(cells[key][first:last])} |" for key in sorted(cells)]
        first = last
    listed = ["", MISSING, "", *(f"- `{key}`: {errors[key]}" for key in sorted(errors))] if errors else []
    return "\n".join([HEAD.rstrip(), *tables, *listed, ""])


def write(page: Path, name: str, row: list[str] | None, error: str = "") -> None:
    page.write_text(written(page.read_text() if page.exists() else "", name, row, error))


def install(folder: Path, name: str, page: Path) -> None:
    """Make an environment for the engine's packages, or take the one that is there, and measure in it."""
    home = folder / re.sub(r"\[.*", "", ENGINES[name].packages[0])
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "-q", "-e", str(ROOT), *ENGINES[name].packages]
    try:
        done = subprocess.run(pip, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        write(page, name, None, "pip takes more than 300 seconds")
        return
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        write(page, name, None, f"pip: {lines[-1] if lines else done.stderr[-200:]}")
        return
    command = [str(python), __file__, "--engine", name, "--page", str(page)]
    code = subprocess.run(command).returncode
    if code:
        write(page, name, None, f"its process ends with code {code}")


def without_folders(text: str) -> str:
    """The text in one line, with paths of files cut to their last part."""
    return re.sub(r"(?<![\w.])/\S+/", "", " ".join(text.split()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, help="measure it in this environment")
    parser.add_argument("--install", nargs="+", metavar=("FOLDER", "ENGINE"), help="measure each in its own one")
    parser.add_argument("--page", type=Path, default=PAGE)
    chosen = parser.parse_args(arguments)
    if chosen.install:
        for name in chosen.install[1:] or ENGINES:
            install(Path(chosen.install[0]), name, chosen.page)
    if chosen.engine:
        try:
            row = measured(chosen.engine)
        except Exception as error:  # an engine may raise anything
            write(chosen.page, chosen.engine, None, f"{type(error).__name__}: {without_folders(str(error)):.200}")
        else:
            write(chosen.page, chosen.engine, row)


if __name__ == "__main__":
    main()
