"""How much of a run is written down, and what its processes divide. Nothing here changes a result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Self

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


class MeshConfig(Section):
    """What the processes of a run, as torchrun starts them, divide. No exact result depends on it."""

    data: Index = Field(0, description="Processes that divide the sequences; 0 takes all there are.")
    zero: Literal[0, 1, 2] = Field(
        0, description="Divided among them: 0 nothing, 1 moments of AdamW, 2 sums of gradients after a step too."
    )


def not_divided(mesh: MeshConfig, mode: str, adapted: Sequence[str]) -> Iterator[str]:
    """One line for what this program cannot divide; `adapted`: the fields that ask for adapters."""
    if mesh.zero and mode == "native":
        yield f"layout.mesh.zero = {mesh.zero} needs numerics.mode = exact; take 0"
    if mesh.zero == 2 and adapted:
        yield (
            f"layout.mesh.zero = 2 needs all weights to be trained, and {adapted[0]} is set: an adapter's gradient "
            "needs that of the whole matrix; take 1"
        )
