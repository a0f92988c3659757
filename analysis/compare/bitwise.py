"""Are two runs the same to the last bit? The digests of their manifests say so; files are read to find a difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from analysis.compare.rows import Row
from ppo_repro.errors import UserError
from ppo_repro.records import digests, reader, schema
from ppo_repro.records.iteration_log import TableEntry
from ppo_repro.records.manifest import Manifest, side_tables_of, table_path, tables_of


@dataclass(frozen=True)
class FirstDifference:
    """Where the data of two runs first differ; `ppo-repro diff A B` names the row and both values."""

    iteration: int | None  # None before the first one
    table: str
    column: str  # "(rows)" where the number of rows differs

    def describe(self) -> str:
        """In words."""
        start = "the preparation" if self.iteration is None else f"iteration {self.iteration}"
        return f"{start}, {self.table}.{self.column}"


def manifests(run_a: Path | str, run_b: Path | str, allow_incomplete: bool = False) -> tuple[Manifest, Manifest]:
    """Both manifests; raises UserError where a run is incomplete or damaged, or where the kinds differ."""
    a, b = (reader.open_manifest(run, allow_incomplete) for run in (run_a, run_b))
    if a.kind != b.kind:
        raise UserError(f"{run_a} is a {a.kind} run, {run_b} a {b.kind} run; compare runs of one kind")
    return a, b


def first_difference(run_a: Path | str, run_b: Path | str, allow_incomplete: bool = False) -> FirstDifference | None:
    """The first iteration, table and column, in the order of computation; None where no digest differs.

    Compares what came before the first iteration and the iterations that both have: of these the tables that both
    have, and the columns that are in the digest of a table. Of the others, those above level `lean`, `ppo-repro diff`
    may name an earlier one. Raises UserError on damaged records.
    """
    a, b = manifests(run_a, run_b, allow_incomplete)
    tables = (*side_tables_of(a), *tables_of(a))
    for (iteration, listed_a), (_, listed_b) in zip(_listed(a), _listed(b), strict=False):
        for table in tables:
            if table.name not in listed_a or table.name not in listed_b:
                continue
            entries = listed_a[table.name], listed_b[table.name]
            if entries[0].digest == entries[1].digest:
                continue
            if entries[0].rows != entries[1].rows:
                return FirstDifference(iteration, table.name, "(rows)")
            data = [
                reader.read_file(table_path(Path(run), table.name, iteration), table, entry, verify=True)
                for run, entry in zip((run_a, run_b), entries, strict=True)
            ]
            for column in table.columns:
                if column.in_fingerprint and _column_digest(column, data[0]) != _column_digest(column, data[1]):
                    return FirstDifference(iteration, table.name, column.name)
    return None


def _listed(recorded: Manifest) -> Iterator[tuple[int | None, Mapping[str, TableEntry]]]:
    """The tables of the preparation, then those of every iteration."""
    yield None, recorded.preparation
    for entry in recorded.iterations:
        yield entry.iteration, {**entry.beside, **entry.tables}


def _column_digest(column: schema.Column, data: pa.Table) -> bytes:
    return digests.column_digest(column.kind, data.column(column.name), nullable=column.nullable)


def bitwise_rows(run_a: Path | str, run_b: Path | str) -> list[Row]:
    """The fingerprint, the final results, and for each table the share of common iterations with equal digests."""
    a, b = manifests(run_a, run_b)
    method = "SHA-256 of the values"
    same, iterations = a.fingerprint == b.fingerprint, max(len(a.iterations), len(b.iterations))
    first = None if same else first_difference(run_a, run_b)
    where = "identical" if same else "different"
    if first is not None:
        where += f" from {first.describe()} on"
    elif len(a.iterations) != len(b.iterations):
        where += f": {len(a.iterations)} and {len(b.iterations)} iterations"
    rows = [Row("bitwise", "fingerprint", float(same), iterations, "chained " + method, verdict=where)]
    pairs = list(zip(a.iterations, b.iterations, strict=False))
    for table in tables_of(a):
        equal = sum(
            entry_a.tables[table.name].digest == entry_b.tables[table.name].digest for entry_a, entry_b in pairs
        )
        verdict = "identical" if equal == iterations else "different"
        share = equal / iterations if iterations else float("nan")
        rows.append(Row("bitwise", table.name, share, iterations, f"share of iterations, {method}", verdict=verdict))
    names = sorted({*a.final, *b.final})
    equal = sum(
        name in a.final
        and name in b.final
        and digests.scalar_digest(a.final[name]) == digests.scalar_digest(b.final[name])
        for name in names
    )
    verdict = "identical" if equal == len(names) else "different"
    share = equal / len(names) if names else float("nan")
    rows.append(Row("bitwise", "final", share, len(names), f"share of results, {method}", verdict=verdict))
    return rows
