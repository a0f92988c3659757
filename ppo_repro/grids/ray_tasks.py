"""Cells as Ray tasks, on one machine or on many."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ppo_repro.errors import UserError
from ppo_repro.grids.cell import Order, Result, forget_result, lost_cell, run_cell, state_of
from ppo_repro.grids.engines import Results

ANSWER_SECONDS = 10.0
LOOK_SECONDS = 0.1  # so that Ctrl-C is heard
# of a cell whose node dies; what ends a cell in any other way is its result
MORE_NODES = 3


@dataclass(frozen=True)
class Ray:
    """Cells as Ray tasks with one CPU per thread; the address `local` starts a Ray of `workers` CPUs here."""

    address: str
    workers: int

    def check(self) -> None:
        if find_spec("ray") is None:
            raise UserError("--ray: needs ray; install it with pip install 'ppo_repro[grid]'")
        host, colon, port = self.address.rpartition(":")
        if "/" in host or not (colon and port.isdecimal()):
            return  # `local`, `auto` and the addresses of Ray's clients are for Ray to judge
        try:
            socket.create_connection((host, int(port)), ANSWER_SECONDS).close()  # Ray itself would wait for minutes
        except (OSError, OverflowError) as error:
            raise UserError(f"--ray {self.address}: cannot be reached ({error}); start it with `ray start`") from error

    def run(self, orders: Sequence[Order]) -> Results:
        import ray

        for order in orders:
            forget_result(order)
        pending: dict[ray.ObjectRef[Result], Order] = {}
        here: dict[str, Any] = {"num_cpus": self.workers, "include_dashboard": False} if self.address == "local" else {}
        try:
            ray.init(self.address, log_to_driver=False, configure_logging=False, **here)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"--ray {self.address}: cannot be reached ({reason})") from error
        try:
            task = ray.remote(run_cell)
            for order in orders:
                options = task.options(num_cpus=order.threads, max_retries=MORE_NODES)
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
                if state_of(Path(order.folder)) == "running":
                    lost_cell(order, "interrupted")
