"""Cards for which gpu_kernels.py predicts times, and measured times with which it compares its predictions."""

from __future__ import annotations

from typing import Any, NamedTuple

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
    ("forward", "bfloat16", 16384, 8192, 0.1295, {}),
    ("forward", "bfloat16", 16384, 8192, 0.1302, LLAMA),
    ("forward", "float32", 16384, 8192, 0.2560, {}),
    ("forward", "bfloat16", 4096, 4096, 0.0190, {}),
    ("forward", "bfloat16", 32768, 768, 0.0284, {}),
    ("backward", "bfloat16", 16384, 8192, 0.2655, {"programs": 132}),
    ("backward", "bfloat16", 4096, 4096, 0.0434, {"programs": 264}),
    ("backward", "bfloat16", 8192, 1024, 0.0328, {}),
]
