"""Load the state from which a recorded run is continued: one of its checkpoints, or its end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import check_sums
from ppo_repro.models.folders import load_value_parameters
from ppo_repro.records.folder import FINAL, FINAL_STATE, REFERENCE, VALUE_MODEL, has_reference, starts_of
from ppo_repro.records.manifest import Manifest
from ppo_repro.runs.checkpoint import Checkpoint, load


class Start:
    """The state from which a run continues.

    `reference` is the model that the run started as; None if its configuration makes or loads it.
    """

    def __init__(self, checkpoint: Checkpoint, reference: Path | None) -> None:
        self._checkpoint: Checkpoint | None = checkpoint
        self.reference = reference

    @property
    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint, which nobody has taken yet."""
        assert self._checkpoint is not None
        return self._checkpoint

    def take(self) -> Checkpoint:
        """Give the checkpoint away: its tensors are pages of a file, which stay mapped as long as anybody has them."""
        taken, self._checkpoint = self.checkpoint, None
        return taken


def load_newest(run_dir: Path, recorded: Manifest) -> Start | None:
    """Load the newest checkpoint; None if there is none. Raises UserError if it or the reference is damaged.

    An older checkpoint is never loaded instead: the user decides that by removing the files that the message names.
    """
    there = starts_of(run_dir, recorded)
    if not there:
        return None
    newest = max(there)
    before = [number for number in there if number < newest]
    otherwise = f"resume from iteration {max(before)}" if before else "start from the beginning"
    try:
        start = load_start(run_dir, recorded, there[newest])
    except UserError as error:
        raise UserError(f"{error}; or remove {run_dir / there[newest]} to {otherwise}") from error
    if start.checkpoint.chain != recorded.iterations[newest - 1].chain:
        raise UserError(f"{run_dir / there[newest]}: is not of this run; remove it to {otherwise}")
    return start


def load_start(run_dir: Path, recorded: Manifest, name: str | None) -> Start:
    """Load the checkpoint `name` below the run folder; None loads the state in which the run ended.

    Raises UserError if one of its files is damaged.
    """
    if name is None:
        check_sums(run_dir / FINAL)
        files, value = sorted((run_dir / FINAL).glob("*.safetensors")), run_dir / VALUE_MODEL
        policy = {name: tensor for file in files for name, tensor in load_file(file).items()}
        value_model = load_value_parameters(value) if value.is_dir() else {}
        state = load(run_dir / FINAL_STATE, recorded.files[FINAL_STATE])
        saved = replace(state, policy=policy, value_model=value_model)
    else:
        saved = load(run_dir / name, recorded.files[name])
    if not has_reference(recorded):
        return Start(saved, None)
    check_sums(run_dir / REFERENCE)
    return Start(saved, run_dir / REFERENCE)


def start_files(run_dir: Path, recorded: Manifest, name: str | None) -> list[Path]:
    """Return the files that `load_start` reads."""
    folders = [run_dir / REFERENCE] if has_reference(recorded) else []
    if name is None:
        folders += [run_dir / FINAL, run_dir / VALUE_MODEL]
    inside = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [run_dir / (name or FINAL_STATE), *inside]
