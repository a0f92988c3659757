"""Actor and critic, two networks that share no parameter, and the actor's action distributions.

The distribution is a categorical over discrete actions, or a diagonal Gaussian over real ones. Actions are float32
[n, A] for both: the index of a discrete action (A = 1), or the components of a real one before it is clipped to the
action space. Log-probs and entropies are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd import Function

from ppo_repro.base import seeding
from ppo_repro.base.errors import NumericsError
from ppo_repro.base.mode import Mode, is_deterministic_mode
from ppo_repro.config.control import NetworkConfig
from ppo_repro.control.environments import Actions, DiscreteActions
from ppo_repro.numerics import elementwise
from ppo_repro.numerics.linear import add_to_bias, linear
from ppo_repro.numerics.logit_rows import require_finite
from ppo_repro.numerics.sequences import Rows
from ppo_repro.numerics.token_statistics import token_statistics

HIDDEN_GAIN, ACTOR_GAIN, CRITIC_GAIN = math.sqrt(2.0), 0.01, 1.0
LOG_2PI = 1.8378770664093453


def uniforms(count: int, *name: int | str) -> Tensor:
    """Draw numbers [count] float64 strictly between 0 and 1 from the named stream, each (k + 1/2) 2^-52."""
    k = (seeding.words(count, *name) >> np.uint64(12)).astype(np.float64)
    return torch.from_numpy((k + 0.5) * 2.0**-52)


def gumbels(count: int, *name: int | str) -> Tensor:
    """Draw numbers [count] float64 from Gumbel(0, 1): -log(-log u)."""
    return -elementwise.log(-elementwise.log(uniforms(count, *name)))


def normals(count: int, *name: int | str) -> Tensor:
    """Draw numbers [count] float64 from the standard normal: sqrt(-2 log u) cos(2 pi v). Box and Muller, 1958."""
    u, v = uniforms(2 * count, *name).view(2, count)
    return elementwise.sqrt(elementwise.log(u) * -2.0) * elementwise.cos_sin(v * (2.0 * math.pi))[0]


class Categorical(nn.Module):
    """The distribution softmax(outputs) over a fixed number of actions, sampled by Gumbel-max."""

    def __init__(self, actions: int, mode: Mode) -> None:
        super().__init__()
        self.outputs, self.mode = actions, mode

    def noise(self, steps: int, envs: int, *name: int | str) -> Tensor:
        """Return the random numbers of an iteration, [steps, envs, ...], for one draw per step and environment."""
        return gumbels(steps * envs * self.outputs, *name).view(steps, envs, self.outputs)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """Draw actions [n, A] from outputs [n, outputs] and the noise of the same rows."""
        require_finite(outputs)
        # NumPy's argmax returns the first of equal numbers
        drawn = (outputs.detach().to(torch.float64) + noise).numpy().argmax(-1)
        return torch.from_numpy(drawn.astype(np.float32))[:, None]

    def likeliest(self, outputs: Tensor) -> Tensor:
        """Return the most probable action [n, A] of each row."""
        require_finite(outputs)
        return torch.from_numpy(outputs.detach().numpy().argmax(-1).astype(np.float32))[:, None]

    def statistics(self, outputs: Tensor, actions: Tensor, rows: Rows | None = None) -> tuple[Tensor, Tensor]:
        """Return log softmax(outputs)[action] and -sum p log p, float32 [n] each, differentiable.

        Training needs `rows`.
        """
        return token_statistics(outputs, actions[:, 0].to(torch.int64), 1.0, None, self.mode)


class _GaussianStatistics(Function):
    """Computes in float64 and rounds once to float32; components are added in their order."""

    @staticmethod
    def forward(ctx: Any, means: Tensor, log_std: Tensor, actions: Tensor, rows: Rows | None) -> tuple[Tensor, Tensor]:
        s = log_std.detach().to(torch.float64)
        z = (actions.to(torch.float64) - means.to(torch.float64)) * elementwise.exp64(-s)
        logprob, entropy = torch.zeros(len(z), dtype=torch.float64), torch.zeros(len(z), dtype=torch.float64)
        for i in range(len(s)):
            logprob = logprob - (z[:, i] * z[:, i] * 0.5 + s[i] + 0.5 * LOG_2PI)
            entropy = entropy + (s[i] + 0.5 * (LOG_2PI + 1.0))
        ctx.save_for_backward(z)
        ctx.log_std, ctx.rows = log_std, rows
        return logprob.to(torch.float32), entropy.to(torch.float32)

    @staticmethod
    def backward(ctx: Any, d_logprob: Tensor, d_entropy: Tensor) -> tuple[Tensor | None, ...]:
        (z,) = ctx.saved_tensors
        gl, gh = d_logprob.to(torch.float64)[:, None], d_entropy.to(torch.float64)[:, None]
        # d log p / d mean = z / sigma ;  d log p / d log sigma = z^2 - 1 ;  d entropy / d log sigma = 1
        if ctx.rows is not None:
            add_to_bias(ctx.log_std, ((z * z - 1.0) * gl + gh).to(torch.float32), ctx.rows)
        d_means = gl * z * elementwise.exp64(-ctx.log_std.detach().to(torch.float64))
        return d_means.to(torch.float32), None, None, None


class DiagonalGaussian(nn.Module):
    """The distribution Normal(outputs, exp(log_std)) per component, with one log_std for all states. Williams, 1992."""

    def __init__(self, size: int, mode: Mode) -> None:
        super().__init__()
        self.outputs, self.mode = size, mode
        self.log_std = nn.Parameter(torch.zeros(size))

    def noise(self, steps: int, envs: int, *name: int | str) -> Tensor:
        return normals(steps * envs * self.outputs, *name).view(steps, envs, self.outputs)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        require_finite(outputs)
        deviation = elementwise.exp64(self.log_std.detach().to(torch.float64))
        return (outputs.detach().to(torch.float64) + noise * deviation).to(torch.float32)

    def likeliest(self, outputs: Tensor) -> Tensor:
        require_finite(outputs)
        return outputs.detach().clone()

    def statistics(self, outputs: Tensor, actions: Tensor, rows: Rows | None = None) -> tuple[Tensor, Tensor]:
        """Return log p = -sum_i [z_i^2 / 2 + log sigma_i + log(2 pi) / 2], z = (a - mean) / sigma, and the entropy.

        The entropy is sum_i [log sigma_i + log(2 pi e) / 2]. Both are float32 [n].
        Raises NumericsError for means that are not finite.
        """
        if not torch.isfinite(outputs).all():
            raise NumericsError("the policy's means are not finite; lower the learning rate")
        if is_deterministic_mode(self.mode):
            return _GaussianStatistics.apply(outputs, self.log_std, actions, rows)
        normal = torch.distributions.Normal(outputs, self.log_std.exp().expand_as(outputs))
        return normal.log_prob(actions).sum(-1), normal.entropy().sum(-1)


def orthogonal(rows: int, columns: int, gain: float, *name: int | str) -> NDArray[np.float64]:
    """Draw a matrix [rows, columns] float64 with orthogonal rows (or columns, if there are fewer) of length `gain`.

    The method is Gram-Schmidt over bell-shaped draws with correctly rounded sums, so that the bits are the same on
    every machine, unlike LAPACK's. Saxe et al., 2014.
    """
    short, long = sorted((rows, columns))
    basis: list[NDArray[np.float64]] = []
    for draw in seeding.bell(short * long, *name).reshape(short, long):
        for other in basis:
            draw = draw - other * math.fsum((draw * other).tolist())
        basis.append(draw / math.sqrt(math.fsum((draw * draw).tolist())))
    matrix = np.stack(basis) * gain
    return matrix if rows <= columns else matrix.T


def _mlp(sizes: Sequence[int], last_gain: float, seed: int, name: str) -> nn.Sequential:
    """Make linear layers of the given sizes with tanh between them, biases 0."""
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
    """The policy (`actor` and `distribution`) and the value model (`critic`)."""

    def __init__(self, observation_size: int, actions: Actions, network: NetworkConfig, mode: Mode, seed: int) -> None:
        """Draw the weights of policy and value network. `seed` is the run's seed."""
        super().__init__()
        self.mode = mode
        self.distribution: Categorical | DiagonalGaussian
        if isinstance(actions, DiscreteActions):
            self.distribution = Categorical(actions.count, mode)
        else:
            self.distribution = DiagonalGaussian(len(actions.low), mode)
        hidden = [observation_size, network.hidden_size, network.hidden_size]
        self.actor = _mlp([*hidden, self.distribution.outputs], ACTOR_GAIN, seed, "actor")
        self.critic = _mlp([*hidden, 1], CRITIC_GAIN, seed, "critic")

    def policy(self, observations: Tensor, rows: Rows | None = None) -> Tensor:
        """Compute the distribution's parameters, float32 [n, outputs], from observations float32 [n, O].

        Training needs `rows`.
        """
        return self._outputs(self.actor, observations, rows)

    def values(self, observations: Tensor, rows: Rows | None = None) -> Tensor:
        """Predict the return after each observation, float32 [n, O] -> float32 [n]."""
        return self._outputs(self.critic, observations, rows)[:, 0]

    def _outputs(self, network: nn.Sequential, x: Tensor, rows: Rows | None) -> Tensor:
        if not is_deterministic_mode(self.mode):
            return network(x)
        for layer in network:
            x = linear(x, layer, rows) if isinstance(layer, nn.Linear) else elementwise.differentiable_tanh(x)
        return x

    def policy_parameters(self) -> list[tuple[str, Tensor]]:
        return [(n, p) for n, p in self.named_parameters() if not n.startswith("critic.")]

    def value_parameters(self) -> list[tuple[str, Tensor]]:
        return list(self.critic.named_parameters())
