"""What the wheel carries beside the package: `analysis` as `ppo_repro.analysis`, and the quickstart's configuration.

A checkout has `analysis/` at its top, where its commands are `python -m analysis.mismatch RUN`. The wheel must not
claim a name as common as that, so the same files are put below `ppo_repro`, with the names of their modules changed.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_IMPORT = re.compile(r"^(\s*(?:from|import) )analysis\b", re.MULTILINE)
_COMMAND = re.compile(r"\bpython -m analysis\b")
CONFIGURATIONS = ("quickstart",)


def moved(source: str) -> str:
    """The text of a module of `analysis` as a module of `ppo_repro.analysis`."""
    return _COMMAND.sub("python -m ppo_repro.analysis", _IMPORT.sub(r"\1ppo_repro.analysis", source))


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling for a wheel; an editable install finds the checkout's own folders."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        root = Path(self.root)
        self._folder = Path(tempfile.mkdtemp())
        for path in sorted((root / "analysis").rglob("*")):
            inside = path.relative_to(root / "analysis")
            if path.suffix not in {".py", ".css", ".js"} or inside.parts[0] == "notebooks":
                continue
            target = self._folder / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text(encoding="utf-8")
            target.write_text(moved(text) if path.suffix == ".py" else text, encoding="utf-8")
            build_data["force_include"][str(target)] = f"ppo_repro/analysis/{inside.as_posix()}"
        for name in CONFIGURATIONS:
            source = root / "experiments" / f"{name}.yaml"
            build_data["force_include"][str(source)] = f"ppo_repro/configurations/{name}.yaml"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            shutil.rmtree(self._folder)
