"""What the controllers are told of an iteration: by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ppo_repro.config.files import load_config
from ppo_repro.stages.coefficients import first_coefficients, last_kl, learning_rates, next_coefficients
from tests.support.bare import bare_advantages, bare_forward
from tests.support.paths import TINY


def test_kl_coef_follows_the_mean_kl_of_a_response() -> None:
    config = load_config(TINY, ["kl={kl_coef: 0.05, controller: {kind: adaptive, target_kl: 4, horizon: 10}}"])
    forward = bare_forward(torch.zeros(4))
    forward.ref_kl.copy_(torch.tensor([1.0, 2.0, 2.5, 3.3]))
    after = next_coefficients(
        config, first_coefficients(config.kl, config.ppo.objective), forward, bare_advantages(torch.zeros(4)), [], 2
    )
    # two responses of 4.4 nats on average: an error of +0.1, over 2 of 10 responses; float32 of 3.3
    assert after.kl_coef == pytest.approx(0.05 * (1 + 0.1 * 0.2), rel=1e-7)


def step(epoch: int, tokens: int, approx_kl: float | None) -> Any:
    policy = None if approx_kl is None else SimpleNamespace(approx_kl=approx_kl)
    return SimpleNamespace(epoch=epoch, tokens=torch.arange(tokens), policy=policy)


def test_the_last_kl_is_the_token_mean_of_the_policy_s_last_epoch() -> None:
    updates = [step(0, 10, 9.0), step(1, 1, 0.3), step(1, 3, 0.1), step(1, 5, None), step(2, 7, None)]
    assert last_kl(updates) == pytest.approx(0.15)


def test_learning_rates_rise_in_the_warm_up_and_then_follow_the_schedule() -> None:
    options = ("ppo.iterations=6", "ppo.warmup_iterations=2", "ppo.schedule=linear", "ppo.learning_rate=1e-3")
    config = load_config(TINY, [*options, "value.learning_rate=2e-3"])
    rates = [learning_rates(config.ppo, config.value, iteration) for iteration in range(6)]
    factors = [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25]
    assert [policy for policy, _ in rates] == pytest.approx([1e-3 * f for f in factors])
    assert [value for _, value in rates] == pytest.approx([2e-3 * f for f in factors])
