"""What a kind of run gives the runner: `runs.language`, `control.kind` and `preferences.dpo` do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from ppo_repro.clock import Clock
from ppo_repro.config.files import Kind
from ppo_repro.config.run import ControlConfig, DPOConfig, RunConfig
from ppo_repro.ranks import Ranks
from ppo_repro.records.manifest import Head
from ppo_repro.runs.checkpoint import Checkpoint
from ppo_repro.watcher import Watcher

Config = TypeVar("Config", RunConfig, ControlConfig, DPOConfig)
Config_contra = TypeVar("Config_contra", RunConfig, ControlConfig, DPOConfig, contravariant=True)
Final = dict[str, float | int | str]
Tables = dict[str, pa.Table]  # by name


class Computed(Protocol):
    """An iteration, whatever else it holds."""

    @property
    def index(self) -> int: ...

    @property
    def seconds(self) -> dict[str, float]: ...  # wall time by phase, of everything since the iteration before


Item = TypeVar("Item", bound=Computed)


@dataclass(frozen=True)
class Start:
    """What a run goes on from."""

    checkpoint: Checkpoint
    reference: Path | None  # the model that the run started as; None if its configuration makes or loads it


class Store:
    """Models and checkpoints of a run; this one keeps none.

    Each list of files has the SHA-256 of each by its path below the run folder, as the manifest lists them.
    """

    def begin(self, files: Mapping[str, str]) -> dict[str, str]:
        """Before the first iteration."""
        return dict(files)

    def is_due(self, iteration: int) -> bool:
        """Whether `save` comes after `iteration` iterations."""
        return False

    def save(self, head: Head, link: str) -> dict[str, str]:
        """Keep the state as it is now; `link`: the last one of the chain."""
        return dict(head.files)

    def put_policy(self, folder: Path) -> bool:
        """Put the policy as it is now into a folder; False if there is none that could be loaded from there."""
        return False

    def finish(self, files: Mapping[str, str], link: str) -> dict[str, str]:
        """Keep what was trained."""
        return dict(files)


class Execution(Protocol[Item]):
    """A run that is prepared: it computes its iterations one by one, and then its final results."""

    @property
    def store(self) -> Store: ...

    @property
    def notes(self) -> Mapping[str, Mapping[str, Any]]: ...  # JSON files by name, outside the fingerprint

    def iterations(self) -> Iterator[Item]: ...

    def preparation_tables(self) -> Tables: ...  # empty where a resumed run did not prepare again

    def tables(self, item: Item) -> Tables: ...  # side tables included

    def progress(self, item: Item) -> str: ...  # what a person sees of an iteration

    def ending(self, clock: Clock) -> tuple[Final, Tables]: ...  # with side tables; `clock` gets the phases it takes


class RunKind(Protocol[Config_contra, Item]):
    """One kind of run, and how this process takes part in it."""

    @property
    def name(self) -> Kind: ...

    @property
    def changeable(self) -> Sequence[str]: ...  # groups of fields that a rerun or a resumed run may change

    @property
    def watcher(self) -> Watcher: ...

    @property
    def ranks(self) -> Ranks: ...

    def open(
        self, config: Config_contra, run_dir: Path | None, start: Start | None = None
    ) -> AbstractContextManager[Execution[Item]]:
        """An execution from `start`, None: from the first iteration, prepared on entry.

        Without `run_dir`, as in every process but the first, it keeps nothing.
        """
        ...
