"""One cell of a grid: its run, its state, and the process that computes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import MANIFEST, atomic_write
from ppo_repro.base.interrupts import held
from ppo_repro.base.lock import locked_in
from ppo_repro.records import manifest
from ppo_repro.records.manifest import Head
from ppo_repro.records.run_state import CellState

RESULT = "result.json"
LOG = "log.txt"
BEGIN = "a new attempt begins"  # in the log
LOST = 3  # exit code of a cell whose end no process saw
WRITER_SECONDS = 60.0  # for another process to stop writing the cell's run


@dataclass(frozen=True)
class Order:
    """Instruction to run one cell, for any machine that has access to the folder."""

    name: str
    folder: str
    threads: int  # of each process
    processes: int = 1

    @property
    def cpus(self) -> int:
        """Return the number of CPUs that the cell keeps busy."""
        return self.threads * self.processes


@dataclass(frozen=True)
class Result:
    """Exit code, duration and message of the last attempt at a cell."""

    name: str
    exit_code: int  # 0 for success, negative for the signal that killed it
    seconds: float
    message: str  # the last error line; empty on success


def run_of(folder: Path) -> Path | None:
    """Return the folder of the cell's run, None if no run has begun. Raises UserError if there are several."""
    runs = sorted(path.parent for path in folder.glob(f"*/*/{MANIFEST}"))
    runs = [run_dir for run_dir in runs if run_dir.suffix not in (".tmp", ".removed")]  # left by a killed process
    if len(runs) > 1:
        raise UserError(f"{folder}: has {len(runs)} runs; a cell has one, remove the others")
    return runs[0] if runs else None


def cell_state(folder: Path) -> CellState:
    """Return the state of the cell's run on disk. Raises UserError if its manifest is damaged."""
    run_dir = run_of(folder)
    return state_from(None if run_dir is None else manifest.load_head(run_dir), last_result(folder))


def state_from(head: Head | None, last: Result | None) -> CellState:
    """Return the state of a cell from the manifest of its run and the result of its last attempt, if it has them."""
    if head is not None:
        # a killed process cannot change its status, but the executor that waited for it has written a result
        return "interrupted" if head.status == "running" and last is not None else head.status
    if last is None:
        return "missing"
    # the cell ended before its first iteration, with an error or by a signal
    return "failed" if last.exit_code in (1, 2) else "interrupted"


def start_cell(order: Order) -> subprocess.Popen[bytes]:
    """Start or resume the cell's run in a new session: one process, or torchrun with the cell's processes.

    All processes end when the stdin closes, which torchrun's processes inherit.
    """
    launcher = {"WORLD_SIZE", "RANK", "LOCAL_RANK"}  # a cell is no process of torchrun
    numbers = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(order.threads))
    environment = {name: value for name, value in os.environ.items() if name not in launcher} | numbers
    folder = Path(order.folder)
    (folder / RESULT).unlink(missing_ok=True)  # of the attempt before
    run_dir = run_of(folder)
    # `run` removes the files of a process that was killed before it wrote a manifest
    begin = ["run", str(folder / "config.yaml"), "--out", str(folder), "--json"]
    command = begin if run_dir is None else ["resume", str(run_dir), "--json"]
    program = ["-m", "ppo_repro.grids.cell_process", *command]
    listens: AbstractContextManager[None] = held()
    if order.processes > 1:
        program = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={order.processes}", *program]
        listens = nullcontext()  # torchrun would never hear a signal that is held
    with (folder / LOG).open("ab") as log, listens:
        log.write(f"{BEGIN}\n".encode())
        log.flush()
        return subprocess.Popen(
            [sys.executable, *program],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )


def finish_cell(order: Order, process: subprocess.Popen[bytes], started: float) -> Result:
    """Wait for the cell's process, and record its exit code and the last error line of this attempt."""
    with process:  # closes its stdin
        exit_code = process.wait()
    message = ""
    if exit_code:
        text = (Path(order.folder) / LOG).read_text(errors="replace")
        lines = text.rpartition(f"{BEGIN}\n")[2].splitlines()
        starts = ("error: ", "promise broken: ", "stopped: ", "terminated", "interrupted")
        message = ([line for line in lines if line.startswith(starts)] or lines or [""])[-1]
    return record_result(order, exit_code, message, round(time.perf_counter() - started, 3))


def lost_cell(order: Order, message: str) -> Result:
    """Record that nobody knows the end of the cell, because its machine or its job is gone."""
    return record_result(order, LOST, message)


@contextmanager
def results_forgotten(orders: Sequence[Order]) -> Iterator[None]:
    """Remove the results of the previous attempts; put them back if the block, which starts new ones, raises."""
    paths = [Path(order.folder) / RESULT for order in orders]
    before = {path: path.read_bytes() for path in paths if path.exists()}
    try:
        for path in before:
            path.unlink()
        yield
    except BaseException:
        for path, result in before.items():
            if not path.exists():  # else an attempt that began nevertheless has ended
                atomic_write(path, result)
        raise


def record_result(order: Order, exit_code: int, message: str, seconds: float = 0.0) -> Result:
    """Write the result of an attempt at a cell into the cell's folder, and return it."""
    result = Result(order.name, exit_code, seconds, message)
    text = json.dumps(asdict(result), indent=1, ensure_ascii=False) + "\n"
    atomic_write(Path(order.folder) / RESULT, text.encode())
    return result


def run_cell(order: Order) -> Result:
    """Run or resume a cell in a new process and wait for its end; any machine with access to the folder can do so."""
    started = time.perf_counter()
    # a cluster may still be ending the last attempt
    while any(locked_in(Path(order.folder))) and time.perf_counter() - started < WRITER_SECONDS:
        time.sleep(0.1)
    return finish_cell(order, start_cell(order), started)


def last_result(folder: Path) -> Result | None:
    """Return the result of the last attempt, None if none is recorded. Raises UserError if the file is damaged."""
    path = folder / RESULT
    if not path.exists():
        return None
    try:
        return Result(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: was changed or damaged; remove it, and the cell is checked again") from error
