"""Check a language run's inputs without importing torch, which takes seconds."""

from __future__ import annotations

from pathlib import Path

from ppo_repro.config.model import ModelFolder
from ppo_repro.config.run import RunConfig
from ppo_repro.config.tasks import ArithmeticTask, ColumnAdditionTask, JsonlTask
from ppo_repro.config.tree import path_fields
from ppo_repro.models.folder_files import check_folder
from ppo_repro.tasks.problems import load_source
from ppo_repro.user.file import file_and_name


def require_inputs(config: RunConfig) -> None:
    """Raise UserError if a run could not use its prompts, its model folder or the file of a user's function.

    No function of the user is called.
    """
    for field, section, name in path_fields(config.model_dump(mode="json")):
        if ".py:" in section[name]:
            file_and_name(field, section[name])
    if isinstance(config.task, JsonlTask | ArithmeticTask | ColumnAdditionTask):
        load_source(config.task, config.seed)
    if isinstance(config.model, ModelFolder):
        check_folder(Path(config.model.path), f"model.path = {config.model.path}")
