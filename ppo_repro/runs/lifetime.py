"""How a run begins and ends on disk, however and whenever its process ends.

Where bits end it that deterministic numerics promise to be equal, what there is to look at is kept: tokens and policy.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ppo_repro.errors import UserError
from ppo_repro.files import check_sums, only_writer, remove_folder, whole_folder, write_sums
from ppo_repro.records import manifest, writer
from ppo_repro.records.contents import UNEQUAL_NAME, checkpoints_folder, sums_digest
from ppo_repro.records.manifest import Head, Status
from ppo_repro.runs.kind import Store
from ppo_repro.stages.agreement import Unequal, UnequalBits
from ppo_repro.watcher import Watcher

UNEQUAL_TOKENS = "unequal.parquet"


@contextmanager
def new_run(temporary: Path, run_dir: Path) -> Iterator[None]:
    """Give the folder that `writer.lay_out_run` made its name; this process is its only writer until the block ends.

    An exception that ends the block is noted in the manifest; a run without a complete iteration is removed, unless
    its bits were unequal, which is to be looked at.
    The exception may come at any instant, as Ctrl-C does: no folder is left that says "running". UserError as
    `writer.publish_run`.
    """
    with only_writer(temporary):  # the lock belongs to the file, whichever folder it is in later
        try:
            writer.publish_run(temporary, run_dir)
            yield
        except BaseException as error:
            if temporary.exists():  # it has not been renamed yet
                shutil.rmtree(temporary, ignore_errors=True)
            elif manifest.load_head(run_dir).num_iterations or isinstance(error, UnequalBits):
                mark_ended(run_dir, error)
            else:
                remove_folder(run_dir)
            raise


def mark_ended(run_dir: Path, error: BaseException) -> None:
    """Note in the manifest that `error` ended the run, and what is kept of unequal bits; what is recorded stays.

    Where the note cannot be written either, the manifest keeps saying "running", and `error` is what is reported.
    """
    ended: Status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    with suppress(UserError):
        # from the disk: the error may have come after the file was written and before our copy was updated
        current = manifest.load_head(run_dir)
        if current.status != "complete":
            writer.mark(run_dir, current, ended, files={**current.files, **_unequal_files(run_dir)})


def _unequal_files(run_dir: Path) -> dict[str, str]:
    """The digest of the list of files of what is kept of unequal bits, none where nothing is; UserError as reading."""
    folder = unequal_folder(run_dir)
    try:
        return sums_digest(run_dir, folder) if folder.is_dir() else {}
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}); make it readable") from error


def unequal_folder(run_dir: Path) -> Path:
    """A transformers folder of the policy as it was, and beside it `unequal.parquet`; of control runs the latter."""
    return checkpoints_folder(run_dir) / UNEQUAL_NAME


@contextmanager
def kept_if_unequal(run_dir: Path, store: Store | None) -> Iterator[None]:
    """Where bits are unequal in this block, keep what there is to look at, and let the error say where it is."""
    try:
        yield
    except UnequalBits as error:
        folder = unequal_folder(run_dir)
        try:
            with whole_folder(folder) as temporary:
                pq.write_table(_table(error.found), temporary / UNEQUAL_TOKENS)
                if store is not None:
                    store.put_policy(temporary)
                write_sums(temporary)
        except UserError as failure:
            hint = str(failure)
        else:
            hint = f"all of them: {folder / UNEQUAL_TOKENS}"
            if store is not None:
                hint = f"find the module with `ppo-repro bisect {run_dir}`; {hint}"
        raise UnequalBits(f"{error}; {hint}", error.found) from error


def _table(found: Unequal) -> pa.Table:
    columns = (("sequence", found.sequence), ("position", found.position), found.left, found.right)
    return pa.table(
        {
            "iteration": [found.iteration] * len(found.sequence),
            **{name: values.numpy() for name, values in columns},
        }
    )


@dataclass(frozen=True)
class Response:
    """A response of a run."""

    iteration: int
    sequence: int


def first_unequal(run_dir: Path) -> Response | None:
    """The first response with unequal bits, None where a run has none; UserError where the file is damaged."""
    path = unequal_folder(run_dir) / UNEQUAL_TOKENS
    if not path.is_file():
        return None
    check_sums(path.parent)
    row = pq.read_table(path, columns=["iteration", "sequence"]).slice(0, 1).to_pylist()[0]
    return Response(row["iteration"], row["sequence"])


class Appender:
    """Appends to one run, `together` iterations at a time.

    No more than these are in hand and as many wait for the disk: memory is bounded, and a kill loses no more.
    """

    def __init__(self, run_dir: Path, current: Head, thread: ThreadPoolExecutor, together: int = 1) -> None:
        self._run_dir, self._current, self._thread, self._together = run_dir, current, thread, together
        self._writing: Future[Head] | None = None
        self._in_hand: list[tuple[int, Mapping[str, pa.Table]]] = []

    def settle(self) -> Head:
        """Wait until what is being written is durable; the manifest as it is on disk. Raises what writing raised."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self._current = writing.result()
        return self._current

    def start(self, iteration: int, tables: Mapping[str, pa.Table]) -> None:
        """Take an iteration after the one before, and begin to write those in hand where there are enough.

        Its tables must not change. Raises like `settle`.
        """
        self._in_hand.append((iteration, tables))
        if len(self._in_hand) == self._together:
            self._write()

    def finish(self) -> Head:
        """`settle`, after what is in hand is written too."""
        if self._in_hand:
            self._write()
        return self.settle()

    def _write(self) -> None:
        current = self.settle()
        (first, _), batch = self._in_hand[0], [tables for _, tables in self._in_hand]
        self._in_hand = []
        self._writing = self._thread.submit(writer.append_iterations, self._run_dir, current, first, batch)

    def leave(self) -> None:
        """Write what is in hand and wait for it, whether that fails or not."""
        if self._writing is not None:
            wait([self._writing])
        if self._in_hand and (self._writing is None or self._writing.exception() is None):
            self._write()
            self.leave()


@contextmanager
def appending(run_dir: Path, current: Head, together: int = 1) -> Iterator[Appender]:
    """An appender whose thread ends with the block. Where an error ends the block, that error is raised."""
    with ThreadPoolExecutor(1, "records") as thread:
        appender = Appender(run_dir, current, thread, together)
        try:
            yield appender
        finally:
            appender.leave()


def tell(watcher: Watcher, untold: deque[tuple[int, str]], current: Head, total: int) -> None:
    """Tell the watcher of iterations, number and text, but only of what is on disk."""
    while untold and untold[0][0] <= current.num_iterations:
        done, text = untold.popleft()
        watcher.iteration(done, total, text)
