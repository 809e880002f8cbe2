"""Large results of PyTorch get huge pages where the system leaves that to programs; small ones get none."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import finished

pytest.importorskip("torch")
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CODE = """
import torch
from rmsnorm.torch_impl import rms_norm
from rmsnorm import cpu
assert cpu.is_available()

def is_advised(tensor):
    place, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in open("/proc/self/smaps"):
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(end, 16) for end in head.split("-"))
            inside = first <= place < last
        elif inside and head == "VmFlags:":
            return "hg" in line.split()

x = torch.ones(4096, 2048, requires_grad=True)
y = rms_norm(x)
(dx,) = torch.autograd.grad(y.sum(), x)
print(is_advised(x), is_advised(y), is_advised(dx), is_advised(rms_norm(x.detach()[:100])))
"""


@pytest.mark.parametrize(("switch", "expected"), [("1", "False True True False"), ("0", "False False False False")])
def test_large_results_have_huge_pages(switch: str, expected: str) -> None:
    if not ENABLED.exists() or "[madvise]" not in ENABLED.read_text():
        pytest.skip("the system does not leave huge pages to programs")
    done = finished("-W", "ignore", "-c", CODE, timeout=200, RMSNORM_HUGE_PAGES=switch)
    assert done.stdout.strip() == expected, done.stderr
