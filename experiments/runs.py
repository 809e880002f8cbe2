"""The runs of our page: ``python -m experiments all`` starts those that are missing. Quality and time are apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from experiments.experiment import Experiment, get

SEEDS: Final = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Planned:
    """A run.

    Attributes:
        name: of its folder.
        experiment: its name.
        options: those that are not the defaults.
        norms: () for all of the experiment.
        turns: how often its steps are timed; 0 if another run has the same steps.
    """

    name: str
    experiment: str
    options: Mapping[str, Any] = field(default_factory=dict)
    norms: tuple[str, ...] = ()
    turns: int = 100

    @property
    def of(self) -> Experiment:
        return get(self.experiment)

    def arguments(self, file: str, folder: Path) -> list[str]:
        """Of the command that writes the file, summary.json or times.json, in a folder of its own."""
        options = {**self.options, "out": folder / self.name}
        if file == "times.json":
            options["times"] = self.turns
        else:
            options["seeds"] = ",".join(map(str, SEEDS))
        if self.norms:
            options["norm"] = ",".join(self.norms)
        named = ([f"--{name.replace('_', '-')}", str(value)] for name, value in options.items())
        return [self.experiment, *(word for pair in named for word in pair)]


RUNS: Final = (
    Planned("translation", "translation"),
    Planned("center", "translation", {"init_center": 0.2, "rate": 0.01, "steps": 2000}, ("layer", "rms"), turns=0),
    Planned("transformer", "transformer"),
    Planned("reader", "reader"),
    Planned("retrieval", "retrieval"),
    Planned("images", "cifar", norms=("none", "batch", "weight", "layer", "rms")),
    Planned("mlp-60", "mlp", turns=400),
    Planned("mlp-4", "mlp", {"batch_size": 4, "steps": 6000}, turns=400),
)


def missing(folder: Path) -> list[tuple[Planned, str]]:
    """The runs whose quality or time is not in the folder, with the file that they lack."""
    files = [(planned, name) for planned in RUNS for name in ("summary.json", "times.json")]
    wanted = [(planned, name) for planned, name in files if name == "summary.json" or planned.turns]
    return [(planned, name) for planned, name in wanted if not (folder / planned.name / name).exists()]
