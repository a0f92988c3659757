"""The configuration of DPO on the responses of a recorded run: frozen, strict, one sentence per field."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ppo_repro.config.layout import LayoutConfig
from ppo_repro.config.run import NumericsConfig
from ppo_repro.config.section import Count, Experiment, Index, NonNegative, PathText, Positive, Section


class DPOUpdate(Section):
    """The DPO update."""

    beta: Positive = Field(
        0.1, description="Weight of the implicit KL penalty: a large one stays close to the reference."
    )
    epochs: Count = Field(1, description="Passes over the pairs.")
    minibatch_size: Count = Field(description="Pairs per optimizer step; the last step of an epoch may have fewer.")
    learning_rate: NonNegative = Field(description="AdamW learning rate of the policy.")
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="AdamW first-moment decay.")
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.95, description="AdamW second-moment decay.")
    adam_eps: Positive = Field(1e-8, description="AdamW denominator offset.")
    weight_decay: NonNegative = Field(0.0, description="AdamW decoupled weight decay.")
    max_grad_norm: Positive = Field(1.0, description="Gradients are scaled down to this global norm.")


class DPOConfig(Experiment):
    """DPO of the policy that a recorded run started from, on pairs of that run's responses.

    Micro-batches of the layout count sequences, of which a pair has two; pairs are never parted.
    """

    run: PathText = Field(description="Folder of the recorded run.")
    run_iterations: Index = Field(0, description="Pairs come from the first n iterations of the run; 0 for all.")
    num_eval_prompts: Count = Field(description="Prompts whose pairs are held out, to measure the margins on.")
    dpo: DPOUpdate
    numerics: NumericsConfig
    layout: LayoutConfig = LayoutConfig()
