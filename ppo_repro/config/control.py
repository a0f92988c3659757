"""Configure a control run: PPO on a Gymnasium environment."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ppo_repro.config.layout import RecordsConfig
from ppo_repro.config.numerics import NumericsMode
from ppo_repro.config.section import (
    Count,
    Experiment,
    Fraction,
    Index,
    NonNegative,
    Positive,
    RateSchedule,
    Section,
    Threads,
    Width,
)


class EnvironmentConfig(Section):
    """The Gymnasium environment, and the number of its steps in one iteration."""

    id: str = Field(min_length=1, description="Gymnasium id, for example CartPole-v1.")
    num_envs: Count = Field(description="Copies that are stepped side by side.")
    steps_per_env: Count = Field(description="Steps of each copy per iteration; unfinished episodes go on in the next.")


class NetworkConfig(Section):
    """Actor and critic, two networks of the same shape with two hidden layers and tanh between them."""

    hidden_size: Width = Field(64, description="Width of the hidden layers.")


class ControlPPOConfig(Section):
    """The PPO update: one loss, one optimizer and one gradient norm over actor and critic."""

    iterations: Count = Field(description="Rollout-update cycles.")
    epochs: Count = Field(description="Passes over each rollout.")
    minibatch_size: Count = Field(description="Environment steps per optimizer step; divides the rollout.")
    clip_range: Annotated[float, Field(gt=0, lt=1)] = Field(0.2, description="Clip range epsilon of the policy ratio.")
    clip_range_schedule: RateSchedule = Field(
        "constant", description="How clip_range falls, to 0 after the last iteration."
    )
    value_clip_range: Positive | None = Field(None, description="Around the old prediction; null: squared error.")
    value_coef: Positive = Field(0.5, description="Weight of the value loss, half a squared error.")
    entropy_coef: NonNegative = Field(0.0, description="Weight of the entropy bonus, nats.")
    gamma: Fraction = Field(0.99, description="Discount per step.")
    gae_lambda: Fraction = Field(0.95, description="GAE trace decay.")
    bootstrap_truncated: bool = Field(True, description="Add the last state's value if a time limit ended an episode.")
    whiten_advantages: Literal["minibatch", "iteration", "none"] = Field("minibatch", description="Over which steps.")
    learning_rate: NonNegative = Field(description="Adam learning rate.")
    learning_rate_schedule: RateSchedule = Field("constant", description="How it falls, to 0 after the last iteration.")
    adam_eps: Positive = Field(1e-5, description="Adam denominator offset.")
    max_grad_norm: Positive = Field(0.5, description="Gradients are scaled down to this norm over both networks.")


class ControlEvaluationConfig(Section):
    """Evaluation: whole episodes with the likeliest action, before the first iteration and after the last one."""

    episodes: Index = Field(20, description="Episodes played each time; 0 for none.")


class ControlLayoutConfig(Section):
    """The division of the work. In deterministic numerics no field here can change a result."""

    update_micro_batch: Index = Field(0, description="Steps per backward pass; 0 takes the minibatch.")
    threads: Threads = Field(1, description="CPU threads.")


class ControlConfig(Experiment):
    """The configuration of one control run."""

    environment: EnvironmentConfig
    network: NetworkConfig = NetworkConfig()
    ppo: ControlPPOConfig
    evaluation: ControlEvaluationConfig = ControlEvaluationConfig()
    numerics: NumericsMode = NumericsMode()
    layout: ControlLayoutConfig = ControlLayoutConfig()
    records: RecordsConfig = RecordsConfig()

    @property
    def iterations(self) -> int:
        return self.ppo.iterations

    @property
    def steps_per_iteration(self) -> int:
        return self.environment.num_envs * self.environment.steps_per_env

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        if self.steps_per_iteration % self.ppo.minibatch_size:
            raise ValueError(
                f"ppo.minibatch_size = {self.ppo.minibatch_size} must divide the {self.steps_per_iteration} steps "
                "of an iteration (environment.num_envs x environment.steps_per_env)"
            )
        return self
