"""PPO with a KL penalty ends at the optimum, which is computed from all possible responses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from experiments.optimum.exact import Distance, distances, objective, optimum, read
from ppo_repro.base.watcher import Silent
from ppo_repro.config.files import load_config
from ppo_repro.runs.prepare import prepare
from tests.support.language import run
from tests.support.models import seeded
from tests.support.paths import ROOT

CONFIG = ROOT / "experiments" / "optimum" / "optimum.yaml"


def logits(seed: int, count: int) -> Tensor:
    return torch.randn(count, generator=seeded(seed), dtype=torch.float64).log_softmax(0)


def test_an_optimum_worked_by_hand() -> None:
    beta = 0.5
    rewards = torch.tensor([0.0, beta * math.log(2.0)], dtype=torch.float64)
    half = torch.full((2,), math.log(0.5), dtype=torch.float64)
    best, log_best = optimum(half, rewards, beta)
    # Z = 1/2 + 1/2 * 2; pi* = (1/3, 2/3)
    assert best == pytest.approx(beta * math.log(1.5), abs=1e-15)
    assert log_best.exp().tolist() == pytest.approx([1 / 3, 2 / 3], abs=1e-15)


@given(st.integers(0, 999), st.integers(0, 999), st.floats(0.05, 5.0), st.integers(2, 40))
def test_an_objective_falls_short_of_the_optimum_by_beta_times_the_kl_from_it(
    of_policy: int, of_reference: int, beta: float, count: int
) -> None:
    log_p, log_ref = logits(of_policy, count), logits(of_reference + 1000, count)
    rewards = torch.randn(count, generator=seeded(of_policy + of_reference), dtype=torch.float64)
    best, log_best = optimum(log_ref, rewards, beta)
    shortfall = beta * math.fsum((log_p.exp() * (log_p - log_best)).tolist())
    # float64 sums of at most 40 terms; rewards / beta up to 100
    assert objective(log_p, log_ref, rewards, beta) == pytest.approx(best - shortfall, abs=1e-11)
    assert objective(log_best, log_ref, rewards, beta) == pytest.approx(best, abs=1e-11)
    assert shortfall >= -1e-11


def test_before_training_the_policy_is_the_reference_and_far_from_the_optimum() -> None:
    config = load_config(CONFIG)
    prepared = prepare(config, Silent())
    found = distances(config, prepared, prepared.state.policy, config.kl.kl_coef)
    assert len(found) == 3
    for d in found:
        assert (d.policy, d.kl) == (d.reference, 0.0)
    assert gap(found) > 0.5


def gap(found: list[Distance]) -> float:
    """What the mean objective falls short of the mean optimum, relative to that."""
    return 1.0 - sum(d.policy for d in found) / sum(d.optimum for d in found)


FASTER = ["ppo.learning_rate=6e-4", "value.learning_rate=2e-3"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ppo_with_the_kl_in_the_reward_comes_within_three_percent_of_the_optimum(tmp_path: Path) -> None:
    config = load_config(CONFIG, [*FASTER, "ppo.iterations=30"])
    found = read(run(config, tmp_path)[0])
    assert 0.0 < gap(found) < 0.03
    assert all(d.policy < d.optimum for d in found)
    # control: training without the penalty ends below the reference, by the objective with it
    free = run(load_config(CONFIG, [*FASTER, "ppo.iterations=12", "kl.kl_coef=0"]), tmp_path)[0]
    assert gap(read(free, config.kl.kl_coef)) > 1.0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_published_run_comes_within_one_percent(tmp_path: Path) -> None:
    assert 0.0 < gap(read(run(load_config(CONFIG), tmp_path)[0])) < 0.01
