"""Convert the page's requests to parametrised SQL over the table of `database`: filters, order, page, snippet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppo_repro.analysis.view.database import literal, pattern, responses_in, source
from ppo_repro.analysis.view.index import IndexedRun
from ppo_repro.base.errors import UserError
from ppo_repro.records import manifest

PAGE = 50  # responses
LARGEST_PAGE = 1000
NUMBERS = ("score", "length", "mismatch", "clipped", "advantage", "iteration")
RESPONSE_COLUMNS = (
    "run", "iteration", "sequence", "prompt_key", "sample_index", "prompt", "response", "answer", "score", "correct",
    "length", "finish", "mismatch", "advantage", "clipped",
)  # fmt: skip
# by name of the parameter: the condition on a response
TEXTS = {
    "text": "contains(lower(response), lower(?))",
    "prompt": "contains(lower(prompt), lower(?))",
    "prompt_key": "prompt_key = ?",
    "finish": "finish = ?",
}
CHOICES: dict[str, dict[str, Any]] = {"correct": {"yes": True, "no": False}, "order": {"asc": "asc", "desc": "desc"}}
_PARAMETERS = {*TEXTS, *CHOICES, *(f"{name}_{end}" for name in NUMBERS for end in ("min", "max"))}
_PARAMETERS |= {"run", "sort", "offset", "limit", "token"}


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
        ordered = f"order by sorted_by {self.order}, run, iteration, sequence"
        # sorts few columns; the other columns of the page are read by rowid
        return f"""with matched as materialized (
                select rowid as id, run, iteration, sequence, score, correct, {self.sort} as sorted_by
                from responses where {self.where}),
            whole as (select count(*) as total, avg(score) as score, avg(correct::int) as correct,
                coalesce(list(distinct run), []) as runs from matched),
            page as (select id, run, iteration, sequence, sorted_by from matched {ordered}
                limit {self.limit} offset {self.offset})
            select id, total, score, correct, runs from whole left join page on true {ordered}"""

    def everything(self) -> str:
        """Return SQL for all rows in order."""
        return f"select {', '.join(RESPONSE_COLUMNS)} from responses where {self.where} order by {self.ordered}"

    @property
    def ordered(self) -> str:
        """Return the SQL of the order of rows in the table `responses`, whose column `run` has the runs' numbers."""
        return f"responses.{self.sort} {self.order}, responses.run, responses.iteration, responses.sequence"


def parsed(asked: Mapping[str, str], runs: int) -> Query:
    """Return the query of a request's parameters. Raises UserError for the first wrong parameter."""
    for name in asked:
        if name not in _PARAMETERS:
            raise UserError(f"{name}: is no filter; there are {', '.join(sorted(_PARAMETERS - {'token'}))}")
    parameters = {name: value for name, value in asked.items() if value != ""}
    conditions: list[tuple[str, Any]] = [(sql, parameters[name]) for name, sql in TEXTS.items() if name in parameters]
    for name in NUMBERS:
        for end, sign in (("min", ">="), ("max", "<=")):
            if f"{name}_{end}" in parameters:
                conditions.append((f"{name} {sign} ?", _number(f"{name}_{end}", parameters[f"{name}_{end}"])))
    if "correct" in parameters:
        conditions.append(("correct = ?", _choice(parameters, "correct")))
    run = _count(parameters, "run", 0, runs - 1) if "run" in parameters else None
    if run is not None:
        conditions.append(("responses.run = ?", run))  # the number, not the name
    sort = parameters.get("sort", "iteration")
    if sort not in RESPONSE_COLUMNS:
        raise UserError(f"sort = {sort}: must be one of {', '.join(RESPONSE_COLUMNS)}")
    order = _choice(parameters, "order") if "order" in parameters else "desc"
    return Query(
        " and ".join(sql for sql, _ in conditions) or "true",
        tuple(value for _, value in conditions),
        sort,
        f"{order} nulls last",
        _count(parameters, "offset", 0, 10**9) if "offset" in parameters else 0,
        _count(parameters, "limit", 1, LARGEST_PAGE) if "limit" in parameters else PAGE,
        run,
    )


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{name} = {text[:100]}: must be a finite number")
    return value


def _count(parameters: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = parameters[name]
    if not (text.isascii() and text.isdecimal() and len(text) < 12 and least <= int(text) <= most):
        raise UserError(f"{name} = {text[:100]}: must be a whole number from {least} to {most}")
    return int(text)


def _choice(parameters: Mapping[str, str], name: str) -> Any:
    if parameters[name] not in CHOICES[name]:
        raise UserError(f"{name} = {parameters[name][:100]}: must be {' or '.join(CHOICES[name])}")
    return CHOICES[name][parameters[name]]


def response_key(asked: Mapping[str, str], runs: int) -> tuple[int, int, int]:
    """Return run, iteration and sequence of a request's parameters. Raises UserError unless they are valid numbers."""
    names = {"run": runs - 1, "iteration": 2**31 - 1, "sequence": 2**31 - 1}
    run, iteration, sequence = (_count({name: asked.get(name, "")}, name, 0, most) for name, most in names.items())
    return run, iteration, sequence


def snippet(query: Query, runs: Sequence[IndexedRun]) -> str:
    """Return Python code that finds the same responses in the Parquet files, with duckdb and pandas alone.

    Raises UserError if there is no run, or no iteration that can be read.
    """
    asked = [run for run in runs if query.run in (None, run.number)]
    chosen = [run for run in asked if not run.damaged or len(run.damaged) < run.read]
    if not chosen:
        raise UserError("there is no run now, so there is nothing to find")
    parts = []
    for run in chosen:
        files = {name: source(_files(run, name)) for name in ("sequences", "tokens", "updates")}
        table = responses_in(files, run.judged)
        names = f"{run.number} as run, {literal(run.name)} as name"
        parts.append(f"select {names}, * from (\n{table}\n) where iteration < {run.read}")
    table = "\nunion all\n".join(parts)
    found = "select name as run, * exclude (run, name) from responses"
    sql = f"with responses as (\n{table}\n)\n{found}\nwhere {query.where}\norder by {query.ordered}"
    text = sql.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    call = f'duckdb.execute(\n    """\n{text}\n""",\n    {list(query.values)!r},\n).df()'
    return f"import duckdb\n\nfound = {call}  # a pandas frame\n"


def _files(run: IndexedRun, table: str) -> list[str]:
    """Return patterns of a table's files; with damaged iterations, each file that the page has read."""
    folder = run.folder.resolve()
    if not run.damaged:
        return [f"{pattern(folder / 'records' / table)}/iteration=*.parquet"]
    read = (iteration for iteration in range(run.read) if iteration not in run.damaged)
    return [pattern(manifest.table_path(folder, table, iteration)) for iteration in read]
