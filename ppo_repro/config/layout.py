"""Configure what changes no result of deterministic numerics: layout, records, checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ppo_repro.config.section import Count, Device, Index, Section, Threads

RecordLevel = Literal["lean", "full", "deep"]


class LayoutConfig(Section):
    """The division of the work. In deterministic numerics no field here can change a result."""

    rollout_slots: Count = Field(64, description="Sequences decoded side by side, in each process.")
    prefix_cache: bool = Field(True, description="Prompts take over the keys and values of a prefix they share.")
    prefill_chunk: Index = Field(0, description="Prompt tokens per prefill pass; 0 takes prompts whole.")
    forward_micro_batch: Index = Field(0, description="Sequences per scoring pass; 0 takes all.")
    update_micro_batch: Index = Field(0, description="Sequences per backward pass; 0 takes the minibatch.")
    padding: Literal["right", "left", "none"] = Field(
        "right", description="Native numerics: where short rows are padded; `none` packs sequences into one row."
    )
    threads: Threads = Field(1, description="CPU threads, in each process.")
    device: Device = Field("cpu", description="Where models compute: cpu, cuda or cuda:N.")
    gradient_checkpointing: bool = Field(False, description="Compute activations again in the backward pass.")


class RecordsConfig(Section):
    """How much of a run is recorded. No field here changes a result, a fingerprint or a digest."""

    level: RecordLevel = Field(
        "full",
        description="lean: what reruns and metrics need; full: tensors of the loop; deep: each token's experts too.",
    )


class CheckpointConfig(Section):
    """The iterations after which an ended run can be resumed. No field here changes a result."""

    every: Index | Literal["auto"] = Field(
        "auto",
        description="After every n-th iteration; 0: never; `auto`: 10, or 0 in short runs or above 10 million weights.",
    )
    keep: Count | Literal["all"] = Field(
        2, description="Newest checkpoints kept; older ones are removed. `all`: none is."
    )
    final_state: bool = Field(True, description="Keep the optimizers' moments at the end, 8 bytes a trained weight.")
