"""PyTorch's process groups: rows and features spread over three processes give what one process gives."""

from __future__ import annotations

import importlib
import multiprocessing
from pathlib import Path

import pytest
from programs import printed

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("no gloo here", allow_module_level=True)

CHECKS = ["spread_over_features", "mixed_placements", "data_parallel"]
if hasattr(importlib.import_module("torch.distributed.fsdp"), "fully_shard"):  # in 2.5 it needs a GPU
    CHECKS.append("fully_sharded")


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="a group is a program that forks")
def test_a_group(tmp_path: Path) -> None:
    """torch.multiprocessing ends all of its processes where one fails."""
    of_2_5 = "ignore:DTensor random operators may not have complete support:UserWarning"
    program = "-W", "error", "-W", of_2_5, Path(__file__).with_name("torch_groups.py"), tmp_path, *CHECKS
    assert printed(*program, timeout=200, OMP_NUM_THREADS="1").split() == CHECKS
