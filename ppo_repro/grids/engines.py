"""Engines that run cells: processes on this machine, Ray, or a Slurm array. Each yields results as cells end."""

from __future__ import annotations

import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from ppo_repro.errors import UserError
from ppo_repro.grids.cell import Order, Result, finish_cell, run_cell, start_cell

POLL_SECONDS = 0.1
TIMEOUT_MINUTES = 24 * 60  # of a Slurm job, unless slurm_time or timeout_min is given
END_SECONDS = 60.0  # how long an interrupted cell has to record that it was interrupted


class Engine(Protocol):
    """Runs cells somewhere. They may end in any order."""

    def run(self, orders: Sequence[Order]) -> Iterator[Result | None]:
        """Yield each result when its cell ends, and None in between so that the caller can show progress."""
        ...


LiveCells = dict[str, tuple[Order, subprocess.Popen[bytes], float]]  # by name: order, process, start time


@dataclass(frozen=True)
class Processes:
    """Up to `workers` cells side by side on this machine."""

    workers: int

    def run(self, orders: Sequence[Order]) -> Iterator[Result | None]:
        waiting, live = deque(orders), LiveCells()
        try:
            while waiting or live:
                while waiting and len(live) < self.workers:
                    order = waiting.popleft()
                    live[order.name] = order, start_cell(order), time.perf_counter()
                for name, (order, process, started) in list(live.items()):
                    code = process.poll()
                    if code is not None:
                        del live[name]
                        _close(process)
                        yield finish_cell(order, code, time.perf_counter() - started)
                yield None
                time.sleep(POLL_SECONDS)
        finally:
            _end(live)


def _close(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


def _end(live: LiveCells) -> None:
    """Interrupt every cell so that it can record that, then make sure that its process is gone."""
    for _, process, _ in live.values():
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + END_SECONDS
    for order, process, started in live.values():
        try:
            code = process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        _close(process)
        finish_cell(order, code, time.perf_counter() - started)


@dataclass(frozen=True)
class Ray:
    """Cells as Ray tasks with one CPU per thread; the address `local` starts a Ray of `workers` CPUs here."""

    address: str
    workers: int

    def run(self, orders: Sequence[Order]) -> Iterator[Result | None]:
        try:
            import ray
        except ImportError as error:
            raise UserError("--ray: needs ray; install it with pip install 'ppo_repro[grid]'") from error
        here = self.address == "local"
        try:
            ray.init(
                self.address,
                num_cpus=self.workers if here else None,
                include_dashboard=False if here else None,
                log_to_driver=False,
                configure_logging=False,
            )
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"--ray {self.address}: cannot be reached ({reason})") from error
        try:
            task = ray.remote(run_cell)
            pending = {task.options(num_cpus=order.threads, max_retries=0).remote(order): order for order in orders}
            while pending:
                done, _ = ray.wait(list(pending), timeout=POLL_SECONDS)
                for reference in done:
                    order = pending.pop(reference)
                    try:
                        yield ray.get(reference)
                    except ray.exceptions.RayError as error:
                        yield Result(order.name, 1, 0.0, " ".join(str(error).split())[:300])
                yield None
        finally:
            ray.shutdown()


@dataclass(frozen=True)
class Slurm:
    """Cells as one job array, submitted with submitit; `parameters` are those of its AutoExecutor."""

    log_folder: Path
    workers: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    cluster: Literal["slurm", "local"] = "slurm"

    def run(self, orders: Sequence[Order]) -> Iterator[Result | None]:
        try:
            import submitit
        except ImportError as error:
            raise UserError("--slurm: needs submitit; install it with pip install 'ppo_repro[grid]'") from error
        try:
            executor = submitit.AutoExecutor(self.log_folder, cluster=self.cluster)
            limit = {"slurm_array_parallelism": self.workers} if self.cluster == "slurm" else {}
            cpus = max(order.threads for order in orders)
            # submitit's own limit is five minutes, after which a cell would be killed
            timed = {} if {"timeout_min", "slurm_time"} & set(self.parameters) else {"timeout_min": TIMEOUT_MINUTES}
            executor.update_parameters(cpus_per_task=cpus, **timed, **limit, **self.parameters)
            jobs = dict(zip(executor.map_array(run_cell, orders), orders, strict=True))
        except (RuntimeError, ValueError, TypeError, NameError, submitit.core.utils.FailedJobError) as error:
            raise UserError(f"--slurm: jobs cannot be submitted ({' '.join(str(error).split())[:300]})") from error
        try:
            while jobs:
                for job in [job for job in jobs if job.done()]:
                    order = jobs.pop(job)
                    yield _result_of(job, order)
                yield None
                time.sleep(POLL_SECONDS)
        finally:
            for job in jobs:
                job.cancel()


def _result_of(job: object, order: Order) -> Result:
    import submitit

    assert isinstance(job, submitit.Job)
    error = job.exception()
    if error is None:
        result: Result = job.result()
        return result
    return Result(order.name, 1, 0.0, " ".join(str(error).split())[-300:])
