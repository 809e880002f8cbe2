"""What a run has measured so far, and the states of its models: one file, written whole or not at all."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from experiments.experiment import Trainer
from rmsnorm.files import check_expansion, check_regular, reading, replacing
from rmsnorm.files.tensors import write_npz
from rmsnorm.specification import errors

FILE: Final = "checkpoint.npz"
_WANTED: Final = "a checkpoint of this program"


class Record:
    """Losses and seconds of every step, evaluations, and the states of the models of the seed in training.

    Attributes:
        settings: of the run; another run must not continue it.
        measured: (steps, 2) losses and seconds, by seed and norm.
        evaluations: a row for every one: seed, norm, step and the measures.
        parameters: how many numbers the model of a norm learns.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, dict(settings)
        self.measured: dict[tuple[int, str], list[tuple[float, float]]] = {}
        self.evaluations: list[dict[str, Any]] = []
        self.parameters: dict[str, int] = {}
        self._states: dict[str, np.ndarray[Any, Any]] = {}
        self._seed: int | None = None

    @classmethod
    def open(cls, folder: Path, settings: Mapping[str, Any]) -> Record:
        """The record in a folder, or a new one.

        Raises:
            ValueError: the file is damaged, or of a run with other settings.
        """
        record = cls(folder / FILE, settings)
        if not record.path.exists():
            return record
        with reading("experiments", record.path, _WANTED):
            arrays = _read(record.path)
            head = json.loads(arrays.pop("head").tobytes())
            for name in [name for name in arrays if name.startswith("measured/")]:
                _, seed, norm = name.split("/")
                record.measured[int(seed), norm] = list(map(tuple, arrays.pop(name).tolist()))
            record.evaluations, record.parameters = head["evaluations"], head["parameters"]
            record._states, record._seed = arrays, head["seed"]
            before = head["settings"]
        if before != record.settings:
            names = [name for name in before if before[name] != settings[name]]
            raise errors.out_of_domain(
                "experiments", "out", str(folder), f"a new folder, as its run has other {' and '.join(names)}",
                "choose another or delete it",
            )  # fmt: skip
        return record

    def steps(self, seed: int) -> int:
        """How many steps of this seed are done."""
        return max((len(rows) for (other, _), rows in self.measured.items() if other == seed), default=0)

    def begin(self, seed: int, trainers: Mapping[str, Trainer]) -> None:
        """Restore the trainers, where the seed is the one in training.

        Raises:
            ValueError: the states are not those of these models.
        """
        self.parameters = {norm: trainer.parameters for norm, trainer in trainers.items()}
        if seed != self._seed:
            self._forget(seed)
            return
        with reading("experiments", self.path, _WANTED):
            for norm, trainer in trainers.items():
                prefix = f"state/{norm}/"
                own = {name.removeprefix(prefix): a for name, a in self._states.items() if name.startswith(prefix)}
                trainer.restore(own)

    def _forget(self, seed: int) -> None:
        """A seed whose states are not kept, as another one followed before its end, begins again."""
        self.measured = {key: rows for key, rows in self.measured.items() if key[0] != seed}
        self.evaluations = [row for row in self.evaluations if row["seed"] != seed]

    def add(self, seed: int, measured: Mapping[str, tuple[float, float]]) -> None:
        """Loss and seconds of one step of every norm."""
        for norm, row in measured.items():
            self.measured.setdefault((seed, norm), []).append(row)

    def save(self, seed: int, trainers: Mapping[str, Trainer]) -> None:
        """Write the file. Until it is written, the one before stays."""
        arrays = {f"measured/{seed}/{norm}": np.array(rows) for (seed, norm), rows in self.measured.items()}
        for norm, trainer in trainers.items():
            arrays |= {f"state/{norm}/{name}": array for name, array in trainer.state().items()}
        head = {"settings": self.settings, "evaluations": self.evaluations, "seed": seed}
        text = json.dumps({**head, "parameters": self.parameters})
        with replacing(self.path) as temporary, temporary.open("wb") as file:
            write_npz(file, {"head": np.frombuffer(text.encode(), np.uint8), **arrays})


def _read(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    check_regular("experiments", path, _WANTED)
    with zipfile.ZipFile(path) as archive:
        check_expansion(sum(entry.file_size for entry in archive.infolist()), path.stat().st_size)
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)
