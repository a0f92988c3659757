"""What is kept of a run that ended because bits were unequal that deterministic numerics promise to be equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ppo_repro.errors import UserError
from ppo_repro.files import check_sums, whole_folder, write_sums
from ppo_repro.records.folder import UNEQUAL
from ppo_repro.runs.kind import Store
from ppo_repro.stages.agreement import Unequal, UnequalBits

UNEQUAL_TOKENS = "unequal.parquet"


@contextmanager
def keeping_unequal(run_dir: Path, store: Store) -> Iterator[None]:
    """Where bits are unequal in this block, keep tokens and policy, and let the error say where they are."""
    try:
        yield
    except UnequalBits as error:
        folder = run_dir / UNEQUAL
        try:
            with whole_folder(folder) as temporary:
                pq.write_table(_table(error.found), temporary / UNEQUAL_TOKENS)
                has_policy = store.put_policy(temporary)
                write_sums(temporary)
        except UserError as failure:
            hint = str(failure)
        else:
            hint = f"all of them: {folder / UNEQUAL_TOKENS}"
            if has_policy:
                hint = f"find the module with `ppo-repro bisect {run_dir}`; {hint}"
        raise UnequalBits(f"{error}; {hint}", error.found) from error


def _table(found: Unequal) -> pa.Table:
    columns = (("sequence", found.sequence), ("position", found.position), found.left, found.right)
    named = {name: values.numpy() for name, values in columns}
    return pa.table({"iteration": [found.iteration] * len(found.sequence), **named})


@dataclass(frozen=True)
class Response:
    """A response of a run."""

    iteration: int
    sequence: int


def first_unequal(run_dir: Path) -> Response | None:
    """The first response with unequal bits, None where a run has none; UserError where the file is damaged."""
    path = run_dir / UNEQUAL / UNEQUAL_TOKENS
    if not path.is_file():
        return None
    check_sums(path.parent)
    row = pq.read_table(path, columns=["iteration", "sequence"]).slice(0, 1).to_pylist()[0]
    return Response(row["iteration"], row["sequence"])
