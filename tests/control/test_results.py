"""What a control run records follows from its episodes and from stock autograd, and every option has an effect."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ppo_repro.control.loop import control_iterations, prepare
from ppo_repro.records import manifest, reader
from tests.support.control import run, small_control

LIMITED = ("environment.id=tests/Limited-v0", "ppo.iterations=3", "evaluation.episodes=0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("control")


@pytest.fixture(scope="module")
def limited(folder: Path) -> Path:
    return run(small_control(*LIMITED), folder)[0]


def test_results_follow_from_the_records(control_run: Path) -> None:
    sequences = reader.read_sequences(control_run)
    ended = sequences.dropna(subset=["episode_return"]).sort_values(["iteration", "last_step", "environment"])
    final = reader.open_manifest(control_run).final
    assert final["episodes"] == len(ended)
    assert final["last_100_return"] == math.fsum(ended["episode_return"].tail(100)) / min(100, len(ended))
    assert (ended["episode_return"] == ended["first_step"] + ended["fragment_length"]).all(), "CartPole pays 1 a step"
    by_iteration = ended.groupby("iteration")["episode_return"].mean().to_dict()
    logged = reader.read_iterations(control_run).set_index("iteration")["episode_return_mean"].dropna().to_dict()
    assert by_iteration == logged, "sums of whole numbers, so the means are exact in pandas too"


def test_updates_hold_what_the_losses_used(control_run: Path) -> None:
    tokens, updates = reader.read_tokens(control_run), reader.read_updates(control_run)
    steps, key = reader.read_steps(control_run), ["iteration", "sequence", "position"]
    joined = updates.merge(tokens, on=key, validate="many_to_one")
    assert len(updates) == 2 * len(tokens)
    assert not updates.duplicated([*key, "epoch"]).any()
    for _, batch in joined.groupby(["iteration", "epoch", "minibatch"]):
        raw = batch["raw_advantages"].astype(float)
        expected = (raw - raw.mean()) / math.sqrt(raw.var(ddof=0) + 1e-8)
        assert batch["advantages"].to_numpy() == pytest.approx(expected.to_numpy(), rel=1e-5, abs=1e-6)
        assert len(batch) == 60
    assert joined["ratios"].to_numpy() == pytest.approx(
        np.exp(joined["new_logprobs"] - joined["rollout_logprobs"].astype(float)), rel=1e-6
    )
    assert joined["returns"].to_numpy() == pytest.approx(joined["raw_advantages"] + joined["values"], rel=1e-6)
    minibatches = [updates[name] for name in ("iteration", "epoch", "minibatch")]
    removed = updates["clip_flag"].str.startswith("clip_").groupby(minibatches)
    assert removed.mean().to_numpy() == pytest.approx(steps["clip_fraction"].to_numpy())
    assert steps["learning_rate"].to_numpy() == pytest.approx(3e-3 * (1 - steps["iteration"] / 4))


def test_the_gradient_norm_is_that_of_both_networks() -> None:
    """The same first step by stock autograd in float64, with one loss over both networks."""
    config = small_control("ppo.iterations=1", "ppo.epochs=1", "ppo.minibatch_size=240", "evaluation.episodes=0")
    state = prepare(config)
    twin = prepare(small_control("ppo.iterations=1", "numerics.mode=native")).agent.double()
    (item,) = control_iterations(config, state)
    (step,) = item.updates
    x = item.rollout.observations.double()
    log_p = twin.actor(x).log_softmax(-1)
    chosen = log_p.gather(1, item.rollout.actions.long())[:, 0]
    surrogate = -((chosen - item.rollout.rollout_logprobs.double()).exp() * step.advantages.double()).mean()
    entropy = -(log_p.exp() * log_p).sum(-1).mean()
    value_loss = 0.5 * ((twin.critic(x)[:, 0] - item.advantages.returns.double()) ** 2).mean()
    (surrogate - 0.01 * entropy + 0.5 * value_loss).backward()
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in twin.parameters()))
    assert step.joint_grad_norm == pytest.approx(norm, rel=1e-6)
    assert step.policy_loss == pytest.approx((surrogate - 0.01 * entropy).item(), abs=1e-5)
    assert step.value_loss == pytest.approx(value_loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    "override",
    [
        "ppo.bootstrap_truncated=false",
        "ppo.whiten_advantages=iteration",
        "ppo.whiten_advantages=none",
        "ppo.value_clip_range=null",
        "ppo.value_coef=1.0",
        "ppo.clip_range_schedule=linear",
        "ppo.max_grad_norm=0.1",
        "ppo.adam_eps=1e-3",
        "network.hidden_size=32",
    ],
)
def test_every_option_has_an_effect(override: str, limited: Path, tmp_path: Path) -> None:
    changed = run(small_control(*LIMITED, override), tmp_path)[0]
    assert manifest.load(limited).fingerprint != manifest.load(changed).fingerprint
