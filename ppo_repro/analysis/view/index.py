"""Maintain one DuckDB table with every response of the runs, filled from Parquet files while runs write them.

The table is a temporary file with one row per response: its texts, and the columns that filters use. Tokens stay in the
files of the runs.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import pandas as pd

from ppo_repro.analysis.html import token_data
from ppo_repro.analysis.tokenization.recorded_tokenizer import PATHS, load_tokenizer
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import MANIFEST, folders_with
from ppo_repro.base.output import one_line, say
from ppo_repro.records import manifest
from ppo_repro.records.folder import ENVIRONMENT_NAME, load_recorded_config
from ppo_repro.records.label import UNLABELLED, Label, read_label
from ppo_repro.records.listing import state_of
from ppo_repro.records.manifest import Head
from ppo_repro.records.notes import resumed_notes
from ppo_repro.records.settings import Setting, Setup, settings_of, setup_of

BATCH = 64  # iterations read at once
LOOK_SECONDS = 1.0  # between two looks at the runs
TIMEOUT_SECONDS = 10.0
# one row per response; `mismatch` in nats, `advantage` the mean over the tokens, `clipped` in token updates
RESPONSES = """select s.iteration, s.sequence, s.prompt_key, s.sample_index, s.prompt, s.response, s.answer,
       s.scores as score, s.is_correct as correct, s.response_length as length, s.finish_reason as finish,
       t.mismatch, t.advantage, coalesce(u.clipped, 0) as clipped
from {sequences} as s
left join (select iteration, sequence, avg(advantages) as advantage,
                  max(abs(old_logprobs::double - rollout_logprobs::double)) as mismatch
           from {tokens} group by iteration, sequence) as t using (iteration, sequence)
left join (select iteration, sequence, count(*) filter (where starts_with(clip_flag, 'clip_')) as clipped
           from {updates} group by iteration, sequence) as u using (iteration, sequence)"""
CREATE = """create table responses (
    run integer, iteration integer, sequence integer, prompt_key varchar, sample_index integer, prompt varchar,
    response varchar, answer varchar, score double, correct boolean, length integer, finish varchar, mismatch double,
    advantage double, clipped bigint)"""
# DuckDB loads no extension: not from the network, and none of another session
CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
}


class Slow(Exception):
    """Error: a query took longer than TIMEOUT_SECONDS."""


@dataclass
class Run:
    """One run: `read` has its iterations in the table, and `damaged` the iterations that could not be read."""

    number: int  # in the table
    folder: Path
    name: str  # of the folder
    head: Head
    state: str
    label: Label
    setup: Setup
    is_judged: bool  # whether responses are right or wrong
    read: int = 0
    is_gone: bool = False  # its folder was removed
    damaged: list[str] = field(default_factory=list)


def _setup(folder: Path, head: Head) -> tuple[Setup, bool]:
    """Return the setup of a run, and whether its reward judges responses right or wrong.

    Raises UserError if config.yaml is damaged.
    """
    return setup_of(folder, head), load_recorded_config(folder).reward.judges


def _writers(head: Head) -> list[str | None]:
    """Return the digests of the notes in which the processes that wrote a run say when they began."""
    return [head.notes.get(name) for name in (ENVIRONMENT_NAME, *resumed_notes(head))]


def literal(text: str) -> str:
    """Return a text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def source(paths: Sequence[str]) -> str:
    """Return the SQL that reads some Parquet files."""
    return f"read_parquet([{', '.join(map(literal, paths))}], union_by_name = true, hive_partitioning = false)"


def pattern(path: Path) -> str:
    """Return a path for DuckDB with escaped wildcards."""
    return re.sub(r"([*?\[])", r"[\1]", str(path))


def responses_of(run_dir: Path, iterations: Sequence[int]) -> str:
    """Return the SQL that reads the responses of some iterations."""
    files = {
        name: source([pattern(manifest.table_path(run_dir, name, iteration)) for iteration in iterations])
        for name in ("sequences", "tokens", "updates")
    }
    return RESPONSES.format(**files)


