"""The configuration of DPO on the responses of a recorded run: frozen, strict, one sentence per field."""

from __future__ import annotations

from pydantic import Field

from ppo_repro.config.layout import LayoutConfig
from ppo_repro.config.run import NumericsConfig
from ppo_repro.config.section import Count, Experiment, NonNegative, PathText, Positive, Section


class DPOUpdate(Section):
    """The DPO update."""

    beta: Positive = Field(
        0.1, description="Weight of the implicit KL penalty: a large one stays close to the reference."
    )
    epochs: Count = Field(1, description="Passes over the pairs.")
    minibatch_size: Count = Field(description="Pairs per optimizer step; the last step of an epoch may have fewer.")
    learning_rate: NonNegative = Field(description="AdamW learning rate of the policy.")


class DPOConfig(Experiment):
    """DPO of the policy that a recorded run started from, on pairs of that run's responses.

    Micro-batches of the layout count sequences, of which a pair has two; pairs are never parted.
    """

    run: PathText = Field(description="Folder of the recorded run.")
    num_eval_prompts: Count = Field(description="Prompts whose pairs are held out, to measure the margins on.")
    dpo: DPOUpdate
    numerics: NumericsConfig
    layout: LayoutConfig = LayoutConfig()
