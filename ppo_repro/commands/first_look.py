"""What is checked before torch is imported, which takes seconds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_repro.errors import Mistakes, UserError

if TYPE_CHECKING:
    from ppo_repro.config.run import RunConfig


def overrides(arguments: argparse.Namespace) -> list[str]:
    """The fields that the command line sets, `--seed` among them; UserError where it gives the seed twice."""
    if arguments.seed is None:
        return list(arguments.set)
    if any(override.partition("=")[0].strip() == "seed" for override in arguments.set):
        raise UserError(f"--seed {arguments.seed}: --set seed=... gives the seed too; keep one")
    return [*arguments.set, f"seed={arguments.seed}"]


def check_files(config: RunConfig) -> None:
    """Read what a configuration names, without torch; UserError with a line for every file that is not right.

    Files of models are looked at and not loaded, files of functions read and not executed. What a look cannot find
    is found when they are.
    """
    wrong: list[str] = []
    for check in (_prompts, _functions, _models):
        try:
            check(config)
        except Mistakes as error:
            wrong += error.lines
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        raise Mistakes(wrong)


def _prompts(config: RunConfig) -> None:
    from ppo_repro.config.tasks import JsonlTask

    if isinstance(config.task, JsonlTask):
        from ppo_repro.tasks.problems import read_jsonl, split

        problems = read_jsonl(Path(config.task.path), config.task.chat_template)
        split(problems, config.task.num_eval_prompts, config.seed)


def _functions(config: RunConfig) -> None:
    from ppo_repro.tasks.user_code import check_function, function_paths

    for field, function in function_paths(config.reward):
        check_function(field, function)


def _models(config: RunConfig) -> None:
    from ppo_repro.config.reward import RewardModelFolder
    from ppo_repro.config.run import ModelFolder
    from ppo_repro.models.folder_files import check_config, check_tokenizer, check_weights

    folders, term = [], config.reward.model
    if isinstance(config.model, ModelFolder):
        folders.append((config.model.path, f"model.path = {config.model.path}"))
    if isinstance(term, RewardModelFolder):
        folders.append((term.path, f"reward model {term.path}"))
    for path, where in folders:
        for check in (check_config, check_tokenizer, check_weights):
            check(Path(path), where)