class Index:
    """Table of the responses of all language runs in and below `targets`; `version` changes whenever the table does.

    `runs` has the runs by their number in the table, removed runs too, so that no number changes its run. `failure` is
    one line about the error of the last look at the runs, "" without an error.
    """

    def __init__(self, targets: Sequence[Path]) -> None:
        self.targets, self.runs, self.version, self.others, self.failure = targets, list[Run](), 0, 0, ""
        self._described: tuple[list[Setup], list[Setting]] = [], []
        self._folder = TemporaryDirectory(prefix="ppo-repro-view-")
        self._database = duckdb.connect(str(Path(self._folder.name) / "responses.duckdb"), config=CONFIG)
        self._database.execute(CREATE)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def start(self) -> None:
        """Start a thread that reads all iterations, and later iterations when they are complete."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and remove the table."""
        self._ended.set()
        self._database.interrupt()
        if self._thread.is_alive():
            self._thread.join()
        self._database.close()
        self._folder.cleanup()

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

    def look(self) -> None:
        """Read the complete iterations that are not in the table; `damaged` gets the iterations that cannot be read."""
        folders = list(self._folders())
        for run in self.present():
            if run.folder not in folders:
                run.is_gone = True
                self._clear(run)
        known = {run.folder: run for run in self.present()}
        self.others = 0
        for folder in folders:
            try:
                head, label = manifest.load_head(folder), read_label(folder)
                if not manifest.has_responses(head):
                    self.others += 1
                    continue
                run = known.get(folder) or self._added(folder, head)
                if _writers(head) != _writers(run.head) or head.num_iterations < run.read:
                    run.setup, run.is_judged = _setup(folder, head)  # another run or process has the folder now
                    self._clear(run)
            except UserError:  # just being made, or damaged: `ppo-repro verify` says which
                self.others += 1
                continue
            state = state_of(folder, head.status)
            if (run.state, run.head.num_iterations, run.label) != (state, head.num_iterations, label):
                self.version += 1
            run.head, run.state, run.label = head, state, label
            self._read(run)

    def present(self) -> list[Run]:
        """Return the runs that were not removed."""
        return [run for run in self.runs if not run.is_gone]

    def settings(self) -> list[tuple[Run, Setting]]:
        """Return each present run with its setting: its values of the fields in which runs differ."""
        runs = self.present()
        setups, described = [run.setup for run in runs], self._described
        if described[0] != setups:
            described = self._described = setups, settings_of(setups)
        return list(zip(runs, described[1], strict=True))

    def _added(self, folder: Path, head: Head) -> Run:
        run = Run(len(self.runs), folder, self._name(folder), head, "", UNLABELLED, *_setup(folder, head))
        self.runs.append(run)
        return run

    def _folders(self) -> Iterator[Path]:
        found = dict[Path, Path]()  # targets may overlap
        for target in self.targets:
            for folder in sorted(folders_with(target, MANIFEST)):
                found.setdefault(folder.resolve(), folder)
        yield from found.values()

    def _name(self, folder: Path) -> str:
        base = next(target for target in self.targets if folder.is_relative_to(target))
        return folder.name if folder == base else str(folder.relative_to(base))

    def _clear(self, run: Run) -> None:
        """Remove the responses of a run from the table."""
        self._database.cursor().execute("delete from responses where run = ?", [run.number])
        run.read, run.damaged = 0, []
        self.version += 1

    def _read(self, run: Run) -> None:
        while run.read < run.head.num_iterations and not self._ended.is_set():
            batch = range(run.read, min(run.read + BATCH, run.head.num_iterations))
            try:
                self._insert(run, batch)
            except duckdb.Error:
                for iteration in batch:  # find the iterations that cannot be read
                    try:
                        self._insert(run, [iteration])
                    except duckdb.Error as error:
                        run.damaged.append(f"{run.name}: iteration {iteration}: {str(error).splitlines()[0]}")
            run.read = batch[-1] + 1
            self.version += 1

    def _insert(self, run: Run, iterations: Sequence[int]) -> None:
        query = f"insert into responses select ?, * from ({responses_of(run.folder, iterations)})"
        self._database.cursor().execute(query, [run.number])

    @contextmanager
    def _limited_cursor(self) -> Iterator[Any]:
        """Yield a cursor. Raises Slow after TIMEOUT_SECONDS of a query."""
        cursor = self._database.cursor()
        timer = threading.Timer(TIMEOUT_SECONDS, cursor.interrupt)
        timer.start()
        try:
            yield cursor
        except duckdb.InterruptException as error:
            raise Slow from error
        finally:
            timer.cancel()
            cursor.close()

    def cursor(self) -> Any:
        """Return a cursor without a time limit."""
        return self._database.cursor()

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Return the rows of a query as dicts by column. Raises Slow after TIMEOUT_SECONDS."""
        with self._limited_cursor() as cursor:
            cursor.execute(query, list(values))
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def frame(self, query: str, values: Sequence[Any] = ()) -> pd.DataFrame:
        """Return the rows of a query as a pandas frame. Raises Slow after TIMEOUT_SECONDS."""
        with self._limited_cursor() as cursor:
            return pd.DataFrame(cursor.execute(query, list(values)).df())

    def tokens_of(self, run: Run, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data of the token view for one row of the table.

        Raises UserError if the run's files cannot be read.
        """
        about = {"sequence": row["sequence"], "max_abs_delta": row["mismatch"], "clipped": row["clipped"], "why": []}

        def rows_of(name: str) -> pd.DataFrame:
            file = source([pattern(manifest.table_path(run.folder, name, row["iteration"]))])
            try:
                return self.frame(f"select * from {file} where sequence = ?", [row["sequence"]])
            except duckdb.Error as error:
                raise UserError(f"{run.name}: {str(error).splitlines()[0]}; the file was changed or damaged") from error

        tables = rows_of("sequences"), rows_of("tokens"), rows_of("updates")
        where = f"{run.name}: iteration {row['iteration']}"
        return token_data.described(token_data.responses_of(*tables, pd.DataFrame([about]), where))

    def rendered(self, run: Run, iteration: int, sequence: int) -> str | None:
        """Return the prompt decoded from its tokens, with special tokens; None if the run has no tokenizer yet."""
        path = next((run.folder / name for name in PATHS if (run.folder / name).is_file()), None)
        file = source([pattern(manifest.table_path(run.folder, "sequences", iteration))])
        found = self.rows(f"select prompt_ids from {file} where sequence = ?", [sequence])
        if path is None or not found:
            return None
        return load_tokenizer(path).decode_all(found[0]["prompt_ids"])
