"""How much of a run is written down: the levels of records. Nothing here changes a result."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ppo_repro.config.section import Count, Section

Level = Literal["lean", "full", "deep"]
USUAL_TOP_LOGITS = 16


class RecordsConfig(Section):
    """How much of what a run computes is written down. Changes no result, no fingerprint and no digest."""

    level: Level = Field(
        "full",
        description="`lean`: what reruns and published metrics need; `full`: every tensor of the loop; `deep`: largest "
        "logits and gradient norms by tensor too.",
    )


class RunRecordsConfig(RecordsConfig):
    """How much of what a run computes is written down, and how many logits of each token where some are."""

    top_logits: Count | None = Field(
        None,
        description=f"How many logits of each token level deep records, the largest ones; null: {USUAL_TOP_LOGITS}.",
    )

    @property
    def logits_per_token(self) -> int:
        """How many logits of each token are recorded; 0 below level deep."""
        return (self.top_logits or USUAL_TOP_LOGITS) if self.level == "deep" else 0

    @model_validator(mode="after")
    def _only_deep_has_logits(self) -> Self:
        if self.top_logits is not None and self.level != "deep":
            raise ValueError("top_logits needs level = deep; set it to null elsewhere")
        return self
