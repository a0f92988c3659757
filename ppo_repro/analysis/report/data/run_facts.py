"""Read the facts about a recorded run: configuration, environment, tables by iteration, how to repeat the run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from ppo_repro.analysis.report.data.metrics import CONTENT, PageContent
from ppo_repro.analysis.run_tables import RunTables
from ppo_repro.base.errors import UserError
from ppo_repro.config.control import ControlConfig
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.records import reader
from ppo_repro.records.changes import change_lines, forked_from
from ppo_repro.records.folder import CONFIG_NAME, ENVIRONMENT_NAME, STARTED, load_any_recorded_config
from ppo_repro.records.label import read_label
from ppo_repro.records.manifest import Manifest
from ppo_repro.records.notes import read_card, read_note
from ppo_repro.runs.results import is_judged


@dataclass(frozen=True)
class Facts:
    """Facts about a recorded run; `name` is its label and experiment/folder, without a path of the machine."""

    run_dir: Path
    name: str
    manifest: Manifest
    config: RunConfig | ControlConfig | DPOConfig
    config_text: str
    environment: Mapping[str, Any]
    is_judged: bool  # whether responses are right or wrong; otherwise an accuracy means nothing
    # the tables of the iterations that the manifest counts; a run in progress may have more now
    iterations: pd.DataFrame
    steps: pd.DataFrame

    @property
    def tables(self) -> RunTables:
        """Return the tables of all recorded iterations."""
        return RunTables(self.run_dir, self.manifest, range(self.manifest.num_iterations))

    @property
    def own_iterations(self) -> pd.DataFrame:
        """Return the rows of `iterations` without those that a fork copied, which have the settings of its origin."""
        return reader.own_rows(self.iterations, self.manifest)

    @property
    def own_steps(self) -> pd.DataFrame:
        """Return the rows of `steps` without those that a fork copied."""
        return reader.own_rows(self.steps, self.manifest)

    @property
    def forked_at(self) -> int | None:
        """Return the first iteration that a fork computed; None for other runs."""
        return None if self.manifest.origin is None else self.manifest.origin.iteration

    @property
    def code(self) -> dict[str, str]:
        """Return the user's Python files that the run saved, by name."""
        names = [name for name in sorted(self.manifest.inputs) if name.startswith("inputs/") and name.endswith(".py")]
        files = {name: reader.read_checked(self.run_dir / name, self.manifest.files[name]) for name in names}
        return {name: content.decode(errors="replace") for name, content in files.items()}

    @property
    def content(self) -> PageContent:
        """Return what the pages of this kind of run show."""
        return CONTENT[self.manifest.kind]


def read_facts(run_dir: Path) -> Facts:
    """Read the facts of a run of any kind, complete or not.

    Raises UserError if the run is damaged or completed no iteration itself.
    """
    manifest = reader.open_manifest(run_dir, allow_incomplete=True)
    if not manifest.own_iterations:
        advice = f"go on with `ppo-repro resume {shlex.quote(str(run_dir))}`"
        raise UserError(f"{run_dir}: the run is {manifest.status} and has no complete iteration to report; {advice}")
    config, label = load_any_recorded_config(run_dir, manifest), read_label(run_dir).name
    name = f"{config.experiment}/{run_dir.resolve().name}"
    return Facts(
        run_dir=run_dir,
        name=f"{label} ({name})" if label else name,
        manifest=manifest,
        config=config,
        config_text=(run_dir / CONFIG_NAME).read_text(encoding="utf-8"),
        environment=read_note(run_dir, manifest, ENVIRONMENT_NAME),
        is_judged=not isinstance(config, RunConfig) or is_judged(run_dir, manifest, config.reward),
        iterations=reader.read_iterations(run_dir, recorded=manifest),
        steps=reader.read_steps(run_dir, recorded=manifest),
    )


def repeating(facts: Facts) -> dict[str, str]:
    """Return by name the facts that identify a run and its machine."""
    run_dir, manifest, environment, config = facts.run_dir, facts.manifest, facts.environment, facts.config
    packages = environment.get("packages", {})
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "transformers", "numpy") if name in packages)
    commit = str(environment.get("git_commit") or "no commit")[:12]
    dirty = " with changes" if environment.get("git_dirty") else ""
    origin, card = manifest.origin, read_card(run_dir, manifest)
    began = environment.get(STARTED)
    forked = {}
    if origin is not None:
        changed = "; ".join(change_lines(origin.changed)) or "nothing"
        forked = {"forked from": forked_from(origin, Path(origin.run).name), "changed": changed}
    return {
        "fingerprint": manifest.fingerprint,
        **forked,
        "configuration": manifest.config_digest,
        "numerics": f"{config.numerics.mode}, seed {config.seed}",
        "code": f"ppo_repro {environment.get('ppo_repro', 'not recorded')}, {commit}{dirty}",
        "versions": f"Python {environment.get('python', 'not recorded')}, {versions}",
        "machine": f"{environment.get('platform', 'not recorded')}, {environment.get('cpu_capability', '')}",
        **({} if card is None else {"card": card.sentence()}),
        "layout": f"threads {environment.get('threads', '?')}, processes {environment.get('processes', '?')}",
        "began": "not recorded" if began is None else f"{datetime.fromisoformat(began):%Y-%m-%d %H:%M:%S} UTC",
    }
