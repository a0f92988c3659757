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
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.files import Kind
from ppo_repro.config.run import RunConfig
from ppo_repro.ranks import Ranks
from ppo_repro.records.manifest import Head, Manifest
from ppo_repro.watcher import Watcher

Config = TypeVar("Config", RunConfig, ControlConfig, DPOConfig)
Config_contra = TypeVar("Config_contra", RunConfig, ControlConfig, DPOConfig, contravariant=True)
Final = dict[str, float | int | str]


class Computed(Protocol):
    """An iteration, whatever else it holds."""

    @property
    def index(self) -> int: ...

    @property
    def seconds(self) -> dict[str, float]: ...  # wall time by phase, of everything since the iteration before


Item = TypeVar("Item", bound=Computed)


@dataclass(frozen=True)
class Ending:
    """What a run ends with."""

    results: Final
    tables: dict[str, pa.Table]  # side tables after the last iteration, by name


class Store(Protocol):
    """Models and checkpoints of a run; each list of files has the SHA-256 of each, as the manifest lists them."""

    def begin(self, files: Mapping[str, str]) -> dict[str, str]: ...  # before the first iteration

    def is_due(self, iteration: int) -> bool: ...  # whether `save` comes after `iteration` iterations

    def save(self, head: Head, link: str) -> dict[str, str]: ...  # the state now; `link`: the last of the chain

    def put_policy(self, folder: Path) -> None: ...  # the policy as it is now

    def finish(self, files: Mapping[str, str], link: str) -> dict[str, str]: ...  # what was trained


class Execution(Protocol[Item]):
    """A run that is prepared: it computes its iterations one by one, and then its final results."""

    @property
    def store(self) -> Store | None: ...

    @property
    def notes(self) -> Mapping[str, Mapping[str, Any]]: ...  # JSON files by name, outside the fingerprint

    def iterations(self) -> Iterator[Item]: ...

    def preparation_tables(self) -> dict[str, pa.Table]: ...  # empty where a resumed run did not prepare again

    def tables(self, item: Item) -> dict[str, pa.Table]: ...  # side tables included

    def progress(self, item: Item) -> str: ...  # what a person sees of an iteration

    def ending(self, clock: Clock) -> Ending: ...  # `clock` gets the phases it takes


@dataclass(frozen=True)
class Resumption(Generic[Item]):
    """How a run goes on: the execution computes the iterations from `start`."""

    start: int
    execution: AbstractContextManager[Execution[Item]]


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

    def environment(self, config: Config_contra) -> dict[str, Any]: ...  # the content of environment.json

    def begin(self, config: Config_contra, run_dir: Path | None) -> AbstractContextManager[Execution[Item]]:
        """An execution from the first iteration, prepared on entry; without `run_dir` it keeps nothing.

        UserError at once where these processes cannot compute the configuration.
        """
        ...

    def again(
        self, config: Config_contra, run_dir: Path, recorded: Manifest
    ) -> AbstractContextManager[Execution[Item]]:
        """An execution of what a run computed, a fork from where it began; it keeps nothing. UserError as for begin."""
        ...

    def resume(self, config: Config_contra, run_dir: Path, recorded: Manifest) -> Resumption[Item]:
        """An execution that goes on with a recorded run; UserError where it cannot. Changes nothing before entry."""
        ...
