"""PyTorch's process groups: rows and features spread over 2 and 4 processes give what one process gives."""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("no gloo here", allow_module_level=True)

PROGRAM = Path(__file__).with_name("torch_groups.py")
CHECKS = (
    "bfloat16", "float32", "float64", "mixed_placements", "data_parallel",
    "fully_sharded", "feature_parallel_layer",
)  # fmt: skip
if not hasattr(importlib.import_module("torch.distributed.fsdp"), "fully_shard"):  # in 2.5 it needs a GPU
    CHECKS = tuple(name for name in CHECKS if name != "fully_sharded")
SECONDS = 400  # for all checks of a group, which take a tenth of it where nothing else runs


@pytest.fixture(scope="module")
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The checks that this run has, in two processes; all of them in four, one of which holds no features."""
    tests = [item for item in request.session.items if getattr(item, "originalname", "") == "test_group"]
    names = [item.callspec.params["check"] for item in tests]  # type: ignore[attr-defined]
    return said_by(4 if len(names) == len(CHECKS) else 2, tmp_path_factory.mktemp("group"), *names)


def said_by(world: int, folder: Path, *names: str) -> dict[str, list[str]]:
    """What each process of a group wrote about each check; none is left when it has ended."""
    of_2_5 = "ignore:DTensor random operators may not have complete support:UserWarning"
    command = [sys.executable, "-W", "error", "-W", of_2_5, str(PROGRAM)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = []
    try:
        for rank in range(world):
            log = (folder / f"log.{rank}").open("w")
            arguments = [*command, str(rank), str(world), str(folder), *names]
            processes.append(subprocess.Popen(arguments, stdout=log, stderr=log, env=environment))
            log.close()
        limit = time.monotonic() + SECONDS
        while (
            time.monotonic() < limit and None in (ends := [process.poll() for process in processes]) and not any(ends)
        ):
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said: dict[str, list[str]] = {}
    for name, rank in itertools.product(names, range(world)):
        found, log = folder / f"{name}.{rank}", folder / f"log.{rank}"
        words = (
            found.read_text() if found.exists() else f"process {rank} did not come so far\n{log.read_text()[-2000:]}"
        )
        said.setdefault(name, []).append(words)
    return said


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("check", CHECKS)
def test_group(check: str, group: Any) -> None:
    assert group[check] == ["holds"] * len(group[check]), "\n".join(group[check])
