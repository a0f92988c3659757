"""Shares of the measured peak by hand, and files written before there were any."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from ppo_repro.records import reader, schema
from ppo_repro.runs import profiling
from ppo_repro.runs.profiling import Peak
from ppo_repro.runs.summary import profile

SPEED = ("tokens_per_second", "memory_peak", "peak_fraction_rollout", "peak_fraction_forward", "peak_fraction_update")


def test_shares_of_the_peak_by_hand() -> None:
    rollout = SimpleNamespace(
        prompts=SimpleNamespace(prompt_ids=((1, 2), (3,))),
        lengths=torch.tensor([3, 2]),
        sequence_of_token=lambda: torch.tensor([0, 0, 0, 1, 1]),
    )
    step = SimpleNamespace(tokens=torch.tensor([3, 4]), policy=None, value=object())
    both = SimpleNamespace(tokens=torch.tensor([0, 1, 2]), policy=object(), value=object())
    seconds = {"rollout": 2.0, "forward": 0.0, "update": 4.0}
    item = SimpleNamespace(rollout=rollout, updates=(step, both), seconds=seconds)
    found = profiling.fractions(item, Peak(rate=10.0, policy=100, value=50))  # type: ignore[arg-type]
    # inputs: 2 + 3 - 1 = 4 and 1 + 2 - 1 = 2 tokens
    assert found["rollout"] == 6 * 100 / (2.0 * 10.0)
    assert math.isnan(found["forward"])
    assert found["update"] == 3 * (2 * 50 + 4 * 150) / (4.0 * 10.0)


def test_products_are_those_of_matrices_not_of_embeddings() -> None:
    tied = nn.Module()
    tied.embed, tied.norm, tied.head = nn.Embedding(7, 5), nn.LayerNorm(5), nn.Linear(5, 7)
    assert profiling.products_of(tied) == 35


def test_a_run_records_its_speed_outside_of_the_fingerprint(deterministic_run: Path) -> None:
    rows = reader.read_iterations(deterministic_run)
    assert (rows["tokens_per_second"] > 0).all() and (rows["memory_peak"] > 2**20).all()
    assert rows[["peak_fraction_rollout", "peak_fraction_forward", "peak_fraction_update"]].isna().all(axis=None)
    assert math.isnan(profile(deterministic_run).peak_fraction["all"])  # it was not asked to measure
    assert not any(column.in_fingerprint for column in schema.ITERATIONS.columns if column.name in SPEED)
