"""What a kind of run gives the runner: `runs.language` and `control.kind` do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa

from ppo_repro.clock import Clock
from ppo_repro.config.control import ControlConfig
from ppo_repro.config.kinds import Kind
from ppo_repro.config.run import RunConfig
from ppo_repro.ranks import Ranks
from ppo_repro.records.manifest import Manifest
from ppo_repro.watcher import Watcher

Config = TypeVar("Config", RunConfig, ControlConfig)
Final = dict[str, float | int | str]


class Computed(Protocol):
    """An iteration, whatever else it holds."""

    @property
    def index(self) -> int: ...

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time by phase, of everything from the iteration before to this one."""
        ...


Item = TypeVar("Item", bound=Computed)


@dataclass(frozen=True)
class Ending:
    """What a run ends with."""

    results: Final
    tables: dict[str, pa.Table]  # side tables after the last iteration, by name


class Store(Protocol):
    """What an execution keeps in its run folder beside the records."""

    @property
    def files(self) -> dict[str, str]:
        """What was kept before the first iteration: SHA-256 of lists of files, by path below the run folder."""
        ...

    def is_due(self, iteration: int) -> bool:
        """Whether `save` is to be called after `iteration` iterations."""
        ...

    def save(self, link: str) -> None:
        """Keep the state as it is now; `link` is the last one in the chain of recorded iterations."""
        ...

    def put_policy(self, folder: Path) -> None:
        """Put the policy as it is now into a folder, to be loaded from there."""
        ...

    def finish(self, link: str) -> dict[str, str]:
        """Keep what was trained; `link` is the last one in the chain.

        Returns SHA-256 of lists of files, as `files` has them.
        """
        ...


class Execution(Protocol[Item]):
    """A run that is prepared: it computes its iterations one by one, and then its final results."""

    @property
    def store(self) -> Store | None: ...

    @property
    def notes(self) -> Mapping[str, Mapping[str, Any]]:
        """Facts about the start of the run: JSON files of the run folder, by name, outside the fingerprint."""
        ...

    def iterations(self) -> Iterator[Item]: ...

    def preparation_tables(self) -> dict[str, pa.Table]:
        """The side tables of what came before the first iteration, by name; none where that was not done again."""
        ...

    def tables(self, item: Item) -> dict[str, pa.Table]:
        """All tables of an iteration by name, side tables included."""
        ...

    def progress(self, item: Item) -> str:
        """The figures of an iteration that a person sees while the run works."""
        ...

    def ending(self, clock: Clock) -> Ending:
        """What the run ends with; `clock` gets the phases it takes."""
        ...


@dataclass(frozen=True)
class Resumption(Generic[Item]):
    """How a run goes on: the execution computes the iterations from `start`."""

    start: int
    execution: AbstractContextManager[Execution[Item]]


class RunKind(Protocol[Config, Item]):
    """One kind of run, and how this process takes part in it."""

    @property
    def name(self) -> Kind: ...

    @property
    def changeable(self) -> Sequence[str]:
        """Groups of configuration fields that a rerun or a resumed run may change."""
        ...

    @property
    def watcher(self) -> Watcher: ...

    @property
    def ranks(self) -> Ranks: ...

    def load_config(self, path: Path, overrides: Sequence[str] = ()) -> Config:
        """Read a YAML configuration and apply `a.b=c` overrides; raises UserError on anything wrong."""
        ...

    def input_files(self, config: Config) -> Sequence[Path]:
        """The files outside the run folder that the configuration names, with all of a model folder that is read."""
        ...

    def environment(self, config: Config) -> dict[str, Any]:
        """What this process computes with: the content of environment.json."""
        ...

    def begin(self, config: Config, run_dir: Path | None) -> AbstractContextManager[Execution[Item]]:
        """An execution from the first iteration, prepared on entry; without `run_dir` it keeps nothing.

        UserError at once where these processes cannot compute the configuration.
        """
        ...

    def resume(self, config: Config, run_dir: Path, recorded: Manifest) -> Resumption[Item]:
        """An execution that goes on with a recorded run; UserError where it cannot. Changes nothing before entry."""
        ...
