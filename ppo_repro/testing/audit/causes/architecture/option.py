"""Describe one change of a model, and try whether the changed model computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.base.errors import is_out_of_memory
from ppo_repro.testing.audit.rounding import Format

# how torch, transformers and Python refuse a value of a field; what cannot be computed is no option
REFUSED = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
    StrictDataclassError,
)
PROBE = 4  # tokens that show whether a model computes
SHOWN = 60  # characters of a value


@dataclass(frozen=True)
class Option:
    """One change of the model. `make` returns a copy with shared weights, which nobody may write to."""

    words: str
    advice: str
    make: Callable[[], PreTrainedModel]
    count: int = 1  # of options that it leaves out
    format: Format | None = None  # of 16 bits, in which it computes one part of the model

    @property
    def is_computed(self) -> bool:
        """Return whether the changed model can be built and gives finite logits."""
        logits = computed(self.make)
        return logits is not None and bool(logits.isfinite().all())


@torch.no_grad()
def computed(make: Callable[[], PreTrainedModel]) -> Tensor | None:
    """Return logits [1, PROBE, V] of some tokens; None if the model cannot be built or its forward fails."""
    try:
        made: Any = make()
        ids = torch.arange(PROBE, device=made.device)[None] % int(made.config.get_text_config().vocab_size)
        logits: Tensor = made(ids, use_cache=False).logits
    except REFUSED as error:
        if is_out_of_memory(error):
            raise
        return None
    return logits


def short(value: object) -> str:
    """Return a value as a text of at most SHOWN characters."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
