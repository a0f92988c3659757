"""What an installation builds: the C kernels, and in a wheel `analysis` and the quickstart's configuration.

A checkout has `analysis/` at its top. The wheel must not claim a name as common as that, so the same files are put
below `ppo_repro`, with the names of their modules changed; `ppo_repro/analysis.py` gives the checkout the same names.
"""

from __future__ import annotations

import re
import runpy
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_IMPORT = re.compile(r"^(\s*(?:from|import) )analysis\b", re.MULTILINE)
CONFIGURATIONS = ("quickstart",)


def moved(source: str) -> str:
    """The text of a module of `analysis` as a module of `ppo_repro.analysis`."""
    return _IMPORT.sub(r"\1ppo_repro.analysis", source)


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling for a wheel; an editable install finds the checkout's own folders, kernels beside sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._folder = Path(tempfile.mkdtemp())
        kernels = runpy.run_path(str(Path(self.root) / "ppo_repro" / "numerics" / "build.py"))
        here = kernels["this_platform"]()  # None: only the sources, and the first use says which platforms there are
        if here is not None:
            build_data["pure_python"], build_data["tag"] = False, f"py3-none-{here.tag}"
        if version == "editable":
            if here is not None:
                kernels["compile_in_place"](here)
            return
        if here is not None:
            for path in [
                *kernels["compile_variants"](here, self._folder),
                *kernels["compile_card"](here, self._folder),
            ]:
                build_data["force_include"][str(path)] = f"ppo_repro/numerics/c/{path.name}"
        self._move_analysis(self._folder / "analysis", build_data)
        for name in CONFIGURATIONS:
            source = Path(self.root) / "experiments" / f"{name}.yaml"
            build_data["force_include"][str(source)] = f"ppo_repro/configurations/{name}.yaml"

    def _move_analysis(self, folder: Path, build_data: dict[str, Any]) -> None:
        analysis = Path(self.root) / "analysis"
        for path in sorted(analysis.rglob("*")):
            inside = path.relative_to(analysis)
            if path.suffix not in {".py", ".css", ".js", ".html"} or inside.parts[0] == "notebooks":
                continue
            target = folder / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text(encoding="utf-8")
            target.write_text(moved(text) if path.suffix == ".py" else text, encoding="utf-8")
            build_data["force_include"][str(target)] = f"ppo_repro/analysis/{inside.as_posix()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self._folder)
