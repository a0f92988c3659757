"""PPO in one file computes the bits of a recorded run of the quickstart, without the package's own loop."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import ppo_repro
from experiments.single_file import ppo
from ppo_repro.config.files import load_config
from tests.support.language import run
from tests.support.paths import ROOT

ITERATIONS = 2
ACCURACY = 0.02  # after which the warm start ends, so that it is short
Columns = dict[str, np.ndarray]


def columns_of_file(clip_range: float) -> Columns:
    """The results of the file, under the names of the tables; a list in a table is flat here."""
    iterations = list(ppo.ppo(ITERATIONS, ACCURACY, clip_range))
    rollouts, steps = [rollout for rollout, _ in iterations], [step for _, of_it in iterations for step in of_it]
    token_ids = [token for rollout in rollouts for response in rollout.responses for token in response]
    found: Columns = {"tokens.token_id": np.array(token_ids, np.int32)}
    scores = torch.cat([rollout.scores for rollout in rollouts])
    found["sequences.scores"] = scores.double().numpy()
    for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "rewards", "values", "advantages", "returns"):
        found[f"tokens.{name}"] = torch.cat([getattr(rollout, name) for rollout in rollouts]).numpy()
    for name in ("new_logprobs", "ratios", "policy_losses", "new_values", "value_losses"):
        found[f"updates.{name}"] = torch.cat([getattr(step, name) for step in steps]).numpy()
    for name in ("grad_norm", "value_grad_norm", "policy_digest", "value_digest"):
        found[f"steps.{name}"] = np.array([getattr(step, name) for step in steps])
    found["steps.clip_fraction"] = np.array([step.is_clipped.double().mean().item() for step in steps])
    return found


def recorded(folder: Path, name: str) -> np.ndarray:
    table, column = name.split(".")
    values: pd.Series = ppo_repro.open_run(folder).table(table, columns=[column])[column]
    return values.to_numpy()


def is_same(ours: np.ndarray, theirs: np.ndarray) -> bool:
    if theirs.dtype == object:  # texts
        return ours.tolist() == theirs.tolist()
    return ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()


def unequal(found: Columns, folder: Path) -> set[str]:
    """The columns that differ in any bit."""
    return {name for name, values in found.items() if not is_same(values, recorded(folder, name))}


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changed = [f"ppo.iterations={ITERATIONS}", f"model.warm_start_accuracy={ACCURACY}", "layout.threads=1"]
    config = load_config(ROOT / "experiments" / "quickstart.yaml", changed)
    return run(config, tmp_path_factory.mktemp("quickstart"))[0]


def test_the_file_has_the_bits_of_the_recorded_run(quickstart: Path) -> None:
    assert unequal(columns_of_file(clip_range=0.2), quickstart) == set()


def test_with_another_clip_range_it_has_not(quickstart: Path) -> None:
    found = unequal(columns_of_file(clip_range=0.1), quickstart)
    assert {"steps.policy_digest", "updates.policy_losses", "tokens.rollout_logprobs"} <= found


def test_the_file_is_short_and_needs_neither_stages_nor_configuration() -> None:
    text = Path(ppo.__file__).read_text(encoding="utf-8")
    imported = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    folders = {str(module).split(".")[1] for module in imported if str(module).startswith("ppo_repro.")}
    assert "numerics" in folders
    assert folders.isdisjoint({"stages", "loop", "config", "runs", "ppo"})
    assert len(text.splitlines()) <= 300
