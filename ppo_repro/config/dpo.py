"""Configure a DPO run: preference pairs of a recorded run, or of a file."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from ppo_repro.config.layout import LayoutConfig
from ppo_repro.config.model import ModelFolder
from ppo_repro.config.numerics import NumericsConfig
from ppo_repro.config.section import Count, Experiment, NonNegative, PathText, Positive, Section
from ppo_repro.config.tasks import Templated


class DPOUpdate(Section):
    """The DPO update."""

    beta: Positive = Field(0.1, description="Weight of the implicit KL penalty; large: close to the reference.")
    epochs: Count = Field(1, description="Passes over the pairs.")
    minibatch_size: Count = Field(description="Pairs per optimizer step; the last step of an epoch may have fewer.")
    learning_rate: NonNegative = Field(description="AdamW learning rate of the policy.")


class DPOConfig(Experiment, Templated):
    """DPO on preference pairs, of the policy from which a recorded run started, or of a model folder.

    Micro-batches of the layout count sequences, two per pair; a pair is never split.
    """

    run: PathText | None = Field(None, description="Folder of the recorded run; null: `model` and `pairs`.")
    pairs: PathText | None = Field(
        None, description="Lines or Parquet rows with `prompt`, `chosen`, `rejected`; null: of the run."
    )
    model: ModelFolder | None = Field(None, description="The model to train, where there is no run.")
    num_eval_prompts: Count = Field(description="Prompts whose pairs are held out, to measure the margins on.")
    dpo: DPOUpdate
    numerics: NumericsConfig
    layout: LayoutConfig = LayoutConfig()

    @model_validator(mode="after")
    def _one_policy(self) -> Self:
        if (self.run is None) == (self.model is None):
            raise ValueError("run, or model with pairs, must be given, and not both")
        if self.model is not None and self.pairs is None:
            raise ValueError("model needs pairs, a JSON Lines or Parquet file with prompt, chosen and rejected")
        return self

    @property
    def iterations(self) -> int:
        """Return the number of epochs, because an iteration of a DPO run is an epoch."""
        return self.dpo.epochs
