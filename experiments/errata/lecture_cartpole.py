"""Run a lecture's CartPole program for PPO, as printed and corrected.

The printed program learns nothing: one step counter serves as the limit of an episode (500) and as the clock of the
updates (2,048), and is never reset. If an update were reached, it would fail with an error of shapes. We reproduce the
faults exactly. The networks are ours, which makes no difference because they are never trained.

`python -m experiments.errata.lecture_cartpole` runs the printed program, then the same settings in a correct loop, then
`experiments/control/cartpole_fast.yaml`. The command exits with 1 if one of them does not behave as described here.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from ppo_repro.base.watcher import Watcher
from ppo_repro.config.control import ControlConfig, NetworkConfig
from ppo_repro.config.files import read_tree, validated
from ppo_repro.control.environments import Environments
from ppo_repro.control.networks import Agent
from ppo_repro.numerics.weights import weights_digest
from ppo_repro.runs.control import ControlKind
from ppo_repro.runs.run import run
from ppo_repro.runs.summary import summarise

HERE = Path(__file__).resolve().parent
SETTINGS = HERE / "lecture_cartpole.yaml"
CORRECTED = HERE.parent / "control" / "cartpole_fast.yaml"
SOLVED = 475.0  # mean return from which CartPole-v1 counts as solved


@dataclass(frozen=True)
class Printed:
    """Outcome of the printed program."""

    env_steps: int
    updates: int
    last_50_return: float
    learned: bool


def values_for_gae(values: Sequence[Tensor], next_value: Tensor) -> Tensor:
    """Concatenate the values of N steps and the next value, each [1, 1], as the printed program does."""
    return torch.cat([torch.cat(list(values)).squeeze(), next_value])


def run_as_printed(seed: int = 0, episodes: int = 300, max_steps: int = 500, update_every: int = 2048) -> Printed:
    """Run the printed training loop. It intends `max_steps` for one episode, but `steps` counts all episodes."""
    environments = Environments("CartPole-v1", 1, "errata", seed)
    agent = Agent(4, environments.actions, NetworkConfig(), "native", seed)
    noise = agent.distribution.noise(max_steps, 1, "errata actions", seed)
    before = weights_digest(agent.named_parameters())
    returns, steps, updates = [], 0, 0
    values: list[Tensor] = []
    for _ in range(episodes):
        done, total = False, 0.0
        while not done and steps < max_steps:
            observation = torch.from_numpy(environments.observations.copy())
            with torch.no_grad():
                action = agent.distribution.sample(agent.policy(observation), noise[steps])
                values.append(agent.values(observation)[:, None])
            step = environments.step(action.numpy())
            done = bool(step.terminated[0] or step.truncated[0])
            total += float(step.rewards[0])
            steps += 1
            if steps % update_every == 0:
                values_for_gae(values, values[-1])  # where an update would begin
                updates += 1
        returns.append(total)
    environments.close()
    learned = weights_digest(agent.named_parameters()) != before
    return Printed(steps, updates, fmean(returns[-50:]), learned)


def run_config(path: Path, out: Path) -> dict[str, Any]:
    """Run one of our configurations, and return its results."""
    run_dir, seconds = run(ControlKind(Watcher()), validated(ControlConfig, read_tree(path), str(path)), out)
    return summarise(run_dir, seconds).figures


def main() -> None:
    printed = run_as_printed()
    print(
        f"as printed: {printed.env_steps} environment steps, {printed.updates} updates, mean return of the last "
        f"50 episodes {printed.last_50_return:.2f}, weights {'changed' if printed.learned else 'unchanged'}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, path in (("its settings, correct loop", SETTINGS), ("corrected", CORRECTED)):
            summary = run_config(path, Path(folder))
            print(
                f"{name}: {summary['tokens']:,} environment steps, mean return of the last 100 training episodes "
                f"{summary['last_100_return']:.2f}, "
                f"of 100 episodes with the likeliest actions {summary['eval_after']:.2f}",
                flush=True,
            )
    as_said = (printed.env_steps, printed.updates, printed.last_50_return, printed.learned) == (500, 0, 0.0, False)
    sys.exit(0 if as_said and summary["last_100_return"] >= SOLVED else 1)


if __name__ == "__main__":
    main()
