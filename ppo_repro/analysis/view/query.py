"""Convert the page's requests to parametrised SQL over the table of `database`: filters, order, page, snippet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ppo_repro.analysis.view.database import RESPONSE_COLUMNS, escaped, literal, parquet_sql, responses_sql
from ppo_repro.analysis.view.index import IndexedRun
from ppo_repro.base.errors import UserError
from ppo_repro.records import manifest

PAGE = 50  # responses
LARGEST_PAGE = 1000
NUMBERS = ("score", "length", "mismatch", "clipped", "advantage", "iteration")  # the numbers of LIST_COLUMNS in list.js
# by name of the parameter: the condition on a response
TEXTS = {
    "text": "contains(lower(response), lower(?))",
    "prompt": "contains(lower(prompt), lower(?))",
    "prompt_key": "prompt_key = ?",
    "finish": "finish = ?",
}
RANGES = {f"{name}_{end}": f"{name} {sign} ?" for name in NUMBERS for end, sign in (("min", ">="), ("max", "<="))}
FILTERS = {*TEXTS, *RANGES, "correct", "run", "sort", "order", "offset", "limit"}


@dataclass(frozen=True)
class Query:
    """Request of the page; `where` has a `?` for each of `values`; `run` is a run's number, or None for all."""

    where: str
    values: tuple[Any, ...]
    sort: str  # one of RESPONSE_COLUMNS
    order: str  # desc or asc, with the place of nulls
    offset: int
    limit: int
    run: int | None

    def page(self) -> str:
        """Return SQL for the rowids of a page; each row also has count, mean score, right share and runs of all."""
        sorted_page = f"order by sorted_by {self.order}, run, iteration, sequence"
        # sorts few columns; the other columns of the page are read by rowid
        return f"""with matched as materialized (
                select rowid as id, run, iteration, sequence, score, correct, {self.sort} as sorted_by
                from responses where {self.where}),
            whole as (select count(*) as total, avg(score) as score, avg(correct::int) as correct,
                coalesce(list(distinct run), []) as runs from matched),
            page as (select id, run, iteration, sequence, sorted_by from matched {sorted_page}
                limit {self.limit} offset {self.offset})
            select id, total, score, correct, runs from whole left join page on true {sorted_page}"""

    def everything(self) -> str:
        """Return SQL for all rows in order."""
        return f"select {', '.join(RESPONSE_COLUMNS)} from responses where {self.where} order by {self.sort_keys}"

    @property
    def sort_keys(self) -> str:
        """Return the SQL of the order of rows in the table `responses`, whose column `run` has the runs' numbers."""
        return f"responses.{self.sort} {self.order}, responses.run, responses.iteration, responses.sequence"


class ResponseKey(NamedTuple):
    """The place of a response: `run` is the run's number."""

    run: int
    iteration: int
    sequence: int


def parsed(parameters: Mapping[str, str], run_count: int) -> Query:
    """Return the query of a request's parameters. Raises UserError for the first wrong parameter."""
    for name in parameters:
        if name not in FILTERS | {"token"}:
            raise UserError(f"{name}: is no filter; there are {', '.join(sorted(FILTERS))}")
    given = {name: value for name, value in parameters.items() if value != ""}
    conditions: list[tuple[str, Any]] = [(sql, given[name]) for name, sql in TEXTS.items() if name in given]
    conditions += [(sql, _number(name, given[name])) for name, sql in RANGES.items() if name in given]
    if "correct" in given:
        conditions.append(("correct = ?", _choice("correct", given["correct"], ("yes", "no")) == "yes"))
    run = _count("run", given["run"], 0, run_count - 1) if "run" in given else None
    if run is not None:
        conditions.append(("responses.run = ?", run))  # the number, not the name
    sort = given.get("sort", "iteration")
    if sort not in RESPONSE_COLUMNS:
        raise UserError(f"sort = {sort}: must be one of {', '.join(RESPONSE_COLUMNS)}")
    order = _choice("order", given.get("order", "desc"), ("asc", "desc"))
    return Query(
        where=" and ".join(sql for sql, _ in conditions) or "true",
        values=tuple(value for _, value in conditions),
        sort=sort,
        order=f"{order} nulls last",
        offset=_count("offset", given.get("offset", "0"), 0, 10**9),
        limit=_count("limit", given.get("limit", str(PAGE)), 1, LARGEST_PAGE),
        run=run,
    )


def response_key(parameters: Mapping[str, str], run_count: int) -> ResponseKey:
    """Return the place that a request's parameters name. Raises UserError unless they are valid numbers."""
    return ResponseKey(
        run=_count("run", parameters.get("run", ""), 0, run_count - 1),
        iteration=_count("iteration", parameters.get("iteration", ""), 0, 2**31 - 1),
        sequence=_count("sequence", parameters.get("sequence", ""), 0, 2**31 - 1),
    )


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{name} = {text[:100]}: must be a finite number")
    return value


def _count(name: str, text: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 12 and least <= int(text) <= most):
        raise UserError(f"{name} = {text[:100]}: must be a whole number from {least} to {most}")
    return int(text)


def _choice(name: str, text: str, choices: Sequence[str]) -> str:
    if text not in choices:
        raise UserError(f"{name} = {text[:100]}: must be {' or '.join(choices)}")
    return text


def snippet(query: Query, runs: Sequence[IndexedRun]) -> str:
    """Return Python code that finds the same responses in the Parquet files, with duckdb and pandas alone.

    Raises UserError if there is no run, or no iteration that can be read.
    """
    searched = [run for run in runs if query.run in (None, run.number)]
    readable = [run for run in searched if not run.damaged or len(run.damaged) < run.read]
    if not readable:
        raise UserError("there is no run now, so there is nothing to find")
    table = "\nunion all\n".join(map(_run_sql, readable))
    columns = "select name as run, * exclude (run, name) from responses"
    sql = f"with responses as (\n{table}\n)\n{columns}\nwhere {query.where}\norder by {query.sort_keys}"
    text = sql.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    call = f'duckdb.execute(\n    """\n{text}\n""",\n    {list(query.values)!r},\n).df()'
    return f"import duckdb\n\nfound = {call}  # a pandas frame\n"


def _run_sql(run: IndexedRun) -> str:
    """Return the SQL that reads the responses of a run that the page has read, with its number and name."""
    files = {table: parquet_sql(_files(run, table)) for table in ("sequences", "tokens", "updates")}
    names = f"{run.number} as run, {literal(run.name)} as name"
    return f"select {names}, * from (\n{responses_sql(files, run.judged)}\n) where iteration < {run.read}"


def _files(run: IndexedRun, table: str) -> list[str]:
    """Return patterns of a table's files; with damaged iterations, each file that the page has read."""
    folder = run.folder.resolve()
    if not run.damaged:
        return [f"{escaped(folder / 'records' / table)}/iteration=*.parquet"]
    read = (iteration for iteration in range(run.read) if iteration not in run.damaged)
    return [escaped(manifest.table_path(folder, table, iteration)) for iteration in read]
