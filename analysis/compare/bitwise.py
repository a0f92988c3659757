"""Are two runs the same to the last bit? The digests of their manifests say so; files are read to find a difference."""

from __future__ import annotations

from pathlib import Path

from analysis.compare.rows import Row
from ppo_repro.errors import UserError
from ppo_repro.records import digests, reader
from ppo_repro.records.diff import first_difference
from ppo_repro.records.manifest import Manifest, tables_of


def manifests(run_a: Path | str, run_b: Path | str) -> tuple[Manifest, Manifest]:
    """Both manifests; raises UserError if a run is incomplete or damaged, or if the kinds differ."""
    a, b = (reader.open_manifest(run) for run in (run_a, run_b))
    if a.kind != b.kind:
        raise UserError(f"{run_a} is a {a.kind} run, {run_b} a {b.kind} run; compare runs of one kind")
    return a, b


def bitwise_rows(run_a: Path | str, run_b: Path | str) -> list[Row]:
    """The fingerprint, the final results, and for each table the share of common iterations with equal digests."""
    a, b = manifests(run_a, run_b)
    method = "SHA-256 of the values"
    same, iterations = a.fingerprint == b.fingerprint, max(len(a.iterations), len(b.iterations))
    where = "identical" if same else "different"
    if not same and (first := first_difference(run_a, run_b)):
        where += f": {first.describe()}"
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
