"""Define the interface of the three kinds of run: `runs.language`, `runs.control` and `runs.dpo`."""

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
from ppo_repro.config.kinds import Kind
from ppo_repro.config.run import RunConfig
from ppo_repro.records.manifest import FinalResults
from ppo_repro.runs.kept_checkpoints import Checkpoints
from ppo_repro.runs.starting_point import Start

Config = TypeVar("Config", RunConfig, ControlConfig, DPOConfig)
Tables = dict[str, pa.Table]  # by name
Files = dict[str, str]  # SHA-256 by path below the run folder, as the manifest lists them


class Computed(Protocol):
    """The fields that every kind of iteration has."""

    @property
    def index(self) -> int: ...

    @property
    def seconds(self) -> dict[str, float]: ...  # wall time by phase, of everything since the iteration before


Item = TypeVar("Item", bound=Computed)


class Execution(ABC, Generic[Item]):
    """A prepared run: it computes its iterations one by one, and then its final results.

    By default it saves no models in its run folder.
    """

    checkpoints: Checkpoints | None  # None: a resumed run is computed again from its beginning

    @abstractmethod
    def iterations(self) -> Iterator[Item]:
        """Compute the iterations that remain, and yield each when it is complete."""

    @abstractmethod
    def tables(self, item: Item) -> Tables:
        """Return the tables of an iteration, side tables included."""

    @abstractmethod
    def progress(self, item: Item) -> str:
        """Describe an iteration for a person."""

    @abstractmethod
    def ending(self, clock: Clock) -> tuple[FinalResults, Tables]:
        """Return the final results and side tables. `clock` gets the phases of computing them."""

    def preparation_tables(self) -> Tables:
        """Return the tables of the training before the first iteration.

        They are empty if a resumed run did not prepare again.
        """
        return {}

    def notes(self) -> Mapping[str, Mapping[str, Any]]:
        """Return JSON files by name, which are outside the fingerprint."""
        return {}

    def closing_notes(self) -> Mapping[str, Mapping[str, Any]]:
        """Return JSON files by name that are complete only at the end of the run, outside the fingerprint."""
        return {}

    def bytes_to_keep(self, run_dir: Path) -> int:
        """Return a lower bound for the bytes of the models and checkpoints in the complete run folder."""
        return 0

    def put_policy(self, folder: Path) -> None:
        """Write the present policy into a folder, if a program could load it from there."""

    def keep_models(self, run_dir: Path, link: str) -> Files:
        """Save the trained models, and return their digests. `link`: last link of the records' chain."""
        return {}


@dataclass(frozen=True)
class RunKind(ABC, Generic[Config, Item]):
    """A kind of run, and the part that this process takes in it."""

    watcher: Watcher
    ranks: Ranks = ALONE
    name: ClassVar[Kind]
    changeable: ClassVar[Sequence[str]]  # groups of fields that a rerun or a resumed run may change
    resumed_alone: ClassVar[Sequence[str]] = ()  # groups that only a resumed run may change

    def over(self, run_dir: Path, iterations: int) -> Self:
        """Return a copy of this kind that takes the first `iterations` from the records in `run_dir`."""
        return self

    @abstractmethod
    def open(
        self, config: Config, run_dir: Path | None, start: Start | None = None
    ) -> AbstractContextManager[Execution[Item]]:
        """Prepare an execution on entry: it continues from `start`, or begins with the first iteration if that is None.

        `run_dir` is None in every process that does not record.
        """
