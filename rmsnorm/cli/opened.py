"""Models that ``rmsnorm port`` opens, and what a framework writes to the terminal while it starts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, get_args

from rmsnorm.cli.usage import choices
from rmsnorm.nematus.config import Norm
from rmsnorm.specification import errors
from rmsnorm.specification.frameworks import FRAMEWORKS, framework


@contextmanager
def stderr_kept() -> Iterator[TextIO]:
    """Keep what TensorFlow writes to file descriptor 2 when it starts, and show it only if this package has a mistake.

    No setting of TensorFlow makes it silent: it writes before it reads them. Yields a stream that reaches the terminal.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with open(os.dup(2), "w") as terminal, tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield terminal
        except (errors.InputError, OSError):
            raise
        except Exception:
            kept.seek(0)
            terminal.write(kept.read().decode(errors="replace"))
            raise
        finally:
            os.dup2(terminal.fileno(), 2)


def load(model: Path, config: Path | None, norm: str | None) -> Any:
    from rmsnorm import nematus

    choices("source_norm", [norm] if norm else None, get_args(Norm), "rmsnorm port")
    with stderr_kept():
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
    with stderr_kept():
        return ArrayModel(key, config, model.parameters), words


def backend_key(command: str, name: str | None) -> str:
    """The key of the backend of this name, or of the usual one."""
    return framework(command, name or ("numpy" if FRAMEWORKS["torch"].missing else "torch"), "backend").key
