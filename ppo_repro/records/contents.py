"""Paths in a run folder that are not tables."""

from __future__ import annotations

import re
from pathlib import Path

CHECKPOINTS_NAME = "checkpoints"
CHECKPOINT = re.compile(r"checkpoints/iteration-(\d{6,})\.safetensors")
REFERENCE = "checkpoints/reference"  # with its tokenizer: what policy and value model started as, too
FINAL = "checkpoints/final"  # the trained policy
VALUE_MODEL = "checkpoints/value_model"  # the trained value model, or its head on the policy's trunk
FINAL_STATE = "checkpoints/final_state.safetensors"  # a checkpoint without the weights of the trained models
UNEQUAL = "checkpoints/unequal"  # the policy when bits were unequal, and `unequal.parquet`; of control runs the latter
REPORT_NAME = "report.html"
SERVERS_NAME = "sglang"  # logs of the servers, and the weights they loaded


def checkpoint_file(run_dir: Path, iteration: int) -> Path:
    """The checkpoint after `iteration` iterations."""
    return run_dir / CHECKPOINTS_NAME / f"iteration-{iteration:06d}.safetensors"
