"""Find the configuration and input files with which a recorded run is continued or repeated."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from ppo_repro.base.errors import UserError
from ppo_repro.config.files import validated
from ppo_repro.config.kinds import CONFIGS
from ppo_repro.config.tree import apply_overrides
from ppo_repro.records import folder
from ppo_repro.records.located import located_tree
from ppo_repro.records.manifest import Manifest
from ppo_repro.runs.kind import Config, Item, RunKind
from ppo_repro.runs.machines import files_of
from ppo_repro.runs.starting_point import start_files


@dataclass(frozen=True)
class Continued(Generic[Config]):
    """A recorded run that will be continued, or computed again."""

    recorded: Manifest
    config: Config
    checkpoint: str | None  # where the run continues, a path below the run folder; None: at the beginning
    files: list[Path]  # files that every machine needs, with the model's unless the checkpoint has its weights


def continued(
    kind: RunKind[Config, Item],
    run_dir: Path,
    recorded: Manifest,
    overrides: Sequence[str],
    changeable: Sequence[str],
    elsewhere: Path | None,
    checkpoint: str | None,
) -> Continued[Config]:
    """Find the inputs of a run that goes on from a checkpoint.

    Raises UserError if an input is missing, or if an override names a field outside the groups `changeable`.
    """
    groups = " and ".join(changeable)
    for override in overrides:
        if not override.startswith(tuple(f"{group}{end}" for group in changeable for end in ".=")):
            raise UserError(
                f"--set {override}: may change fields of {groups} only; for another field "
                f"start a run of its own, or go on from a checkpoint with `ppo-repro fork {shlex.quote(str(run_dir))}`"
            )
    model_too = checkpoint is None or not folder.has_reference(recorded)
    tree = located_tree(run_dir, recorded, elsewhere, model_too)
    apply_overrides(tree, overrides)
    config: Config = validated(CONFIGS[kind.name], tree, str(run_dir / folder.CONFIG_NAME))  # type: ignore[assignment]
    named: dict[str, Any] = config.model_dump(mode="json")
    if not model_too:
        del named["model"]
    files = [*files_of(named), *(start_files(run_dir, recorded, checkpoint) if checkpoint else ())]
    return Continued(recorded, config, checkpoint, files)
