"""Cells as a Slurm job array, submitted with submitit. `squeue` and the cell's folder say what became of a job.

submitit itself asks `sacct`, which answers only on a cluster with an accounting database, and only after minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_repro.errors import UserError
from ppo_repro.grids.cell import Order, Result, forget_result, last_result, lost_cell, run_cell, state_of

if TYPE_CHECKING:
    from submitit.core.utils import DelayedSubmission

POLL_SECONDS = 1.0
LONGEST_POLL_SECONDS = 30.0  # between two questions to the cluster's controller, which all users share
TIMEOUT_MINUTES = 24 * 60  # of a job, unless slurm_time or timeout_min is given
ANSWER_SECONDS = 60.0  # for one command of Slurm's
SETTLE_SECONDS = 15.0  # until a file written on another machine is seen here
END_SECONDS = 60.0  # how long cancelled jobs have to leave the queue
COMMANDS = ("sbatch", "srun", "squeue", "scancel")

Jobs = dict[str, Order]  # by the id of the job, or of the task of an array: 12 or 12_3


class CellJob:
    """Runs one cell in a job. `checkpoint` is what submitit runs after its time: the same, from the last checkpoint."""

    def __call__(self, order: Order) -> Result:
        return run_cell(order)

    def checkpoint(self, order: Order) -> DelayedSubmission:
        from submitit.core.utils import DelayedSubmission

        return DelayedSubmission(self, order)


@dataclass(frozen=True)
class Slurm:
    """Cells as one job array; `parameters` are those of submitit's AutoExecutor."""

    log_folder: Path
    workers: int
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        missing = [command for command in COMMANDS if shutil.which(command) is None]
        if missing:
            raise UserError(f"--slurm: {missing[0]} is not installed here; start this on a machine that submits jobs")
        if find_spec("submitit") is None:
            raise UserError("--slurm: needs submitit; install it with pip install 'ppo_repro[grid]'")
        code, _, said = _ask("sinfo", "--noheader")
        if code:
            raise UserError(f"--slurm: the cluster does not answer ({said}); wait for it, or give no --slurm")
        self._submit(())

    def run(self, orders: Sequence[Order]) -> Iterator[Result | None]:
        for order in orders:
            forget_result(order)
        jobs = self._submit(orders)
        try:
            yield from _until_ended(jobs, self.log_folder)
        finally:
            _cancel(jobs, self.log_folder)

    def _submit(self, orders: Sequence[Order]) -> Jobs:
        """Submit a job for each order; with no order only check the parameters."""
        import submitit
        from submitit.core.utils import FailedJobError

        # submitit's own limit is five minutes, after which a cell would be killed
        timed = {} if {"timeout_min", "slurm_time"} & set(self.parameters) else {"timeout_min": TIMEOUT_MINUTES}
        cpus = max((order.threads for order in orders), default=1)
        usual = {"cpus_per_task": cpus, "slurm_array_parallelism": self.workers, **timed}
        try:
            executor = submitit.AutoExecutor(self.log_folder, cluster="slurm")
            executor.update_parameters(**{**usual, **self.parameters})
            jobs = executor.map_array(CellJob(), orders) if orders else []
        except (RuntimeError, ValueError, TypeError, NameError, FailedJobError) as error:
            raise UserError(f"--slurm: jobs cannot be submitted ({' '.join(str(error).split())[:300]})") from error
        return {job.job_id: order for job, order in zip(jobs, orders, strict=True)}


def _ask(*command: str) -> tuple[int, str, str]:
    """Exit code, output and error of a command of Slurm's."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return 1, "", f"{command[0]} took longer than {ANSWER_SECONDS:.0f} s"
    return done.returncode, done.stdout, " ".join(done.stderr.split())[:200]


def _arrays(jobs: Jobs) -> str:
    return ",".join(sorted({job.partition("_")[0] for job in jobs}))


def _queued(jobs: Jobs) -> set[str] | None:
    """The jobs that wait, run or are being ended; None where the cluster does not answer at the moment."""
    code, out, said = _ask("squeue", "--noheader", "--array", f"--jobs={_arrays(jobs)}", "--format=%i")
    if code:
        return set() if "Invalid job id" in said else None
    return set(out.split())


def _until_ended(jobs: Jobs, log_folder: Path) -> Iterator[Result | None]:
    """Take each job that has ended out of `jobs` and yield its result; None again and again meanwhile.

    A job that Slurm has put back into the queue has not ended.
    """
    started = time.monotonic()
    asked, gone_since = started, dict[str, float]()
    while jobs:
        yield None
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
        if now - asked < min(LONGEST_POLL_SECONDS, (now - started) / 20):
            continue
        asked, queued = now, _queued(jobs)
        if queued is None:
            continue
        for job, order in list(jobs.items()):
            if job in queued:
                gone_since.pop(job, None)
                continue
            result = last_result(Path(order.folder))
            if result is None and now - gone_since.setdefault(job, now) < SETTLE_SECONDS:
                continue
            del jobs[job]
            yield result or lost_cell(order, _lost(job, log_folder))


def _lost(job: str, log_folder: Path) -> str:
    return f"job {job} ended without a word; see {log_folder}/{job}_0_log.err and the cell's log.txt"


def _cancel(jobs: Jobs, log_folder: Path) -> None:
    """End what still waits or runs, wait until it is gone, and record what could not record its end itself."""
    if not jobs:
        return
    _ask("scancel", *_arrays(jobs).split(","))
    deadline = time.monotonic() + END_SECONDS
    while _queued(jobs) != set() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for job, order in jobs.items():
        if state_of(Path(order.folder)) == "running":
            lost_cell(order, _lost(job, log_folder))
