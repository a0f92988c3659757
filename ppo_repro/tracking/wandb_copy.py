"""Copy runs and grids to Weights & Biases by its client, during the run or later.

The client reads its settings: WANDB_MODE=offline writes files that `wandb sync` sends later, WANDB_PROJECT names the
project, `wandb login` logs in. Nothing is read back.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wandb
from wandb.errors import Error

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import MANIFEST
from ppo_repro.base.output import masked
from ppo_repro.config.files import read_tree
from ppo_repro.records import manifest
from ppo_repro.records.folder import CONFIG_NAME, ENVIRONMENT_NAME, REPORT_NAME, load_any_recorded_config
from ppo_repro.records.grid import GRID
from ppo_repro.records.label import read_label
from ppo_repro.records.manifest import Head
from ppo_repro.records.notes import read_note
from ppo_repro.tracking.following import ENVIRONMENT_FIELDS, IsOver, follow, labels_of, write_page
from ppo_repro.tracking.scalars import Scalar, sentences

FILES = "ppo_repro"  # the folder of our files in a W&B run
KEPT = (MANIFEST, manifest.LOG_NAME, CONFIG_NAME, ENVIRONMENT_NAME)


@dataclass(frozen=True)
class Place:
    """Addresses of the client's new runs. The URL of an offline run is empty."""

    group: str  # name of the grid; empty for a run
    runs: Sequence[tuple[str, str]]  # URL, and folder of the client

    def lines(self) -> list[str]:
        """Return the printed lines: the address of the copy, or the command that sends it."""
        (url, _), *_ = self.runs
        if url:
            where = f"group {self.group} of {url.rpartition('/runs/')[0]}" if self.group else url
            return [f"W&B         {where}"]
        return [f"W&B         {len(self.runs)} offline; sent by wandb sync {shlex.join(path for _, path in self.runs)}"]

    def fields(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {"group": self.group, "runs": [{"url": url, "folder": folder} for url, folder in self.runs]}


@contextmanager
def answering() -> Iterator[None]:
    """Convert the client's errors in this block to UserError. The message contains no key."""
    try:
        yield
    except (Error, OSError, TimeoutError) as error:
        reason = masked(" ".join(str(error).split()))[:200]
        raise UserError(
            f"wandb: cannot be written ({reason}); the records are not affected; WANDB_MODE=offline needs no server"
        ) from error


def copy(folder: Path, place: str, is_over: IsOver) -> tuple[list[str], dict[str, Any]] | None:
    """Copy a run or a grid until it is over; None if nothing was recorded.

    An earlier copy of the same folder is replaced. Returns the printed lines of the addresses, and their fields. The
    client's settings say where it copies to, not `place`. Raises UserError if records are damaged or the client fails.
    """

    def begin(run_dir: Path, row: dict[str, Any]) -> _RunCopy:
        if not row:
            return _RunCopy(run_dir)
        tree = read_tree(folder / GRID)
        about = {**labels_of(row), "question": tree["question"], "expectation": tree["expectation"]}
        return _RunCopy(run_dir, str(row["cell"]), folder.name, about)

    with answering():
        runs = [copy.place for copy in follow(folder, is_over, begin)]
    found = Place(folder.name if (folder / GRID).exists() else "", runs)
    return (found.lines(), found.fields()) if runs else None


class _RunCopy:
    """Copy of one run in W&B. A cell of a grid has a `name` and a `group`."""

    def __init__(self, run_dir: Path, name: str = "", group: str = "", about: dict[str, Any] | None = None) -> None:
        recorded = manifest.load_head(run_dir)
        config = load_any_recorded_config(run_dir, recorded)
        environment = read_note(run_dir, recorded, ENVIRONMENT_NAME)
        more: dict[str, Any] = {"run_dir": str(run_dir.absolute()), **(about or {}), **environment["packages"]}
        more |= {name: environment[name] for name in ENVIRONMENT_FIELDS}
        kind: str = recorded.kind
        if recorded.origin is not None:
            kind, origin = "fork", recorded.origin
            more["origin"] = {**origin.model_dump(mode="json"), "wandb_id": _id(Path(origin.run))}
        self.run_dir = run_dir
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or config.experiment,
            id=_id(run_dir),
            name=read_label(run_dir).name or name or run_dir.name,
            group=group or None,
            job_type="cell" if group else kind,
            config={**config.model_dump(mode="json"), "ppo_repro": more},
            reinit="create_new",
            settings=_quiet(),
        )
        for axis in ("iteration", "step"):
            self._run.define_metric(axis, hidden=True)
            self._run.define_metric(f"{axis}/*", step_metric=axis)

    @property
    def place(self) -> tuple[str, str]:
        return self._run.url or "", str(Path(self._run.dir).parent)

    def end(self, head: Head, last: Sequence[Scalar]) -> None:
        self.log([scalar for scalar in last if scalar.name.startswith("iteration/")])
        results = {scalar.name: scalar.value for scalar in last if not scalar.name.startswith("iteration/")}
        self._run.summary.update({**results, "fingerprint": head.fingerprint})
        self._run.notes = sentences(self.run_dir, head)
        self._keep()
        self._run.finish(exit_code=0 if head.status == "complete" else 1)

    def give_up(self) -> None:
        self._run.finish(exit_code=1)

    def log(self, scalars: Sequence[Scalar]) -> None:
        """Log a row for each iteration and each optimizer step: W&B has one history for both."""
        rows: dict[tuple[str, int], dict[str, float]] = {}
        for scalar in scalars:
            axis = scalar.name.partition("/")[0]
            row = rows.setdefault((axis, scalar.step), {axis: scalar.step, "_timestamp": scalar.moment})
            row[scalar.name] = scalar.value
        for row in sorted(rows.values(), key=lambda row: row["_timestamp"]):
            self._run.log(row)

    def _keep(self) -> None:
        """Save manifest, configuration, environment and report as files of the W&B run."""
        folder = Path(self._run.dir) / FILES
        folder.mkdir(parents=True)
        for name in KEPT:
            shutil.copy(self.run_dir / name, folder / name)
        write_page(self.run_dir, folder / REPORT_NAME)
        self._run.save(str(folder / "*"), base_path=self._run.dir, policy="now")


def _quiet() -> wandb.Settings:
    """Return the settings with which the client prints nothing and collects no data about the machine."""
    return wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        disable_job_creation=True,
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
    )


def _id(run_dir: Path) -> str:
    """Return the id of a run folder's copy. The client replaces a run with the same id."""
    return hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:12]
