"""What a kind of run gives the runner: `runs.language`, `runs.control` and `runs.dpo` do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import pyarrow as pa

from ppo_repro.base.clock import Clock
from ppo_repro.base.ranks import ALONE, Ranks
from ppo_repro.base.watcher import Watcher
from ppo_repro.config.control import ControlConfig
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.files import Kind
from ppo_repro.config.run import RunConfig
from ppo_repro.records.manifest import Head
from ppo_repro.runs.checkpoint import Start

Config = TypeVar("Config", RunConfig, ControlConfig, DPOConfig)
Final = dict[str, float | int | str]
Tables = dict[str, pa.Table]  # by name
Files = dict[str, str]  # SHA-256 by path below the run folder, as the manifest lists them


class Computed(Protocol):
    """An iteration, whatever else it holds."""

    @property
    def index(self) -> int: ...

    @property
    def seconds(self) -> dict[str, float]: ...  # wall time by phase, of everything since the iteration before


Item = TypeVar("Item", bound=Computed)


class Execution(ABC, Generic[Item]):
    """A run that is prepared: it computes its iterations one by one, and then its final results.

    This one keeps no models in its run folder.
    """

    @abstractmethod
    def iterations(self) -> Iterator[Item]: ...

    @abstractmethod
    def tables(self, item: Item) -> Tables:
        """Return the tables of an iteration, side tables included."""

    @abstractmethod
    def progress(self, item: Item) -> str:
        """Describe an iteration in words that a person sees."""

    @abstractmethod
    def ending(self, clock: Clock) -> tuple[Final, Tables]:
        """Return the final results and side tables; `clock` gets the phases it takes."""

    def preparation_tables(self) -> Tables:
        """Return the tables of what came before the first iteration.

        They are empty if a resumed run did not prepare again.
        """
        return {}

    def notes(self) -> Mapping[str, Mapping[str, Any]]:
        """Return JSON files by name, outside the fingerprint."""
        return {}

    def closing_notes(self) -> Mapping[str, Mapping[str, Any]]:
        """Return likewise what is known at the end."""
        return {}

    def keep_start(self, run_dir: Path, files: Mapping[str, str]) -> Files:
        """Keep what no iteration changes; the files of the run then."""
        return dict(files)

    def bytes_to_keep(self) -> int:
        """Return the bytes of the models and checkpoints that a complete run keeps, at least."""
        return 0

    def is_checkpoint_due(self, iteration: int) -> bool:
        """Return whether a checkpoint comes after `iteration` iterations."""
        return False

    def save_checkpoint(self, run_dir: Path, head: Head, link: str) -> Files:
        """Keep the state as it is now; `link`: the last one of the chain."""
        return dict(head.files)

    def put_policy(self, folder: Path) -> bool:
        """Put the policy as it is now into a folder; False if there is none that could be loaded from there."""
        return False

    def keep_models(self, run_dir: Path, files: Mapping[str, str], link: str) -> Files:
        """Keep what was trained."""
        return dict(files)


@dataclass(frozen=True)
class RunKind(ABC, Generic[Config, Item]):
    """One kind of run, and how this process takes part in it."""

    watcher: Watcher
    ranks: Ranks = ALONE
    name: ClassVar[Kind]
    changeable: ClassVar[Sequence[str]]  # groups of fields that a rerun or a resumed run may change

    def over(self, run_dir: Path, iterations: int) -> Self:
        """Return this kind for a run that has recorded `iterations` in `run_dir`, and goes on or is repeated."""
        return self

    @abstractmethod
    def open(
        self, config: Config, run_dir: Path | None, start: Start | None = None
    ) -> AbstractContextManager[Execution[Item]]:
        """Open an execution from `start`, None: from the first iteration, prepared on entry.

        `run_dir` is None in every process that does not record.
        """
