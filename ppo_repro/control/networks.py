"""Actor and critic: two networks that share nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ppo_repro.config.run import NetworkConfig
from ppo_repro.control.distributions import Categorical, DiagonalGaussian
from ppo_repro.control.environments import ActionSpace
from ppo_repro.numerics.elementwise import differentiable_tanh
from ppo_repro.numerics.linear import linear
from ppo_repro.numerics.rows import Rows
from ppo_repro.seeding import bell

HIDDEN_GAIN, ACTOR_GAIN, CRITIC_GAIN = math.sqrt(2.0), 0.01, 1.0


def orthogonal(rows: int, columns: int, gain: float, *name: int | str) -> NDArray[np.float64]:
    """[rows, columns] float64 with orthogonal rows (or columns, where there are fewer) of length `gain`.

    Gram-Schmidt over bell-shaped draws with correctly rounded sums, so that the bits are the same on every
    machine; LAPACK's are not. Saxe et al., 2014.
    """
    short, long = sorted((rows, columns))
    basis: list[NDArray[np.float64]] = []
    for draw in bell(short * long, *name).reshape(short, long):
        for other in basis:
            draw = draw - other * math.fsum((draw * other).tolist())
        basis.append(draw / math.sqrt(math.fsum((draw * draw).tolist())))
    matrix = np.stack(basis) * gain
    return matrix if rows <= columns else matrix.T


def _mlp(sizes: Sequence[int], last_gain: float, seed: int, name: str) -> nn.Sequential:
    """Linear layers of the given sizes with tanh between them, biases 0."""
    layers: list[nn.Module] = []
    for i in range(len(sizes) - 1):
        is_last = i == len(sizes) - 2
        layer = nn.Linear(sizes[i], sizes[i + 1])
        gain = last_gain if is_last else HIDDEN_GAIN
        weights = np.ascontiguousarray(orthogonal(sizes[i + 1], sizes[i], gain, "weights", seed, name, i))
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(weights))
            layer.bias.zero_()
        layers += [layer] if is_last else [layer, nn.Tanh()]
    return nn.Sequential(*layers)


class Agent(nn.Module):
    """The policy, `actor` and `distribution`, and the value model, `critic`."""

    def __init__(
        self, observation_size: int, actions: ActionSpace, network: NetworkConfig, mode: str, seed: int
    ) -> None:
        super().__init__()
        self.mode = mode
        self.distribution: Categorical | DiagonalGaussian
        if actions.count:
            self.distribution = Categorical(actions.count, mode)
        else:
            self.distribution = DiagonalGaussian(len(actions.low), mode)
        hidden = [observation_size, network.hidden_size, network.hidden_size]
        self.actor = _mlp([*hidden, self.distribution.outputs], ACTOR_GAIN, seed, "actor")
        self.critic = _mlp([*hidden, 1], CRITIC_GAIN, seed, "critic")

    def policy(self, observations: Tensor, rows: Rows | None = None) -> Tensor:
        """What the distribution needs, float32 [n, outputs], from observations float32 [n, O]; `rows` to train."""
        return self._outputs(self.actor, observations, rows)

    def values(self, observations: Tensor, rows: Rows | None = None) -> Tensor:
        """Expected return, float32 [n]."""
        return self._outputs(self.critic, observations, rows)[:, 0]

    def _outputs(self, network: nn.Sequential, x: Tensor, rows: Rows | None) -> Tensor:
        if self.mode == "native":
            return network(x)
        for layer in network:
            x = linear(x, layer, rows) if isinstance(layer, nn.Linear) else differentiable_tanh(x)
        return x

    def policy_parameters(self) -> list[tuple[str, Tensor]]:
        return [(n, p) for n, p in self.named_parameters() if not n.startswith("critic.")]

    def value_parameters(self) -> list[tuple[str, Tensor]]:
        return list(self.critic.named_parameters())
