"""Initial weights from named streams, and forward passes that do not depend on the batch."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch

from ppo_repro.config.control import NetworkConfig
from ppo_repro.control.environments import DiscreteActions
from ppo_repro.control.networks import Agent, orthogonal

DISCRETE = DiscreteActions(count=3, start=0)


def test_names_choose_the_weights() -> None:
    one = orthogonal(8, 8, 1.0, "weights", 0, "actor", 1)
    assert (one == orthogonal(8, 8, 1.0, "weights", 0, "actor", 1)).all()
    for other in (("weights", 1, "actor", 1), ("weights", 0, "critic", 1), ("weights", 0, "actor", 0)):
        assert (one != orthogonal(8, 8, 1.0, *other)).all()
    digest = hashlib.sha256(orthogonal(64, 4, 1.0, "pinned").astype(np.float32).tobytes()).hexdigest()[:16]
    assert digest == "d3db41994f542b63", "a machine or library that changes any bit must not pass unseen"


def test_weights_are_orthogonal_with_their_gains_and_biases_zero() -> None:
    agent = Agent(5, DISCRETE, NetworkConfig(), "deterministic", 0)
    parameters = dict(agent.named_parameters())
    gains = {"actor.0": math.sqrt(2), "actor.2": math.sqrt(2), "actor.4": 0.01, "critic.4": 1.0}
    for name, gain in gains.items():
        assert torch.linalg.svdvals(parameters[f"{name}.weight"]).tolist() == pytest.approx(
            [gain] * min(parameters[f"{name}.weight"].shape), rel=1e-5
        )
    assert all(not p.any() for name, p in parameters.items() if name.endswith("bias"))
