"""Causes of a mismatch between sampler and trainer, one by one and as large as wanted: the `mismatch` section."""

from __future__ import annotations

from typing import ClassVar

from ppo_repro.config.faults import SamplerFaults, TrainerFaults
from ppo_repro.config.section import Section


class SamplerSide(SamplerFaults):
    """What is made to differ in the sampler."""


class TrainerSide(TrainerFaults):
    """What is made to differ in the trainer."""


class MismatchConfig(Section):
    """What is made to differ between sampler and trainer; nothing by default. Every cause is part of the run."""

    # a configuration without a cause is written down, and named, as one of an exact run
    absent_at_default: ClassVar[frozenset[str]] = frozenset({"sampler", "trainer"})

    sampler: SamplerSide = SamplerSide()
    trainer: TrainerSide = TrainerSide()
