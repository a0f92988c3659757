"""How a reward model is trained inside a run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ppo_repro.config import Count, Positive, Section


class RewardModelTraining(Section):
    """Pairs made by a rule from the task, and the Bradley-Terry training of a reward model on them."""

    num_pairs: Count = Field(description="Preference pairs to train on, made from training prompts.")
    num_eval_pairs: Count = Field(256, description="Pairs from held-out prompts, without label noise, to judge it by.")
    label_noise: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0, description="Probability that a training pair prefers the wrong answer."
    )
    epochs: Count = Field(1, description="Passes over the pairs.")
    minibatch_size: Count = Field(description="Pairs per optimizer step; the last step of an epoch may have fewer.")
    learning_rate: Positive = Field(description="AdamW learning rate.")
