"""Follow the runs: fill the table of all responses while runs write them, and know the state and label of each run."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import duckdb

from ppo_repro.analysis.tokenization.recorded_tokenizer import RecordedTokenizer, load_tokenizer, tokenizer_path
from ppo_repro.analysis.view.database import Judged, Responses
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import MANIFEST, folders_with
from ppo_repro.base.output import one_line, say
from ppo_repro.config.tasks import RewardConfig, Verifier
from ppo_repro.records import manifest
from ppo_repro.records.changes import Setup, setup_of
from ppo_repro.records.folder import ENVIRONMENT_NAME, load_recorded_config
from ppo_repro.records.label import UNLABELLED, Label, read_label
from ppo_repro.records.manifest import Head
from ppo_repro.records.notes import resumed_notes
from ppo_repro.records.run_state import state_of
from ppo_repro.records.settings import Setting, settings_of

BATCH = 64  # iterations read at once
LOOK_SECONDS = 1.0  # between two looks at the runs


@dataclass(frozen=True)
class LoadedTokenizer:
    """The tokenizer of a run, with the time at which its file was changed."""

    changed_ns: int
    tokenizer: RecordedTokenizer


@dataclass
class IndexedRun:
    """One run: `read` counts the iterations that were read into the table; `damaged` has a line for each failure."""

    number: int  # in the table
    folder: Path
    name: str  # of the folder
    head: Head
    state: str
    label: Label
    setup: Setup
    judged: Judged
    read: int = 0
    is_gone: bool = False  # its folder was removed
    damaged: dict[int, str] = field(default_factory=dict)  # by iteration
    loaded_tokenizer: LoadedTokenizer | None = None  # after the first prompt

    def tokenizer(self) -> RecordedTokenizer | None:
        """Return the tokenizer of the run, loaded once until its file changes; None if the run has none yet."""
        path = tokenizer_path(self.folder)
        if path is None:
            return None
        loaded = self.loaded_tokenizer
        changed_ns = path.stat().st_mtime_ns
        if loaded is None or loaded.changed_ns != changed_ns:  # another run may have the folder now
            loaded = self.loaded_tokenizer = LoadedTokenizer(changed_ns, load_tokenizer(path))
        return loaded.tokenizer


def judged_by(reward: RewardConfig) -> Judged:
    """Return which responses the terms of a reward judge right or wrong."""
    if not reward.judges:
        return "none"
    return "all" if any(isinstance(term, Verifier) for term in reward.terms) else "those with an answer"


def _setup(folder: Path, head: Head) -> tuple[Setup, Judged]:
    """Return the setup of a run, and which of its responses are right or wrong.

    Raises UserError if config.yaml is damaged.
    """
    return setup_of(folder, head), judged_by(load_recorded_config(folder).reward)


def _writers(head: Head) -> list[str | None]:
    """Return the digests of the notes in which the processes that wrote a run say when they began."""
    return [head.notes.get(name) for name in (ENVIRONMENT_NAME, *resumed_notes(head))]


class Index:
    """The language runs in and below `targets`, and the table of their responses; `version` changes with runs or table.

    `runs` has the runs by their number in the table, removed runs too, so that no number changes its run. `failure` is
    one line about the error of the last look at the runs, "" without an error.
    """

    def __init__(self, targets: Sequence[Path]) -> None:
        self.targets = targets
        self.runs = list[IndexedRun]()
        self.version = 0
        self.others = 0  # folders of runs without responses, or that cannot be read
        self.failure = ""
        self._described: tuple[list[Setup], list[Setting]] = [], []  # the settings of these setups
        self.responses = Responses()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def start(self) -> None:
        """Start a thread that reads all iterations, and later iterations when they are complete."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and remove the table."""
        self._ended.set()
        while self._thread.is_alive():
            self.responses.interrupt()  # again, because a statement may begin after the first time
            self._thread.join(0.1)
        self.responses.close()

    def present(self) -> list[IndexedRun]:
        """Return the runs that were not removed."""
        return [run for run in self.runs if not run.is_gone]

    def settings(self) -> list[tuple[IndexedRun, Setting]]:
        """Return each present run with its setting: its values of the fields in which runs differ."""
        runs = self.present()
        setups = [run.setup for run in runs]
        described = self._described
        if described[0] != setups:
            described = self._described = setups, settings_of(setups)
        return list(zip(runs, described[1], strict=True))

    def look(self) -> None:
        """Read the complete iterations that are not in the table; `damaged` gets the iterations that cannot be read."""
        folders = list(self._folders())
        for run in self.present():
            if run.folder not in folders:
                run.is_gone = True
                self._clear(run)
        known = {run.folder: run for run in self.present()}
        seen = [self._updated(folder, known.get(folder)) for folder in folders]
        self.others = seen.count(None)

    def _follow(self) -> None:
        while not self._ended.is_set():
            try:
                self.look()
                self.failure = ""
            except Exception as error:  # whatever it is, the page must say that its rows may be old
                self._failed(f"the responses may be old: {type(error).__name__}: {one_line(error)}")
            self._ended.wait(LOOK_SECONDS)

    def _failed(self, failure: str) -> None:
        if failure != self.failure and not self._ended.is_set():  # `close` interrupts what the thread reads
            self.failure = failure
            say(f"view: {failure}")

    def _folders(self) -> Iterator[Path]:
        folders = dict[Path, Path]()  # targets may overlap
        for target in self.targets:
            for folder in sorted(folders_with(target, MANIFEST)):
                folders.setdefault(folder.resolve(), folder)
        yield from folders.values()

    def _updated(self, folder: Path, known: IndexedRun | None) -> IndexedRun | None:
        """Return the run of a folder after reading what is new of it; None if it has no responses that can be read."""
        try:
            head, label = manifest.load_head(folder), read_label(folder)
            if not manifest.has_responses(head):
                return None
            run = known or self._added(folder, head)
            if _writers(head) != _writers(run.head) or head.num_iterations < run.read:
                run.setup, run.judged = _setup(folder, head)  # another run or process has the folder now
                self._clear(run)
        except UserError:  # just being made, or damaged: `ppo-repro verify` says which
            return None
        state = state_of(folder, head.status)
        if (run.state, run.head.num_iterations, run.label) != (state, head.num_iterations, label):
            self.version += 1
        run.head, run.state, run.label = head, state, label
        self._read(run)
        return run

    def _added(self, folder: Path, head: Head) -> IndexedRun:
        setup, judged = _setup(folder, head)
        run = IndexedRun(
            number=len(self.runs),
            folder=folder,
            name=self._name(folder),
            head=head,
            state="",
            label=UNLABELLED,
            setup=setup,
            judged=judged,
        )
        self.runs.append(run)
        return run

    def _name(self, folder: Path) -> str:
        base = next(target for target in self.targets if folder.is_relative_to(target))
        return folder.name if folder == base else str(folder.relative_to(base))

    def _clear(self, run: IndexedRun) -> None:
        """Remove the responses of a run from the table."""
        self.responses.remove(run.number)
        run.read = 0
        run.damaged = {}
        self.version += 1

    def _read(self, run: IndexedRun) -> None:
        while run.read < run.head.num_iterations and not self._ended.is_set():
            batch = range(run.read, min(run.read + BATCH, run.head.num_iterations))
            try:
                self.responses.insert(run.number, run.folder, batch, run.judged)
            except duckdb.Error:
                for iteration in batch:  # find the iterations that cannot be read
                    if self._ended.is_set():
                        return
                    try:
                        self.responses.insert(run.number, run.folder, [iteration], run.judged)
                    except duckdb.Error as error:
                        line = f"{run.name}: iteration {iteration}: {str(error).splitlines()[0]}"
                        run.damaged = run.damaged | {iteration: line}  # the server's threads may read the old one
            run.read = batch[-1] + 1
            self.version += 1
