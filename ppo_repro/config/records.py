"""What of a run is written down, and when: levels of records, checkpoints. Nothing here changes a result."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ppo_repro.config.section import Count, Index, Section

Level = Literal["lean", "full", "deep"]
TOP_LOGITS = 16  # of each token at level deep


class RecordsConfig(Section):
    """How much of what a run computes is written down. Changes no result, no fingerprint and no digest."""

    level: Level = Field(
        "full",
        description="`lean`: what reruns and published metrics need; `full`: every tensor of the loop; `deep`: largest "
        "logits and gradient norms by tensor too.",
    )

    @property
    def top_logits(self) -> int:
        """How many logits of each token are recorded; 0 below level deep."""
        return TOP_LOGITS if self.level == "deep" else 0


class CheckpointConfig(Section):
    """Where an ended run can be resumed. Changes no result."""

    every: Index = Field(0, description="Write a checkpoint after every n-th iteration; 0 for none.")
    keep: Count = Field(2, description="Newest checkpoints kept; older ones are removed.")
    final_state: bool = Field(
        True, description="Keep the optimizers' moments at the end, 8 bytes for each trained weight."
    )
