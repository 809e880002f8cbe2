"""Compiles the kernels for CPUs into a wheel: see rmsnorm/cpu/build.py.

``RMSNORM_BUILD_LEVELS`` names the levels of processors, separated by commas; by default it is the best one of this
machine. Where it is empty, or the machine has none of the levels, the wheel has no library, and fits every machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Kernels(BuildHookInterface):
    """A hook of hatchling. An editable installation compiles what it calls, so that a change is seen at once."""

    def dependencies(self) -> list[str]:
        """A linker, if there is none."""
        return [] if any(map(shutil.which, ("cc", "gcc", "clang"))) else ["ziglang"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        levels = self._levels() if version != "editable" else []
        if not levels:
            return
        self.folder = Path(tempfile.mkdtemp())
        paths = [self.root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        for level in levels:
            command = [sys.executable, "-m", "rmsnorm.cpu.build", level, str(self.folder)]
            subprocess.run(command, check=True, env=environment, cwd=self.folder)
        for file in self.folder.iterdir():
            build_data["force_include"][str(file)] = f"rmsnorm/cpu/{file.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    def _levels(self) -> list[str]:
        named = os.environ.get("RMSNORM_BUILD_LEVELS")
        if named == "":
            return []
        sys.path.insert(0, self.root)
        try:
            from rmsnorm.cpu import target
        finally:
            sys.path.remove(self.root)
        if named is not None:
            return target.chosen(named)
        levels = target.levels()[:1]
        for level in levels:
            self.app.display_warning(
                f"rmsnorm: this wheel is for processors of the level {level}, as this machine's; "
                "RMSNORM_BUILD_LEVELS=x86-64-v3 makes one for nearly all x86-64 processors"
            )
        return levels
