"""Run PPO from a notebook by `train`, and write a notebook's reward to a file."""

from __future__ import annotations

import ast
import dis
import hashlib
import inspect
import math
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import yaml

from ppo_repro.api.runs import Run, open_run
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import atomic_write
from ppo_repro.base.progress import ConsoleProgress
from ppo_repro.config.files import build_config, load_config
from ppo_repro.config.inputs import run_folder
from ppo_repro.config.run import RunConfig
from ppo_repro.config.tree import apply_overrides, from_pyyaml
from ppo_repro.config.yaml_text import describe_value
from ppo_repro.records import reader
from ppo_repro.records.next_command import how_to_go_on
from ppo_repro.runs.input_checks import require_inputs

PLAIN = (bool, int, float, str, type(None))  # a subclass, such as NumPy's float64, need not compute the same
Reward = Callable[[str, str, str], float]


def reward_path(reward: Reward | str, folder: Path) -> str:
    """Return `FILE.py:FUNCTION` of a reward. A notebook's function is first written to a new file in `folder`.

    The new file has the function's source, and the imports and plain constants that the function uses. Raises UserError
    if the function uses anything else, because the file would not compute the same.
    """
    if isinstance(reward, str):
        return reward
    if not isinstance(reward, FunctionType) or reward.__name__ == "<lambda>" or hasattr(reward, "__wrapped__"):
        raise UserError("reward: must be a function made by `def`, without decorators, or 'FILE.py:FUNCTION'")
    name, module = reward.__name__, sys.modules.get(reward.__module__)
    file = getattr(module, "__file__", None)
    if reward.__module__ != "__main__" and file and getattr(module, name, None) is reward:
        return f"{file}:{name}"
    try:
        source = textwrap.dedent(inspect.getsource(reward))
        (head,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError) as error:
        raise UserError(f"reward: the source of {name} cannot be read; give reward='FILE.py:FUNCTION'") from error
    if not isinstance(head, ast.FunctionDef):
        raise UserError(f"reward: {name} must be made by `def`, not by `async def`")
    nonlocals, lines = inspect.getclosurevars(reward).nonlocals, []
    for variable, value in sorted({**_globals_of(reward, head), **nonlocals}.items()):
        if isinstance(value, ModuleType):
            _require_installed(name, value)
            lines.append(f"import {value.__name__} as {variable}")
        elif type(value) in PLAIN and variable not in nonlocals:
            is_literal = not isinstance(value, float) or math.isfinite(value)
            lines.append(f"{variable} = {value!r}" if is_literal else f"{variable} = float('{value}')")
        elif value is not reward:
            raise UserError(
                f"reward: {name} uses '{variable}' of the notebook, of type {type(value).__name__}; put it inside the "
                "function, or write a file and give reward='FILE.py:FUNCTION'"
            )
    text = "\n".join([*lines, "", "", source])
    path = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(path, text.encode())
    return f"{path}:{name}"


