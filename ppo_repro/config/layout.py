"""How the work of a run is cut up: the `layout` section. In deterministic numerics nothing here changes a result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from ppo_repro.config.section import Count, Index, Section, Threads


class LayoutConfig(Section):
    """How the work is cut up. In deterministic numerics nothing here can change a result."""

    absent_at_default: ClassVar[frozenset[str]] = frozenset({"device"})

    rollout_slots: Count = Field(64, description="Sequences decoded side by side, in each process.")
    prefix_cache: bool = Field(True, description="Prompts take over the keys and values of a prefix they share.")
    prefill_chunk: Index = Field(0, description="Prompt tokens per prefill pass; 0 takes prompts whole.")
    forward_micro_batch: Index = Field(0, description="Sequences per scoring pass; 0 takes all.")
    update_micro_batch: Index = Field(0, description="Sequences per backward pass; 0 takes the minibatch.")
    padding: Literal["right", "left", "none"] = Field(
        "right", description="Native numerics: where short rows are padded; `none` packs sequences into one row."
    )
    threads: Threads = Field(1, description="CPU threads, in each process.")
    device: Literal["cpu", "cuda"] = Field(
        "cpu", description="What the models compute on; `cuda` is for native numerics and was never run on a card."
    )
    gradient_checkpointing: bool = Field(
        False, description="Keep no activations inside decoder layers; compute them again in the backward pass."
    )


def not_on_device(layout: LayoutConfig, mode: str) -> Iterator[str]:
    """One line for a CUDA device without native numerics."""
    if layout.device == "cuda" and mode != "native":
        yield f"layout.device = cuda needs numerics.mode = native, and it is {mode}; take cpu"
