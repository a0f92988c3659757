"""Paths in a run folder that are not tables."""

from __future__ import annotations

import re
from pathlib import Path

from ppo_repro.records.manifest import Head

CHECKPOINTS_NAME = "checkpoints"
CHECKPOINT = re.compile(r"checkpoints/iteration-(\d{6,})\.safetensors")
REFERENCE = "checkpoints/reference"  # with its tokenizer: what policy and value model started as, too
FINAL = "checkpoints/final"  # the trained policy
VALUE_MODEL = "checkpoints/value_model"  # the trained value model, or its head on the policy's trunk
FINAL_STATE = "checkpoints/final_state.safetensors"  # a checkpoint without the weights of the trained models
UNEQUAL = "checkpoints/unequal"  # the policy when bits were unequal, and `unequal.parquet`; of control runs the latter
FORKED_FROM = "inputs/checkpoint.safetensors"  # what a fork began with
REPORT_NAME = "report.html"
SERVERS_NAME = "sglang"  # logs of the servers, and the weights they loaded


def checkpoints_of(head: Head) -> dict[int, str]:
    """The checkpoints that the manifest lists: path below the run folder by iteration, oldest first."""
    named = [(CHECKPOINT.fullmatch(name), name) for name in sorted(head.files)]
    return {int(match[1]): name for match, name in named if match}


def starts_of(run_dir: Path, head: Head) -> dict[int, str]:
    """What a run can go on from: the checkpoints that are there, and the one that a fork began with."""
    forked = {} if head.origin is None else {head.origin.iteration: FORKED_FROM}
    return {number: name for number, name in (forked | checkpoints_of(head)).items() if (run_dir / name).exists()}