def _globals_of(function: FunctionType, head: ast.FunctionDef) -> dict[str, object]:
    """Return the global variables that a function, functions inside it, its defaults or its annotations read.

    `head` is the parsed source of the function.
    """
    codes, names = [function.__code__], set[str]()
    for code in codes:  # which grows
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        names |= {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    around = [head.args] if head.returns is None else [head.args, head.returns]
    names |= {node.id for part in around for node in ast.walk(part) if isinstance(node, ast.Name)}
    read = {name: function.__globals__[name] for name in names if name in function.__globals__}
    return {name: value for name, value in read.items() if not name.startswith("__")}


def _require_installed(name: str, module: ModuleType) -> None:
    """Raise UserError for a module in the current folder, which a rerun elsewhere would not find."""
    file, installed = getattr(module, "__file__", None), (sys.prefix, sys.base_prefix)
    is_ours = module.__name__.partition(".")[0] == "ppo_repro"
    if (
        file
        and Path(file).is_relative_to(Path.cwd())
        and not (is_ours or any(map(Path(file).is_relative_to, installed)))
    ):
        raise UserError(
            f"reward: {name} uses the module {module.__name__} of this folder, which is not copied into the run; write "
            "the function to a file beside it and give reward='FILE.py:FUNCTION'"
        )


OnIteration = Callable[[Any], object]  # takes a row of the table `iterations`, a pandas Series


class _Progress(ConsoleProgress):
    """Watcher that shows the progress of `ppo-repro run` and calls the user's function after each iteration."""

    def __init__(self, run_dir: Path, on_iteration: OnIteration | None) -> None:
        super().__init__()
        self._run_dir, self._on_iteration = run_dir, on_iteration

    def iteration(self, done: int, total: int, figures: str, seconds: float) -> None:
        super().iteration(done, total, figures, seconds)
        if self._on_iteration is not None:
            rows = reader.read_iterations(self._run_dir, iterations=[done - 1], allow_incomplete=True)
            self._on_iteration(rows.iloc[0])


def train(
    config: RunConfig | Mapping[str, Any] | Path | str,
    *,
    reward: Reward | str | None = None,
    on_iteration: OnIteration | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    out: Path | str = "runs",
) -> Run:
    """Run PPO as `ppo-repro run` does, record every buffer, and return the run.

    Args:
        config: a YAML file, or its content as a dict, also as PyYAML reads it.
        reward: replaces the terms of the reward: a function of prompt, response and answer, or 'FILE.py:FUNCTION'; a
            notebook's function is written to OUT/rewards/ with the modules and constants that the function uses.
        on_iteration: called with the row of the table `iterations` after each iteration; its errors end the run, and
            `ppo-repro resume RUN` continues the run.
        overrides: changed fields, `{"ppo.epochs": 2}`, or a list of texts as after --set.
        out: the folder of runs.

    Raises:
        UserError: the configuration or the reward is wrong, or the run exists; the message is one line.

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
    folder, checked = Path(out), _checked(config, overrides)
    if reward is not None:
        tree = checked.model_dump(mode="json")
        term = {"kind": "function", "path": reward_path(reward, folder / "rewards")}
        checked = build_config({**tree, "reward": {**tree["reward"], "terms": [term]}}, "train")
    run_dir = run_folder(checked, folder)
    require_inputs(checked)
    from ppo_repro.base.ranks import ALONE  # mistakes are reported before the slow import of torch
    from ppo_repro.runs import run as runner
    from ppo_repro.runs.language import LanguageKind

    try:
        with _Progress(run_dir, on_iteration) as watcher:
            runner.run(LanguageKind(watcher, ALONE), checked, folder)
    except KeyboardInterrupt as error:
        raise type(error)(how_to_go_on(run_dir)) from None
    return open_run(run_dir)


def _checked(
    config: RunConfig | Mapping[str, Any] | Path | str, overrides: Mapping[str, Any] | Sequence[str]
) -> RunConfig:
    if isinstance(overrides, Mapping):
        overrides = [f"{name}={_as_yaml(name, value)}" for name, value in from_pyyaml(overrides).items()]
    if isinstance(overrides, str) or not all(isinstance(override, str) for override in overrides):
        raise UserError(f"overrides = {overrides!r}: must be a dict, or a list of texts such as 'ppo.epochs=2'")
    if isinstance(config, Path | str):
        return load_config(Path(config), overrides)
    if not isinstance(config, RunConfig | Mapping):
        raise UserError(f"config is of type {type(config).__name__}; must be a YAML file, or a dict of its fields")
    tree = config.model_dump(mode="json") if isinstance(config, RunConfig) else from_pyyaml(config)
    apply_overrides(tree, overrides)
    return build_config(tree, "train")


def _as_yaml(name: str, value: Any) -> str:
    try:
        return describe_value(value)
    except yaml.YAMLError as error:
        kind = type(value).__name__
        raise UserError(f"overrides: {name} = {value!r} is of type {kind}; must be plain data, as in YAML") from error
