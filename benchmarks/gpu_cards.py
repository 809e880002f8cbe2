"""Cards for which gpu_kernels.py predicts times, and measured times with which it compares its predictions."""

from __future__ import annotations

from typing import Any, NamedTuple

from machine_code import Counts

LLAMA = {"NORM": "bfloat16"}  # h / rho is rounded before the product with the gain


class Processor(NamedTuple):
    """Of one multiprocessor: lanes that begin an instruction in a clock, by pipe, and bytes a program may share."""

    issue: int
    fma: int
    alu: int
    fp64: int
    xu: int  # of conversions from and to 64 bits, which are almost all that this pipe does here
    shared: int


# CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions" and "Technical Specifications per Compute
# Capability"; issue: four schedulers of 32 lanes. By compute capability.
PROCESSORS = {
    80: Processor(128, 64, 64, 32, 16, 163 << 10),
    89: Processor(128, 128, 64, 2, 2, 99 << 10),
    90: Processor(128, 128, 64, 64, 16, 227 << 10),
    100: Processor(128, 128, 64, 64, 16, 227 << 10),
    103: Processor(128, 128, 64, 2, 2, 227 << 10),
    120: Processor(128, 128, 64, 2, 2, 99 << 10),
}


class Card(NamedTuple):
    capability: int
    processors: int
    clock: float  # a second, boosted
    bandwidth: float  # bytes a second from memory


CARDS = {
    "RTX 4090": Card(89, 128, 2.52e9, 1.008e12),  # NVIDIA Ada GPU architecture, whitepaper
    "A100 80GB": Card(80, 108, 1.41e9, 2.039e12),  # A100 Tensor Core GPU, data sheet of SXM; clock: whitepaper
    "H100 SXM": Card(90, 132, 1.98e9, 3.35e12),  # H100 data sheet; clock: from its 67 TFLOPS of float32
    "H200": Card(90, 132, 1.98e9, 4.8e12),  # H200 data sheet; clock: as H100
    "B200": Card(100, 148, 1.98e9, 7.7e12),  # HGX B200 data sheet; clock: from its 75 TFLOPS of float32
    "B300": Card(103, 148, 1.98e9, 7.7e12),  # HGX B300 data sheet; clock: from its 75 TFLOPS of float32
    "RTX 5090": Card(120, 170, 2.407e9, 1.792e12),  # NVIDIA RTX Blackwell GPU architecture, whitepaper
}
# A copy of 16384x8192 in bfloat16 took 0.129 ms, and not the 0.112 of the data sheet.
MEASURED_CARD = CARDS["H200"]._replace(bandwidth=4.17e12)
# Kernel, format, rows, n, milliseconds, settings. One H200, torch 2.11.0, triton 3.6.0, 2026-11-27.
MEASURED: list[tuple[str, str, int, int, float, dict[str, Any]]] = [
    ("forward", "bfloat16", 16384, 8192, 0.1314, {}),
    ("forward", "bfloat16", 16384, 8192, 0.1305, LLAMA),
    ("forward", "float32", 16384, 8192, 0.2998, {}),
    ("forward", "bfloat16", 4096, 4096, 0.0190, {}),
    ("forward", "bfloat16", 32768, 768, 0.0279, {}),
    ("backward", "bfloat16", 16384, 8192, 0.2417, {"programs": 132}),
    ("backward", "bfloat16", 4096, 4096, 0.0398, {"programs": 264}),
    ("backward", "bfloat16", 8192, 1024, 0.0225, {}),
]
# The same of the kernels before (commit c56dc77), with the number of programs and the instructions an element that were
# counted in them; times: results/gpu-h200-2026-11-26-tuned.md.
EARLIER: list[tuple[str, str, int, int, float, int, Counts]] = [
    ("forward", "bfloat16", 16384, 8192, 0.2254, 16384, Counts(issue=31.4, fma=11.7, alu=12.4, fp64=3.1, xu=1.2)),
    ("forward", "float32", 16384, 8192, 0.2649, 16384, Counts(issue=25.8, fma=9.1, alu=8.5, fp64=3.1, xu=1.2)),
    ("forward", "bfloat16", 8192, 16384, 0.2763, 8192, Counts(issue=32.4, fma=12.0, alu=12.9, fp64=3.1, xu=1.2)),
    ("forward", "bfloat16", 131072, 128, 0.0328, 4096, Counts(issue=39.7, fma=12.9, alu=13.6, fp64=5.9, xu=1.8)),
    ("forward", "bfloat16", 32768, 768, 0.0436, 32768, Counts(issue=39.3, fma=15.5, alu=15.3, fp64=4.0, xu=1.6)),
    ("backward", "bfloat16", 16384, 8192, 0.6306, 256, Counts(issue=67.6, fma=27.3, alu=22.9, fp64=5.6, xu=3.4)),
    ("backward", "float32", 16384, 8192, 0.733, 256, Counts(issue=70.0, fma=22.4, alu=25.5, fp64=5.9, xu=4.2)),
    ("backward", "bfloat16", 4096, 4096, 0.0992, 256, Counts(issue=59.6, fma=27.2, alu=18.9, fp64=5.5, xu=3.4)),
]
