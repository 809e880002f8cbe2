"""The picture of the README, from the committed runs: python benchmarks/picture.py torch docs/images/torch.svg"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tables import LAYERS
from timing.plot import write_plot
from timing.run import BenchRun


def main(backend: str, path: Path) -> None:
    lines = LAYERS.read_text(encoding="utf-8").splitlines()
    for head in map(json.loads, lines):
        for entry in head.get("backends", ()):
            if entry["name"] == backend:
                records = [r for r in map(json.loads, lines) if r.get("backend") == backend and "timing" in r]
                run = BenchRun(backend, version=entry["version"], device=entry["device"], cores=entry["cores"])
                run.records = [record for record in records if record["dtype"] == "float32"]
                write_plot([run], path, head["environment"])
                return


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
