"""Keep every response of the runs in one DuckDB table, and read Parquet files of the runs by SQL.

The table is a temporary file with one row per response: its texts, and the columns that filters use. Tokens stay in the
files of the runs.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import duckdb
import pandas as pd

from ppo_repro.analysis.clip_flags import flags_with
from ppo_repro.records import manifest

TIMEOUT_SECONDS = 10.0
# the columns of the table, with their types
RESPONSE_COLUMNS = {
    "run": "integer",  # number of the run
    "iteration": "integer",
    "sequence": "integer",
    "prompt_key": "varchar",
    "sample_index": "integer",
    "prompt": "varchar",
    "response": "varchar",
    "answer": "varchar",
    "score": "double",
    "correct": "boolean",  # null for a response that is neither right nor wrong
    "length": "integer",  # tokens
    "finish": "varchar",
    "mismatch": "double",  # like the field of `ResponseSummary`
    "advantage": "double",  # mean over tokens
    "clipped": "bigint",  # like the field of `ResponseSummary`
}
# The report computes `ResponseSummary` in pandas, because the report needs no DuckDB. This is SQL, because "As Python"
# shows it, and because pandas or Arrow take twice the time to fill the table. DuckDB takes isnan for false, because the
# statistics of a Parquet file leave out NaN
RESPONSES = """select s.iteration, s.sequence, s.prompt_key, s.sample_index, s.prompt, s.response, s.answer,
       s.scores as score, case when {judged} then s.is_correct end as correct,
       s.response_length as length, s.finish_reason as finish,
       coalesce(t.mismatch, 0) as mismatch, t.advantage, coalesce(u.clipped, 0) as clipped
from {sequences} as s
left join (select iteration, sequence, avg(advantages) as advantage,
                  max(if(isfinite(delta), abs(delta), 'infinity'::double)) as mismatch
           from (select *, old_logprobs::double - rollout_logprobs::double as delta from {tokens})
           group by iteration, sequence) as t using (iteration, sequence)
left join (select iteration, sequence, count(*) filter (where clip_flag in ({removed})) as clipped
           from {updates} group by iteration, sequence) as u using (iteration, sequence)"""
# which responses of a run are right or wrong
Judged = Literal["none", "those with an answer", "all"]
JUDGED: Mapping[Judged, str] = {"none": "false", "those with an answer": "s.answer <> ''", "all": "true"}
CREATE = f"create table responses ({', '.join(f'{name} {kind}' for name, kind in RESPONSE_COLUMNS.items())})"
# DuckDB loads no extension: not from the network, and none of another session
CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
}


class Slow(Exception):
    """Error: a query took longer than TIMEOUT_SECONDS."""


def literal(text: str) -> str:
    """Return a text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def parquet_sql(paths: Sequence[str]) -> str:
    """Return the SQL that reads Parquet files; `paths` may have wildcards."""
    return f"read_parquet([{', '.join(map(literal, paths))}], union_by_name = true, hive_partitioning = false)"


def escaped(path: Path) -> str:
    """Return a path for DuckDB, with its wildcards escaped."""
    return re.sub(r"([*?\[])", r"[\1]", str(path))


def responses_sql(tables: Mapping[str, str], judged: Judged) -> str:
    """Return the SQL that reads the responses from the SQL of the tables sequences, tokens and updates."""
    removed = ", ".join(map(literal, flags_with("removed")))
    return RESPONSES.format(**tables, judged=JUDGED[judged], removed=removed)


def run_responses_sql(run_dir: Path, iterations: Sequence[int], judged: Judged) -> str:
    """Return the SQL that reads the responses of the given iterations of a run."""
    tables = {
        name: parquet_sql([escaped(manifest.table_path(run_dir, name, iteration)) for iteration in iterations])
        for name in ("sequences", "tokens", "updates")
    }
    return responses_sql(tables, judged)


class Responses:
    """Table `responses` with one row per response; one thread may change it, and several may read it."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="ppo-repro-view-")
        self._database = duckdb.connect(str(Path(self._folder.name) / "responses.duckdb"), config=CONFIG)
        self._database.execute(CREATE)
        self._cursors = set[Any]()  # each is a separate connection: `interrupt` must reach all

    def insert(self, run: int, run_dir: Path, iterations: Sequence[int], judged: Judged) -> None:
        """Add the responses of the given iterations of a run. Raises duckdb.Error if a file cannot be read."""
        rows = run_responses_sql(run_dir, iterations, judged)
        self._database.execute(f"insert into responses by name select ?::integer as run, * from ({rows})", [run])

    def remove(self, run: int) -> None:
        """Remove the responses of a run."""
        self._database.execute("delete from responses where run = ?", [run])

    def interrupt(self) -> None:
        """End all statements that run now."""
        for connection in (self._database, *tuple(self._cursors)):
            with suppress(duckdb.ConnectionException):  # it was closed just now
                connection.interrupt()

    def close(self) -> None:
        """End all statements, and remove the table."""
        while True:
            self.interrupt()
            try:
                self._database.close()
            except duckdb.ResourceInUseException:  # a statement takes a moment to end
                time.sleep(0.05)
            else:
                break
        self._folder.cleanup()

    @contextmanager
    def cursor(self) -> Iterator[Any]:
        """Yield a cursor without a time limit."""
        cursor = self._database.cursor()
        self._cursors.add(cursor)
        try:
            yield cursor
        finally:
            self._cursors.discard(cursor)
            cursor.close()

    @contextmanager
    def _limited_cursor(self) -> Iterator[Any]:
        """Yield a cursor. Raises Slow after TIMEOUT_SECONDS of a query."""
        with self.cursor() as cursor:
            timer = threading.Timer(TIMEOUT_SECONDS, cursor.interrupt)
            timer.start()
            try:
                yield cursor
            except duckdb.InterruptException as error:
                raise Slow from error
            finally:
                timer.cancel()

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
