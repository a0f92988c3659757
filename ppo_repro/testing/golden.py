"""Assert that a run has the numbers of a golden run. Never imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import atomic_write
from ppo_repro.records import reader
from ppo_repro.records.folder import ENVIRONMENT_NAME
from ppo_repro.records.manifest import recorded_tables, side_tables_of
from ppo_repro.records.notes import read_note

# the parts of an environment that can change a rounding; no paths, no names of machines
ENVIRONMENT = ("ppo_repro", "python", "machine", "cpu_capability", "numerics_mode", "threads", "processes")


class Golden(BaseModel):
    """Digests of a golden run: of each table for each iteration, and of each file of a side table."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    fingerprint: str
    tables: list[dict[str, str]]
    side_tables: dict[str, str] | None = None  # by path; None in files of earlier versions, whose runs may have some
    environment: dict[str, str]


def golden_of(run: Path | str) -> Golden:
    """Return the digests of a complete run. Raises UserError if a file does not have its digest."""
    recorded = reader.open_manifest(run)
    for moment in (None, *range(recorded.num_iterations + 1)):
        reader.read_moment(Path(run), recorded, moment)
    note = read_note(Path(run), recorded, ENVIRONMENT_NAME)
    packages = {f"packages.{name}": str(version) for name, version in note.get("packages", {}).items()}
    return Golden(
        fingerprint=recorded.fingerprint,
        tables=[{name: entry.digest for name, entry in item.tables.items()} for item in recorded.iterations],
        side_tables={
            str(file.path(Path())): file.entry.digest
            for file in recorded_tables(recorded)
            if file.table in side_tables_of(recorded)
        },
        environment={name: str(note.get(name)) for name in ENVIRONMENT} | packages,
    )


def _changed(golden: Golden, now: Golden) -> str:
    """Describe the first difference between two runs; "" if there is none."""
    for iteration, (old, new) in enumerate(zip(golden.tables, now.tables, strict=False)):
        for name in new | old:
            if old.get(name) != new.get(name):
                return f"table {name}, iteration {iteration}: digest {new.get(name)}, golden {old.get(name)}"
    if len(golden.tables) != len(now.tables):
        return f"number of iterations: {len(now.tables)}, golden {len(golden.tables)}"
    old, new = golden.side_tables or {}, now.side_tables or {}
    for path in sorted(old.keys() & new.keys()):  # `records.level` says which of them a run has, and is no result
        if old[path] != new[path]:
            return f"{path}: digest {new[path]}, golden {old[path]}"
    if golden.fingerprint != now.fingerprint:
        return f"final results: fingerprint {now.fingerprint}, golden {golden.fingerprint}"
    return ""


def assert_matches_golden(run: Path | str, golden_path: Path | str) -> None:
    """Assert that a run has the digests of a golden run, in every table and in its final results.

    A digest is of the columns that are results; `ppo-repro diff` compares the others too.

    A golden file of an earlier version has no digests of side tables, which are then not compared.
    If there is no golden file, it is written, and the assertion fails once. Raises AssertionError, which names the
    first table and iteration that differ, and the changes of the environment. Raises UserError if the run is incomplete
    or damaged.
    """
    __tracebackhide__ = True
    path, now = Path(golden_path), golden_of(run)
    if not path.exists():
        atomic_write(path, (now.model_dump_json(indent=1) + "\n").encode())
        raise AssertionError(f"{path}: there was no golden run, so {run} was written to it; look at it and keep it")
    try:
        golden = Golden.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise UserError(f"{path}: is not a golden run ({' '.join(str(error).split())}); delete it") from error
    if difference := _changed(golden, now):
        before, after = golden.environment, now.environment
        changes = [
            f"{name} {after.get(name)} (golden {before.get(name)})"
            for name in sorted({*before, *after})
            if before.get(name) != after.get(name)
        ]
        environment = f"the environment differs: {', '.join(changes)}" if changes else "the environment is the same"
        raise AssertionError(
            f"{run} is not the golden run {path}: {difference}; {environment}; see the cell with `ppo-repro diff` "
            f"against a run of the old code, or accept the new results: delete {path}"
        )
