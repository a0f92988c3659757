"""Run cells on many machines: as Ray tasks, or as a Slurm job array that submitit submits.

`squeue` and the cell's folder tell the state of a job. submitit itself asks `sacct`, which answers only on a cluster
with an accounting database, and only after minutes.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_repro.base.errors import UserError
from ppo_repro.grids.cell import Order, Result, cell_state, last_result, lost_cell, results_forgotten, run_cell
from ppo_repro.grids.executor import Results

if TYPE_CHECKING:
    from submitit.core.utils import DelayedSubmission

CONNECT_SECONDS = 10.0  # to a running Ray
LOOK_SECONDS = 0.1  # after which Ctrl-C is noticed
MORE_NODES = 3  # times that a cell starts again because its node died; any other end is the cell's result


@dataclass(frozen=True)
class Ray:
    """Executor that runs cells as Ray tasks with one CPU per thread of each process.

    `local` starts Ray here, with CPUs for `workers` cells.
    """

    address: str
    workers: int

    def check(self) -> None:
        if find_spec("ray") is None:
            raise UserError("--ray: needs ray; install it with pip install 'ppo_repro[grid]'")
        host, colon, port = self.address.rpartition(":")
        if "/" in host or not (colon and port.isdecimal()):
            return  # Ray itself checks `local`, `auto` and the addresses of its clients
        try:
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()  # Ray itself would wait for minutes
        except (OSError, OverflowError) as error:
            raise UserError(f"--ray {self.address}: cannot be reached ({error}); start it with `ray start`") from error

    def run(self, orders: Sequence[Order]) -> Results:
        import ray

        pending: dict[ray.ObjectRef[Result], Order] = {}
        most = max(order.cpus for order in orders)
        here: dict[str, Any] = {}
        if self.address == "local":
            here = {"num_cpus": self.workers * most, "include_dashboard": False}
        try:
            with results_forgotten(orders):
                ray.init(self.address, log_to_driver=False, configure_logging=False, **here)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"--ray {self.address}: cannot be reached ({reason})") from error
        try:
            task = ray.remote(run_cell)
            for order in orders:
                options = task.options(num_cpus=order.cpus, max_retries=MORE_NODES)
                pending[options.remote(order)] = order
            while pending:
                done, _ = ray.wait(list(pending), timeout=LOOK_SECONDS)
                for reference in done:
                    order = pending.pop(reference)
                    try:
                        yield ray.get(reference)
                    except ray.exceptions.RayError as error:
                        yield lost_cell(order, " ".join(str(error).split())[:300])
        finally:
            ray.shutdown()
            for order in pending.values():
                if cell_state(Path(order.folder)) == "running":
                    lost_cell(order, "interrupted")


POLL_SECONDS = 5.0  # between two questions to the cluster's controller, which all users share
TIMEOUT_MINUTES = 24 * 60  # of a job, unless slurm_time or timeout_min is given
ANSWER_SECONDS = 60.0  # for one command of Slurm
SETTLE_SECONDS = 15.0  # until this machine sees a file that another machine wrote
END_SECONDS = 60.0  # for cancelled jobs to leave the queue
COMMANDS = ("sbatch", "srun", "squeue", "scancel")

Jobs = dict[str, Order]  # by the id of the job, or of the task of an array: 12 or 12_3


class CellJob:
    """Job that runs one cell; when the job's time is over, submitit calls `checkpoint` to submit the cell again."""

    def __call__(self, order: Order) -> Result:
        return run_cell(order)

    def checkpoint(self, order: Order) -> DelayedSubmission:
        from submitit.core.utils import DelayedSubmission

        return DelayedSubmission(self, order)


@dataclass(frozen=True)
class Slurm:
    """Executor that runs cells as one Slurm job array; `parameters` go to submitit's AutoExecutor."""

    log_folder: Path
    workers: int
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        missing = [command for command in COMMANDS if shutil.which(command) is None]
        if missing:
            raise UserError(f"--slurm: {missing[0]} is not installed here; start this on a machine that submits jobs")
        if find_spec("submitit") is None:
            raise UserError("--slurm: needs submitit; install it with pip install 'ppo_repro[grid]'")
        self._submit(())

    def run(self, orders: Sequence[Order]) -> Results:
        with results_forgotten(orders):
            jobs = self._submit(orders)
        try:
            yield from _until_ended(jobs, self.log_folder)
        finally:
            _cancel(jobs, self.log_folder)

    def _submit(self, orders: Sequence[Order]) -> Jobs:
        """Submit a job for each order; without orders, only check the parameters."""
        import submitit
        from submitit.core.utils import FailedJobError

        # submitit's own limit is five minutes, after which a cell would be killed
        timed = {} if {"timeout_min", "slurm_time"} & set(self.parameters) else {"timeout_min": TIMEOUT_MINUTES}
        cpus = max((order.cpus for order in orders), default=1)
        usual = {"cpus_per_task": cpus, "slurm_array_parallelism": self.workers, **timed}
        try:
            executor = submitit.AutoExecutor(self.log_folder, cluster="slurm")
            executor.update_parameters(**{**usual, **self.parameters})
            jobs = executor.map_array(CellJob(), orders) if orders else []
        except (RuntimeError, ValueError, TypeError, NameError, FailedJobError) as error:
            raise UserError(f"--slurm: jobs cannot be submitted ({' '.join(str(error).split())[:300]})") from error
        return {job.job_id: order for job, order in zip(jobs, orders, strict=True)}


def _ask(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command, which fails after ANSWER_SECONDS."""
    limited = ["timeout", str(ANSWER_SECONDS), command, *arguments]
    return subprocess.run(limited, capture_output=True, text=True, check=False)


def _arrays(jobs: Jobs) -> list[str]:
    return sorted({job.partition("_")[0] for job in jobs})


def _queued(jobs: Jobs) -> set[str] | None:
    """Return the ids of the jobs that are in the queue; None if the cluster does not answer."""
    answer = _ask("squeue", "--noheader", "--array", f"--jobs={','.join(_arrays(jobs))}", "--format=%i")
    if answer.returncode:
        return set() if "Invalid job id" in answer.stderr else None
    return set(answer.stdout.split())


def _until_ended(jobs: Jobs, log_folder: Path) -> Results:
    """Remove each job from `jobs` when it has ended, and yield its result.

    A job that Slurm has put back into the queue has not ended.
    """
    gone_since = dict[str, float]()
    while jobs:
        time.sleep(POLL_SECONDS)
        queued, now = _queued(jobs), time.monotonic()
        for job, order in list(jobs.items()):
            if queued is None or job in queued:
                gone_since.pop(job, None)
                continue
            result = last_result(Path(order.folder))
            if result is not None or now - gone_since.setdefault(job, now) >= SETTLE_SECONDS:
                del jobs[job]
                yield result or _lost(order, job, log_folder)


def _lost(order: Order, job: str, log_folder: Path) -> Result:
    logs = f"see {log_folder}/{job}_0_log.err and the cell's log.txt"
    return lost_cell(order, f"job {job} ended without a word; {logs}")


def _cancel(jobs: Jobs, log_folder: Path) -> None:
    """Cancel all jobs, wait until they have left the queue, and record a lost result for cells without one."""
    if not jobs:
        return
    _ask("scancel", *_arrays(jobs))
    deadline = time.monotonic() + END_SECONDS
    while _queued(jobs) != set() and time.monotonic() < deadline:
        time.sleep(1.0)
    for job, order in jobs.items():
        if cell_state(Path(order.folder)) == "running":
            _lost(order, job, log_folder)
