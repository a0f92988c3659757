"""Find, open and compare recorded runs, and read tables as pandas frames. Never imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_repro.base.errors import UserError
from ppo_repro.base.latest import run_named
from ppo_repro.config.control import ControlConfig
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.records import manifest
from ppo_repro.records.diff import Difference, first_difference
from ppo_repro.records.folder import load_any_recorded_config
from ppo_repro.records.manifest import Head
from ppo_repro.records.reader import read_table
from ppo_repro.records.run_state import state_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class Run:
    """Recorded run. Each property reads the run's folder again, because a run in progress changes.

    At a Python prompt, a run shows its folder, state, results and fingerprint.
    """

    path: Path

    def __repr__(self) -> str:
        try:
            head, config = self._head, self.config
        except UserError as error:
            return f"<run {self.path}; {error}>"
        so_far = f"{state_of(self.path, head.status)}, {head.num_iterations} iterations"
        # without right and wrong responses an accuracy means nothing
        judged = not isinstance(config, RunConfig) or config.reward.judges
        numbers = {name: value for name, value in head.final.items() if not isinstance(value, str)}
        results = [f"{name} {value:.4g}" for name, value in numbers.items() if judged or name != "eval_accuracy"]
        return f"<run {'; '.join([str(self.path), so_far, *results, f'fingerprint {head.fingerprint[:12]}'])}>"

    @property
    def _head(self) -> Head:
        return manifest.load_head(self.path)

    @property
    def status(self) -> str:
        """Return `running`, `complete`, `interrupted` or `failed`."""
        return self._head.status

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 over every bit that the run has recorded until now."""
        return self._head.fingerprint

    @property
    def num_iterations(self) -> int:
        """Return the number of recorded iterations."""
        return self._head.num_iterations

    @property
    def final(self) -> Mapping[str, float | int | str]:
        """Return the results after the last iteration, for example `eval_accuracy`; empty until then."""
        return self._head.final

    @property
    def config(self) -> RunConfig | ControlConfig | DPOConfig:
        """Return the configuration of the run."""
        return load_any_recorded_config(self.path, self._head)

    @property
    def tables(self) -> tuple[str, ...]:
        """Return the names of the tables that `table` reads; ppo_repro/records/README.md describes their columns."""
        return tuple(manifest.table_names(manifest.load(self.path)))

    def table(
        self, name: str, columns: Sequence[str] | None = None, iterations: Sequence[int] | None = None
    ) -> pd.DataFrame:
        """Return the rows of a table, bit for bit, of all or some iterations. The run may be incomplete.

        Raises UserError for an unknown name, column or iteration, or if a file does not have its recorded digest.
        """
        return read_table(name, self.path, columns=columns, iterations=iterations, allow_incomplete=True)


RunOrPath = Run | Path | str


def open_run(path: RunOrPath) -> Run:
    """Return the recorded run in a folder, complete or not. `latest` means the newest run in `runs`.

    Raises UserError if there is no run, or its manifest is damaged.

    Source: ppo_repro/records/README.md describes the format.

    >>> import ppo_repro
    >>> run = ppo_repro.open_run(EXAMPLE_RUN)
    >>> run.status, run.num_iterations
    ('complete', 3)
    >>> tokens = run.table("tokens", columns=["rollout_logprobs", "old_logprobs"])
    >>> bool((tokens["rollout_logprobs"] == tokens["old_logprobs"]).all())
    True
    """
    run = path if isinstance(path, Run) else Run(run_named(path))
    manifest.load_head(run.path)
    return run


def diff(a: RunOrPath, b: RunOrPath) -> Difference | None:
    """Return the first difference of two runs, in the order of computation; None if all bits are the same.

    `.describe()` returns the difference as one line. Its parts are `.table`, `.iteration`, `.column`, `.row`, `.left`,
    `.right`. Raises UserError if a file is missing or damaged, or the runs are of different kinds.

    Source: ppo_repro/records/README.md describes the digests that `diff` compares.

    >>> import ppo_repro
    >>> print(ppo_repro.diff(EXAMPLE_RUN, EXAMPLE_RUN))
    None
    """
    return first_difference(open_run(a).path, open_run(b).path)
