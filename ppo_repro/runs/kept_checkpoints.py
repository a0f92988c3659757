"""Decide when a language run writes a checkpoint, which checkpoints stay, and how much disk they need."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import SUMS_NAME, file_digest
from ppo_repro.base.output import size
from ppo_repro.config.model import ModelFolder
from ppo_repro.config.run import RunConfig
from ppo_repro.models.folders import save_model
from ppo_repro.models.state import TrainState
from ppo_repro.records.folder import CHECKPOINTS_NAME, FINAL_STATE, REFERENCE, checkpoints_of
from ppo_repro.records.manifest import Head
from ppo_repro.runs.checkpoint import Checkpoint, save, take

SMALL = 10_000_000  # parameters that a model trains; a checkpoint of two is 24 bytes for each, 1 s and 240 MB at most
AUTO = 10  # default number of iterations between checkpoints of a small model
FLOAT, MOMENTS = 4, 8  # bytes of a number of float32, and of AdamW's two moments of a weight


def parameter_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters. Tied parameters count once."""
    return sum(parameter.nbytes for parameter in module.parameters())


def listed(run_dir: Path, *folders: Path) -> dict[str, str]:
    """Return the digest of each folder's SHA256SUMS, by path relative to the run folder."""
    sums = [folder / SUMS_NAME for folder in folders]
    return {path.relative_to(run_dir).as_posix(): file_digest(path) for path in sums}


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a language run: when they are due, what they need beside them, and which stay."""

    config: RunConfig
    state: TrainState
    tokenizer: PreTrainedTokenizerBase
    task: Mapping[str, str]  # digests of the task's inputs
    is_adapted: bool  # whether the policy has adapters

    @cached_property
    def every(self) -> int:
        """Return the number of iterations between checkpoints; 0 if there are none."""
        every = self.config.checkpoints.every
        if every != "auto":
            return every
        return AUTO if max(self._trained) <= SMALL and self.config.iterations > AUTO else 0

    @property
    def keeps_reference(self) -> bool:
        """Return whether checkpoints need a copy of the reference.

        The reference of an adapted model folder is loaded again.
        """
        return self.every > 0 and not (self.is_adapted and isinstance(self.config.model, ModelFolder))

    @property
    def keeps_final_state(self) -> bool:
        """Return whether the optimizers' state at the end is saved, because no checkpoint has it."""
        return self.config.checkpoints.final_state and not self.is_due(self.config.iterations)

    @property
    def _trained(self) -> list[int]:
        optimizers = self.state.policy_optimizer, self.state.value_optimizer
        return [optimizer.trained_count for optimizer in optimizers if optimizer is not None]

    def _take(self, link: str) -> Checkpoint:
        return take(self.state, link, self.task, self.config.numerics.precision)

    def is_due(self, iteration: int) -> bool:
        """Return whether a checkpoint is saved after `iteration` iterations."""
        return self.every > 0 and iteration % self.every == 0

    def bytes_to_keep(self, run_dir: Path) -> int:
        """Return a lower bound for the bytes of reference, checkpoints and final state in the complete run folder."""
        keep, count = self.config.checkpoints.keep, len(list((run_dir / CHECKPOINTS_NAME).glob("iteration-*")))
        if self.every:
            count += self.config.iterations // self.every - self.state.iteration // self.every
        if keep != "all":  # the new checkpoint is written before the oldest one is removed
            count = min(keep + 1, count)
        of_weight = count * (FLOAT + MOMENTS) + self.keeps_final_state * MOMENTS
        return self.keeps_reference * parameter_bytes(self.state.reference) + sum(self._trained) * of_weight

    def keep_start(self, run_dir: Path) -> dict[str, str]:
        """Save the reference, which no step changes, once for all checkpoints; return its digests."""
        folder = run_dir / REFERENCE
        if not self.keeps_reference:
            return {}
        if not folder.exists():
            save_model(self.state.reference, self.tokenizer, folder)
        return listed(run_dir, folder)

    def give_moments(self) -> None:
        """Send the first process what it lacks for a checkpoint. Every other process calls this when it saves one."""
        self._take("")

    def save(self, run_dir: Path, head: Head, link: str) -> dict[str, str]:
        """Save the present state, and return the run's files with their digests, of checkpoints only the newest ones.

        `link`: last link of the records' chain.
        """
        name = f"{CHECKPOINTS_NAME}/iteration-{self.state.iteration:06d}.safetensors"
        digest = save(self._take(link), run_dir / name)
        gc.collect()  # quick, because `language` hides all older objects from it
        files, keep = {**head.files, name: digest}, self.config.checkpoints.keep
        numbered = checkpoints_of(head.model_copy(update={"files": files}))
        old = [] if keep == "all" else sorted(numbered)[:-keep]
        removed = {numbered[number] for number in old}
        return {path: digest for path, digest in files.items() if path not in removed}

    def save_final(self, run_dir: Path, link: str) -> dict[str, str]:
        """Save the optimizers' state at the end if no checkpoint has it; return its digest."""
        if not self.keeps_final_state:
            return {}
        saved = replace(self._take(link), policy={}, value_model={})
        return {FINAL_STATE: save(saved, run_dir / FINAL_STATE)}


def require_room(run_dir: Path, to_keep: int) -> None:
    """Raise UserError if the disk lacks room for `to_keep` bytes of models and checkpoints.

    Models and checkpoints that an earlier process of the run left count as written.
    """
    kept = sum(path.stat().st_size for path in (run_dir / CHECKPOINTS_NAME).rglob("*") if path.is_file())
    missing, free = to_keep - kept, shutil.disk_usage(run_dir).free
    if missing > free:
        raise UserError(
            f"{run_dir}: not enough room: models and checkpoints need at least {size(missing)} more, and "
            f"{size(free)} are free; make room there or choose another --out"
        )
