"""Models that ``rmsnorm port`` opens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

from rmsnorm.cli.usage import choices
from rmsnorm.nematus.config import Norm
from rmsnorm.specification.frameworks import FRAMEWORKS, framework


def load(model: Path, config: Path | None, norm: str | None) -> Any:
    from rmsnorm import nematus

    choices("source_norm", [norm] if norm else None, get_args(Norm), "rmsnorm port")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow still writes some lines, before it reads this
    return nematus.load(model, config=config, norm=norm)  # type: ignore[arg-type]


def opened(
    command: str, model: Any, backend: str | None, dictionary: list[Path] | None, *, scoring: bool
) -> tuple[Any, Any]:
    """A model in a framework, and its vocabularies."""
    from rmsnorm.nematus.backends import ArrayModel
    from rmsnorm.nematus.dialects import rules
    from rmsnorm.nematus.vocabulary import vocabularies

    key = backend_key(command, backend)
    files = (dictionary[:-1], dictionary[-1]) if dictionary else ()
    words = vocabularies(model, *files, scoring=scoring)
    config = model.config
    if scoring and not rules(config).scores_smoothed:
        config = config.replace(label_smoothing=0.0)
    return ArrayModel(key, config, model.parameters), words


def backend_key(command: str, name: str | None) -> str:
    """The key of the backend of this name, or of the usual one."""
    return framework(command, name or ("numpy" if FRAMEWORKS["torch"].missing else "torch"), "backend").key
