"""The names of the files in a run folder, its checkpoints and its configuration."""

from __future__ import annotations

import re
from pathlib import Path

from ppo_repro.base.files import SUMS_NAME
from ppo_repro.config.files import build_config, read_tree, validated
from ppo_repro.config.kinds import CONFIGS, LANGUAGE, AnyConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.records import manifest, reader
from ppo_repro.records.manifest import Head

CONFIG_NAME = "config.yaml"
ENVIRONMENT_NAME = "environment.json"
STARTED = "started"  # when a process began, in environment.json and in the environment of each resumed-NNN.json
RESUMED = "resumed-*.json"
ACCURACY_NAME = "accuracy.json"
TIMES_NAME = "times.json"
CARD_NAME = "card.json"
CHECKPOINTS_NAME = "checkpoints"
CHECKPOINT = re.compile(r"checkpoints/iteration-(\d{6,})\.safetensors")
_MODELS = "reference|final|value_model|base|adapter|reward_model|unequal"
MODEL_FOLDER = re.compile(rf"checkpoints/({_MODELS})(\.tmp|\.removed)?(?=/|$)")  # or what a killed process left of it
REFERENCE = "checkpoints/reference"  # with its tokenizer: what policy and value model started as, too
FINAL = "checkpoints/final"  # the trained policy
VALUE_MODEL = "checkpoints/value_model"  # the trained value model, or its head on the policy's trunk
FINAL_STATE = "checkpoints/final_state.safetensors"  # a checkpoint without the weights of the trained models
UNEQUAL = "checkpoints/unequal"  # the policy when bits were unequal, and `unequal.parquet`; of control runs the latter
UNEQUAL_TOKENS = "unequal.parquet"
FORKED_FROM = "inputs/checkpoint.safetensors"  # what a fork began with
REPORT_NAME = "report.html"
SERVERS_NAME = "sglang"  # logs of the servers, and the weights they loaded
ENGINE_NAME = "engine"  # the weights that the user's own engine loaded


def checkpoints_of(head: Head) -> dict[int, str]:
    """Return the checkpoints in the manifest: path relative to the run folder, by iteration, oldest first."""
    named = [(CHECKPOINT.fullmatch(name), name) for name in sorted(head.files)]
    return {int(match[1]): name for match, name in named if match}


def starts_of(run_dir: Path, head: Head) -> dict[int, str]:
    """Return the checkpoints from which a run can continue, by iteration. A fork also has the one it began with."""
    forked = {} if head.origin is None else {head.origin.iteration: FORKED_FROM}
    return {number: name for number, name in (forked | checkpoints_of(head)).items() if (run_dir / name).exists()}


def has_reference(head: Head) -> bool:
    """Return whether the run folder has the model that the run started as."""
    return f"{REFERENCE}/{SUMS_NAME}" in head.files


def checked_config_path(run_dir: Path, recorded: Head) -> Path:
    """Return the path of config.yaml. Raises UserError unless the file is as written when the run was started."""
    reader.read_checked(run_dir / CONFIG_NAME, recorded.files[CONFIG_NAME])
    return run_dir / CONFIG_NAME


def load_recorded_config(run_dir: Path | str) -> RunConfig:
    """Load the configuration with which a language run was started.

    Raises UserError if the file or the manifest is missing or damaged, or the run is of another kind.
    """
    path = checked_config_path(Path(run_dir), manifest.load_head(Path(run_dir)))
    return build_config(read_tree(path, (), (LANGUAGE,)), str(path))


def load_any_recorded_config(run_dir: Path, recorded: Head) -> AnyConfig:
    """Load the configuration with which a run of any kind was started. Raises UserError if it is missing or damaged."""
    path = checked_config_path(run_dir, recorded)
    return validated(CONFIGS[recorded.kind], read_tree(path), str(path))
