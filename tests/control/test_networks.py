"""Initial weights from named streams, and forward passes that do not depend on the batch."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch

from ppo_repro.config.control import NetworkConfig
from ppo_repro.control.distributions import Categorical, DiagonalGaussian
from ppo_repro.control.environments import ActionSpace
from ppo_repro.control.networks import Agent, orthogonal
from ppo_repro.numerics import library
from tests.support.float32 import bits

NOTHING = np.empty(0, np.float32)
DISCRETE = ActionSpace(3, 0, NOTHING, NOTHING)
REAL = ActionSpace(0, 0, np.array([-2.0, -1.0], np.float32), np.array([2.0, 1.0], np.float32))


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (64, 4), (3, 64), (1, 64), (1, 1)])
def test_rows_or_columns_are_orthogonal_and_as_long_as_the_gain(rows: int, columns: int) -> None:
    w = orthogonal(rows, columns, 1.5, "test", rows)
    products = w @ w.T if rows <= columns else w.T @ w
    assert w.shape == (rows, columns)
    assert products == pytest.approx(1.5**2 * np.eye(min(rows, columns)), abs=1e-10)  # float64 Gram-Schmidt


def test_names_choose_the_weights() -> None:
    one = orthogonal(8, 8, 1.0, "weights", 0, "actor", 1)
    assert (one == orthogonal(8, 8, 1.0, "weights", 0, "actor", 1)).all()
    for other in (("weights", 1, "actor", 1), ("weights", 0, "critic", 1), ("weights", 0, "actor", 0)):
        assert (one != orthogonal(8, 8, 1.0, *other)).all()
    digest = hashlib.sha256(orthogonal(64, 4, 1.0, "pinned").astype(np.float32).tobytes()).hexdigest()[:16]
    assert digest == "d3db41994f542b63", "a machine or library that changes any bit must not pass unseen"


def test_shapes_gains_and_families() -> None:
    agent = Agent(5, DISCRETE, NetworkConfig(), "deterministic", 0)
    shapes = {name: tuple(p.shape) for name, p in agent.named_parameters()}
    assert [shapes[f"actor.{i}.weight"] for i in (0, 2, 4)] == [(64, 5), (64, 64), (3, 64)]
    assert [shapes[f"critic.{i}.weight"] for i in (0, 2, 4)] == [(64, 5), (64, 64), (1, 64)]
    parameters = dict(agent.named_parameters())
    gains = {"actor.0": math.sqrt(2), "actor.2": math.sqrt(2), "actor.4": 0.01, "critic.4": 1.0}
    for name, gain in gains.items():
        assert torch.linalg.svdvals(parameters[f"{name}.weight"]).tolist() == pytest.approx(
            [gain] * min(parameters[f"{name}.weight"].shape), rel=1e-5
        )
    assert all(not p.any() for name, p in parameters.items() if name.endswith("bias"))
    assert isinstance(agent.distribution, Categorical)
    real = Agent(5, REAL, NetworkConfig(), "deterministic", 0)
    assert isinstance(real.distribution, DiagonalGaussian) and real.distribution.log_std.tolist() == [0.0, 0.0]
    names = [name for name, _ in real.policy_parameters()]
    assert "distribution.log_std" in names and len(names) == 7 and len(real.value_parameters()) == 6


@pytest.mark.parametrize("threads", [1, 2])
def test_a_forward_pass_does_not_depend_on_the_batch(threads: int) -> None:
    agent = Agent(4, DISCRETE, NetworkConfig(), "deterministic", 0)
    x = torch.sin(torch.arange(200.0)).view(50, 4)
    with torch.no_grad():
        expected = bits(agent.policy(x)), bits(agent.values(x))
        library.use_threads(threads)
        for size in (1, 3, 50):
            parts = x.split(size)
            assert bits(torch.cat([agent.policy(part) for part in parts])) == expected[0]
            assert bits(torch.cat([agent.values(part) for part in parts])) == expected[1]


@pytest.mark.usefixtures("row_dependent")
def test_a_native_forward_pass_does() -> None:
    """The negative control: another route for few rows than for many."""
    agent = Agent(4, DISCRETE, NetworkConfig(), "native", 0)
    x = torch.sin(torch.arange(8000.0)).view(2000, 4)
    with torch.no_grad():
        whole = bits(agent.policy(x))
        parts = [bits(torch.cat([agent.policy(part) for part in x.split(size)])) for size in (1, 4, 64)]
    assert all(part != whole for part in parts)
