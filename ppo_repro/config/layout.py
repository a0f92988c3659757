"""How the work of a run is cut up: the `layout` section. In exact numerics nothing here changes a result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from ppo_repro.config.section import Count, Index, Section, Threads


class MeshConfig(Section):
    """What the processes of a run, as torchrun starts them, divide. No exact result depends on it."""

    absent_at_default: ClassVar[frozenset[str]] = frozenset({"tensor", "pipeline"})

    data: Index = Field(0, description="Processes, or groups of `tensor`, that divide the sequences; 0 takes all.")
    tensor: Count = Field(1, description="Processes that hold one copy of the models together, some heads each.")
    pipeline: Count = Field(1, description="Processes that hold one copy of the models together, some layers each.")
    zero: Literal[0, 1, 2, 3] = Field(
        0, description="Divided among them: 0 nothing, 1 moments, 2 sums of gradients after a step too, 3 weights too."
    )

    @property
    def group(self) -> int:
        """How many processes hold one copy of the models together."""
        return self.tensor * self.pipeline


class LayoutConfig(Section):
    """How the work is cut up. In exact numerics nothing here can change a result."""

    absent_at_default: ClassVar[frozenset[str]] = frozenset({"device", "mesh"})

    rollout_slots: Count = Field(64, description="Sequences decoded side by side, in each process.")
    prefix_cache: bool = Field(True, description="Prompts take over the keys and values of a prefix they share.")
    prefill_chunk: Index = Field(0, description="Prompt tokens per prefill pass; 0 takes prompts whole.")
    forward_micro_batch: Index = Field(0, description="Sequences per scoring pass; 0 takes all.")
    update_micro_batch: Index = Field(0, description="Sequences per backward pass; 0 takes the minibatch.")
    padding: Literal["right", "left", "none"] = Field(
        "right", description="Where short rows are padded; `none` packs sequences into one row."
    )
    threads: Threads = Field(
        1, description="CPU threads, in each process; exact steps of policy and value model share them side by side."
    )
    device: Literal["cpu", "cuda"] = Field(
        "cpu", description="What the models compute on; `cuda` is for native numerics and was never run on a card."
    )
    gradient_checkpointing: bool = Field(
        False, description="Keep no activations inside decoder layers; compute them again in the backward pass."
    )
    rank_shares: Annotated[tuple[Index, ...], Field(strict=False)] = Field(
        (), description="In what proportion the processes of a run get sequences, one entry each; [] for equal shares."
    )
    mesh: MeshConfig = MeshConfig()

    @property
    def processes(self) -> int:
        """How many processes this asks for; 1 where it says nothing, and a run then takes as many as are started."""
        return (self.mesh.data or len(self.rank_shares) or 1) * self.mesh.group

    @field_validator("rank_shares")
    @classmethod
    def _someone_works(cls, shares: tuple[int, ...]) -> tuple[int, ...]:
        if shares and not any(shares):
            raise ValueError("at least one must be greater than 0")
        return shares


def not_on_device(layout: LayoutConfig, mode: str) -> Iterator[str]:
    """One line for a CUDA device with exact numerics."""
    if layout.device == "cuda" and mode != "native":
        yield f"layout.device = cuda needs numerics.mode = native, and it is {mode}; take cpu"


def not_divided(mesh: MeshConfig, mode: str, adapted: Sequence[str], whole: Sequence[str] = ()) -> Iterator[str]:
    """One line for what this program cannot divide.

    `adapted`: the fields that ask for adapters. `whole`: other settings that need a process with all weights.
    """
    if mesh.group > 1:
        group = f"layout.mesh.tensor = {mesh.tensor}" if mesh.tensor > 1 else f"layout.mesh.pipeline = {mesh.pipeline}"
        refused = [f"{name} is set" for name in adapted] + [*whole]
        if mesh.zero:
            refused.append(f"layout.mesh.zero = {mesh.zero}")
        if mesh.tensor > 1 and mesh.pipeline > 1:
            refused.append(f"layout.mesh.pipeline = {mesh.pipeline}")
        if mode == "native":
            yield f"{group} needs numerics.mode = exact; take 1"
        elif refused:
            yield f"{group} does not go with this: {refused[0]}; remove one of them"
    if mesh.zero and mesh.data == 1 and mesh.group == 1:
        yield f"layout.mesh.zero = {mesh.zero} divides among processes, and layout.mesh.data = 1; take 0, or more data"
    if mesh.zero and mode == "native":
        yield f"layout.mesh.zero = {mesh.zero} needs numerics.mode = exact; take 0"
    if mesh.zero > 1 and adapted:
        yield (
            f"layout.mesh.zero = {mesh.zero} needs all weights to be trained, and {adapted[0]} is set: an adapter's "
            "gradient needs that of the whole matrix; take 1"
        )
    elif mesh.zero == 3 and mesh.group == 1 and whole:
        yield f"layout.mesh.zero = 3 does not go with this: {whole[0]}; take 2, or remove it"
