"""Runs from a notebook: train and record, go on after an interrupt, and execute a recorded run again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ppo_repro.commands.kinds import kind_of
from ppo_repro.commands.memory import within_memory, within_recorded
from ppo_repro.commands.progress import ConsoleProgress
from ppo_repro.commands.run_folders import how_to_go_on
from ppo_repro.config.files import apply_overrides, build_config, load_config
from ppo_repro.config.inputs import run_folder
from ppo_repro.config.run import RunConfig
from ppo_repro.errors import UserError
from ppo_repro.interrupts import heard
from ppo_repro.library.checks import Overrides, folder_of, override_lines
from ppo_repro.library.reward_file import Reward, reward_path
from ppo_repro.library.runs import Run, RunOrPath, open_run
from ppo_repro.ranks import ALONE
from ppo_repro.records import reader
from ppo_repro.runs import rerun as rerunner
from ppo_repro.runs import resume as resumer
from ppo_repro.runs import run as runner
from ppo_repro.runs.language import LanguageKind
from ppo_repro.runs.rerun import Rerun
from ppo_repro.watcher import Silent

OnIteration = Callable[[Any], object]  # takes a row of the table `iterations`, a pandas Series


class _Progress(ConsoleProgress):
    """What `ppo-repro run` shows, or nothing, and a function that is told of each iteration."""

    def __init__(self, run_dir: Path, on_iteration: OnIteration | None, shows: bool) -> None:
        super().__init__()
        self._run_dir, self._on_iteration, self._shows = run_dir, on_iteration, shows

    def _show(self, name: str, done: int, total: int, note: str) -> None:
        if self._shows:
            super()._show(name, done, total, note)

    def iteration(self, done: int, total: int, figures: str) -> None:
        super().iteration(done, total, figures)
        if self._on_iteration is not None:
            rows = reader.read_iterations(self._run_dir, iterations=[done - 1], allow_incomplete=True)
            self._on_iteration(rows.iloc[0])


@contextmanager
def _saying_how_to_go_on(run_dir: Path) -> Iterator[None]:
    """Let an interrupt say what is kept, in place of where it came from."""
    try:
        with heard():
            yield
    except KeyboardInterrupt as error:
        command = f"ppo_repro.resume({str(run_dir)!r}) or `ppo-repro resume {run_dir}`"
        raise type(error)(how_to_go_on(run_dir, command)) from None


def train(
    config: RunConfig | Mapping[str, Any] | Path | str,
    *,
    reward: Reward | str | None = None,
    on_iteration: OnIteration | None = None,
    overrides: Overrides = (),
    out: Path | str = "runs",
    progress: bool = True,
) -> Run:
    """Run PPO as `ppo-repro run` does, record every buffer, and return the run.

    `config` is a YAML file or its tree as a dict; `overrides` changes fields, as `{"ppo.epochs": 2}` or as after
    --set. `reward(prompt, response, answer)`, a function or 'FILE.py:FUNCTION', replaces the terms of the reward; a
    function of a notebook is written to OUT/rewards/ with the modules and constants that it uses. `on_iteration` is
    called with the row of the table `iterations` after each iteration; its errors end the run, and `resume` continues
    the run.

    Raises UserError in one line for a wrong configuration or reward, and for a run that exists.

    Source: the loop is ppo_repro/loop.py; ppo_repro/config/README.md names papers.

    >>> import ppo_repro
    >>> def reward(prompt, response, answer):
    ...     return float(response.strip() == answer)
    >>> scores = []
    >>> run = ppo_repro.train(
    ...     EXAMPLE_CONFIG, reward=reward, on_iteration=lambda row: scores.append(row["score_mean"]), out=EXAMPLE_OUT
    ... )
    >>> run.status, len(scores) == run.num_iterations
    ('complete', True)
    """
    folder = folder_of("out", out)
    checked = _checked(config, overrides)
    if reward is not None:
        tree = checked.model_dump(mode="json")
        term = {"kind": "function", "path": reward_path(reward, folder / "rewards")}
        checked = build_config({**tree, "reward": {**tree["reward"], "terms": [term]}}, "train")
    run_dir = run_folder(checked, folder)
    with (
        _saying_how_to_go_on(run_dir),
        _Progress(run_dir, on_iteration, progress) as watcher,
        within_memory(checked, 1),
    ):
        runner.run(LanguageKind(watcher, ALONE), checked, folder)
    return open_run(run_dir)


def _checked(config: RunConfig | Mapping[str, Any] | Path | str, overrides: Overrides) -> RunConfig:
    if isinstance(config, Path | str):
        return load_config(folder_of("config", config), override_lines(overrides))
    if not isinstance(config, RunConfig | Mapping):
        raise UserError(f"config is of type {type(config).__name__}; must be a YAML file, or a dict of its fields")
    tree = config.model_dump(mode="json") if isinstance(config, RunConfig) else copy.deepcopy(dict(config))
    apply_overrides(tree, override_lines(overrides))
    return build_config(tree, "train")


def resume(
    run: RunOrPath,
    *,
    on_iteration: OnIteration | None = None,
    overrides: Overrides = (),
    progress: bool = True,
) -> Run:
    """Go on with a run that was interrupted, killed or failed, to the bits of one that never stopped.

    It begins after the newest checkpoint, or anew; what is recorded already is computed again and compared.
    `overrides` (`{"layout.threads": 2}`) may change what must not change a bit; the others are as in `train`.

    UserError where the run is complete or written by another process, a file of it is damaged, its inputs have changed
    or an override could change a result. PromiseBroken where a bit differs from its record.

    Source: ppo_repro/runs/README.md.

    >>> import ppo_repro
    >>> def stop(row):
    ...     raise KeyboardInterrupt
    >>> try:
    ...     ppo_repro.train(EXAMPLE_CONFIG, on_iteration=stop, out=EXAMPLE_OUT)
    ... except KeyboardInterrupt:
    ...     run = ppo_repro.latest_run(EXAMPLE_OUT)
    >>> run.status
    'interrupted'
    >>> ppo_repro.resume(run).status
    'complete'
    """
    lines = override_lines(overrides)
    path = open_run(run).path
    with (
        _saying_how_to_go_on(path),
        _Progress(path, on_iteration, progress) as watcher,
        within_recorded(path, lines),
    ):
        resumer.resume(kind_of(path).executed_by(watcher, ALONE), path, lines)
    return open_run(path)


def rerun(run: RunOrPath, overrides: Overrides = ()) -> Rerun:
    """Execute a recorded run again, in memory, and compare every buffer with its files.

    `overrides` (`{"layout.threads": 2}`) may change what must not change a bit. `.difference` is None if every bit came
    out again; `.fingerprint` and `.iterations` are of the new execution. UserError where the run is not complete, its
    inputs have changed or an override could change a result.

    Source: ppo_repro/runs/README.md.

    >>> import ppo_repro
    >>> print(ppo_repro.rerun(EXAMPLE_RUN).difference)
    None
    """
    lines = override_lines(overrides)
    path = open_run(run).path
    return rerunner.rerun(kind_of(path).executed_by(Silent(), ALONE), path, lines)
