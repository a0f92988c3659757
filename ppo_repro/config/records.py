"""What of a run is written down, and when: levels of records, checkpoints. Nothing here changes a result."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from ppo_repro.config.section import Count, Index, Section

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


MODEL_FILE_BYTES = 5 * 10**9  # as the Hub takes them


class CheckpointConfig(Section):
    """Where an ended run can be resumed. Changes no result."""

    absent_at_default: ClassVar[frozenset[str]] = frozenset({"file_bytes"})

    every: Index = Field(0, description="Write a checkpoint after every n-th iteration; 0 for none.")
    keep: Count = Field(2, description="Newest checkpoints kept; older ones are removed.")
    final_state: bool = Field(
        True, description="Keep the optimizers' moments at the end, 8 bytes for each trained weight."
    )
    file_bytes: int = Field(
        MODEL_FILE_BYTES,
        ge=1,
        le=2**50,
        description="Bytes of weights in a file of a model folder; more become several files.",
    )
