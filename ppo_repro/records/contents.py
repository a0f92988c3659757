"""Names of the files and folders of a run that are not tables."""

from __future__ import annotations

import re
from pathlib import Path

CHECKPOINTS_NAME = "checkpoints"
CHECKPOINT = re.compile(r"checkpoints/iteration-(\d{6,})\.safetensors")  # path of one, below the run folder
UNEQUAL_NAME = "unequal"  # what there is to look at of a run that ended because bits were
REPORT_NAME = "report.html"
SERVERS_NAME = "sglang"  # logs of the servers, and the weights they loaded


def checkpoints_folder(run_dir: Path) -> Path:
    """The folder of the checkpoints, the reference and at the end the trained models."""
    return run_dir / CHECKPOINTS_NAME


def reference_folder(run_dir: Path) -> Path:
    """The reference model with its tokenizer: what policy and value model started as, too."""
    return checkpoints_folder(run_dir) / "reference"


def final_folder(run_dir: Path) -> Path:
    """The trained policy of a finished run."""
    return checkpoints_folder(run_dir) / "final"


def value_folder(run_dir: Path) -> Path:
    """The trained value model of a finished run, or its head on the policy's trunk."""
    return checkpoints_folder(run_dir) / "value_model"


def final_state_file(run_dir: Path) -> Path:
    """What training goes on from besides the trained models: a checkpoint without their weights."""
    return checkpoints_folder(run_dir) / "final_state.safetensors"


def checkpoint_file(run_dir: Path, iteration: int) -> Path:
    """The checkpoint after `iteration` iterations."""
    return checkpoints_folder(run_dir) / f"iteration-{iteration:06d}.safetensors"


def unequal_folder(run_dir: Path) -> Path:
    """A transformers folder of the policy as it was, and beside it `unequal.parquet`; of control runs the latter."""
    return checkpoints_folder(run_dir) / UNEQUAL_NAME
