"""PyTorch's process groups: rows and features spread over 2 and 4 processes give what one process gives."""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("no gloo here", allow_module_level=True)

PROGRAM = Path(__file__).with_name("torch_groups.py")
CHECKS = ["spread_over_features", "mixed_placements", "data_parallel", "fully_sharded"]
if not hasattr(importlib.import_module("torch.distributed.fsdp"), "fully_shard"):  # in 2.5 it needs a GPU
    CHECKS.remove("fully_sharded")
SECONDS = 400  # for all checks of a group, which take a tenth of it where nothing else runs


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("world", [2, 4], ids=["two processes", "four, one of which holds no features"])
def test_group(world: int, tmp_path: Path) -> None:
    """None of the processes is left when it has ended."""
    of_2_5 = "ignore:DTensor random operators may not have complete support:UserWarning"
    command = [sys.executable, "-W", "error", "-W", of_2_5, str(PROGRAM)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    names, processes = CHECKS[: 2 if world == 4 else None], []
    try:
        for rank in range(world):
            with (tmp_path / f"log.{rank}").open("w") as log:
                arguments = [*command, str(rank), str(world), str(tmp_path), *names]
                processes.append(subprocess.Popen(arguments, stdout=log, stderr=log, env=environment))
        limit = time.monotonic() + SECONDS
        while time.monotonic() < limit:
            ends = [process.poll() for process in processes]
            if None not in ends or any(ends):
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for name, rank in itertools.product(names, range(world)):
        said, log_file = tmp_path / f"{name}.{rank}", tmp_path / f"log.{rank}"
        words = said.read_text() if said.exists() else f"not reached\n{log_file.read_text()[-2000:]}"
        assert words == "holds", f"{name}, process {rank}: {words}"
