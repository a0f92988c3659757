"""The accepted results of a run in a small JSON file: digests and environment."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ppo_repro.errors import UserError

# whatever decides how numbers are rounded; no paths, no names of machines
_ENVIRONMENT = ("ppo_repro", "python", "machine", "cpu_capability", "numerics_mode", "threads", "processes")


class Golden(BaseModel):
    """A golden run. `tables` has the digest of each table, for each iteration."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1]
    fingerprint: str
    tables: list[dict[str, str]]
    environment: dict[str, str]


def golden_of(run_dir: Path) -> Golden:
    """Digests of a complete run, checked against its files; UserError if the files have changed."""
    from ppo_repro.records import reader
    from ppo_repro.records.folder import ENVIRONMENT_NAME, read_note

    recorded = reader.open_manifest(run_dir)
    for index in range(len(recorded.iterations)):
        reader.read_moment(run_dir, recorded, index)
    tables = [{name: entry.digest for name, entry in item.tables.items()} for item in recorded.iterations]
    note = read_note(run_dir, recorded, ENVIRONMENT_NAME)
    packages = {f"packages.{name}": str(version) for name, version in note.get("packages", {}).items()}
    environment = {name: str(note.get(name)) for name in _ENVIRONMENT} | packages
    return Golden(format=1, fingerprint=recorded.fingerprint, tables=tables, environment=environment)


def load(path: Path) -> Golden:
    """Read a golden run; UserError where the file is missing or has another form."""
    try:
        return Golden.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no golden run yet; write it with `pytest --update-golden`") from error
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: is not a golden run ({reason}); rewrite it with `pytest --update-golden`") from error


def save(path: Path, golden: Golden) -> None:
    """Write the file atomically; raises UserError where that fails."""
    from ppo_repro.files import atomic_write

    atomic_write(path, (golden.model_dump_json(indent=1) + "\n").encode())


def first_difference(golden: Golden, now: Golden) -> str:
    """The first difference between two runs, in words; empty if there is none."""
    for iteration, (old, new) in enumerate(zip(golden.tables, now.tables, strict=False)):
        unequal = [name for name in new if old.get(name) != new[name]]
        if unequal:
            name = unequal[0]
            return f"table {name}, iteration {iteration}: digest {new[name]}, golden {old.get(name)}"
    if len(golden.tables) != len(now.tables):
        return f"number of iterations: {len(now.tables)}, golden {len(golden.tables)}"
    if golden.fingerprint != now.fingerprint:
        return f"final results: fingerprint {now.fingerprint}, golden {golden.fingerprint}"
    return ""


def other_environment(golden: Golden, now: Golden) -> list[str]:
    """The parts of the environment that have changed since the golden run was written."""
    names = sorted({*golden.environment, *now.environment})
    pairs = [(name, golden.environment.get(name), now.environment.get(name)) for name in names]
    return [f"{name} {new} (golden {old})" for name, old, new in pairs if old != new]
