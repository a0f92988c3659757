"""Fragments of episodes, what follows them, and the advantages of both, by hand and by definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ppo_repro.base.errors import UserError
from ppo_repro.config.control import ControlConfig
from ppo_repro.control.environments import Environments
from ppo_repro.control.loop import ControlState, compute_advantages, evaluate, forward_pass, prepare, roll_out
from tests.support.control import small_control


def prepared(name: str, *overrides: str) -> tuple[ControlConfig, ControlState]:
    config = small_control(
        f"environment.id={name}", "environment.num_envs=2", "environment.steps_per_env=5", "ppo.minibatch_size=5",
        "evaluation.episodes=0", *overrides,
    )  # fmt: skip
    return config, prepare(config)


@pytest.mark.parametrize(("name", "end"), [("Ending", "terminated"), ("Limited", "truncated"), ("Both", "terminated")])
def test_a_rollout_whose_every_step_is_known(name: str, end: str) -> None:
    config, state = prepared(f"tests/{name}-v0")
    first = roll_out(config, state.agent, state.environments, 0)
    assert first.lengths.tolist() == [3, 2, 3, 2]
    assert (first.end_reason, first.environment) == ((end, "cut") * 2, (0, 0, 1, 1))
    assert first.observations[:, 0].tolist() == [0, 1, 2, 0, 1] * 2, "after an end the next episode begins"
    assert first.rewards.tolist() == [1, 2, 3, 1, 2] * 2
    assert first.final_observations[:, 0].tolist() == [3, 2] * 2, "the last observation, not that of the reset"
    assert (first.episode_return, first.last_step) == ((6.0, 3.0) * 2, (2, 4) * 2)
    assert len(set(first.seed)) == 4
    assert first.episode == (0, 1) * 2
    second = roll_out(config, state.agent, state.environments, 1)
    assert second.actions.tolist() != first.actions.tolist(), "each iteration draws anew from two actions as likely"
    assert second.lengths.tolist() == [1, 3, 1] * 2
    assert second.first_step == (2, 0, 0) * 2
    assert second.seed[0] == first.seed[1], "episodes go on"
    assert second.episode == (1, 2, 3) * 2, "episodes go on"
    assert second.observations[0].tolist() == first.final_observations[1].tolist()
    assert second.episode_return[0] == 6.0, "the return of the whole episode, not of the fragment"


def by_hand(rewards: list[float], values: list[float], follows: float, gamma: float, decay: float) -> list[float]:
    """A_t = sum_k (gamma lambda)^k (r_{t+k} + gamma V_{t+k+1} - V_{t+k}), summed as it is written."""
    following = [*values[1:], follows]
    errors = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [sum((gamma * decay) ** k * e for k, e in enumerate(errors[t:])) for t in range(len(errors))]


@pytest.mark.parametrize("name", ["Ending", "Limited"])
@pytest.mark.parametrize("bootstrap", ["true", "false"])
def test_advantages_of_every_fragment_by_definition(name: str, bootstrap: str) -> None:
    config, state = prepared(f"tests/{name}-v0", f"ppo.bootstrap_truncated={bootstrap}", "ppo.gamma=0.9")
    roll_out(config, state.agent, state.environments, 0)  # so that fragments begin inside episodes
    rollout = roll_out(config, state.agent, state.environments, 1)
    forward = forward_pass(config, state.agent, rollout)
    found = compute_advantages(config, rollout, forward)
    lengths = rollout.lengths.tolist()

    def parts(x: Tensor) -> list[list[float]]:
        return [part.tolist() for part in x.split(lengths)]

    for i, (rewards, values, raw) in enumerate(
        zip(parts(rollout.rewards), parts(forward.values), parts(found.raw_advantages), strict=True)
    ):
        nothing = rollout.end_reason[i] in (("terminated",) if bootstrap == "true" else ("terminated", "truncated"))
        with torch.no_grad():
            follows = 0.0 if nothing else state.agent.values(rollout.final_observations[i : i + 1]).item()
        assert raw == pytest.approx(by_hand(rewards, values, follows, 0.9, 0.95), rel=1e-5, abs=1e-5)
    assert found.returns.tolist() == (found.raw_advantages + forward.values).tolist()


def test_an_evaluation_is_the_mean_return_of_the_first_episode_of_each_copy() -> None:
    """Copies that end early go on, through several episodes, until the last one ends its first."""
    config, state = prepared("tests/Ragged-v0", "evaluation.episodes=6")
    returns = []
    for copy in Environments("tests/Ragged-v0", 6, "evaluation", config.seed).copies:
        copy.env.reset(seed=copy.seed)
        length = copy.env.unwrapped.length
        returns.append(length * (length + 1) / 2)  # the rewards are 1, 2, 3, ...
    assert min(returns) < 6 < 28 < max(returns)
    assert evaluate(config, state.agent) == sum(returns) / 6


def test_actions_are_clipped_to_their_space_and_recorded_as_drawn() -> None:
    config, state = prepared("Pendulum-v1")
    with torch.no_grad():
        state.agent.distribution.log_std.fill_(3.0)
    rollout = roll_out(config, state.agent, state.environments, 0)
    drawn = rollout.actions[:, 0]
    assert drawn.abs().max() > 2, "or nothing was clipped"
    env = Environments("Pendulum-v1", 2, "training", config.seed).copies[0].env
    for t in range(5):
        observation, reward, *_ = env.step(np.clip(rollout.actions[t].numpy(), -2.0, 2.0))
        assert rollout.rewards[t].item() == np.float32(reward)
        if t < 4:
            assert rollout.observations[t + 1].tolist() == observation.tolist()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoSuch-v0", "gymnasium cannot make it"),
        ("tests/Endless-v0", "has no time limit"),
        ("Taxi-v4", "must be a Box of one axis"),
    ],
)
def test_environments_that_are_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Environments(name, 1, "training", 0)
    assert "environment.id" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_minibatch_that_does_not_divide_the_steps_is_refused() -> None:
    with pytest.raises(UserError, match=r"ppo\.minibatch_size = 7 must divide the 240"):
        small_control("ppo.minibatch_size=7")
