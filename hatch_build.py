"""What an installation builds: the C kernels, and in a wheel the quickstart's configuration and the recipes."""

from __future__ import annotations

import runpy
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CONFIGURATIONS = ("quickstart.yaml", "recipes")


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
        for name in CONFIGURATIONS:
            source = Path(self.root) / "experiments" / name
            build_data["force_include"][str(source)] = f"ppo_repro/configurations/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self._folder)
