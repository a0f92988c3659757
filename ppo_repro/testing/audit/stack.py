"""The stack that is audited: the model that its dump was made with, and how it samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel


@dataclass(frozen=True)
class StackSampling:
    """How a stack samples, and the distribution of each side's log-probs; with "auto" the audit chooses it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    sampler_logprobs: str = "auto"  # or the kind of a `Definition`
    trainer_logprobs: str = "auto"
    is_temperature_given: bool = True

    def is_tempered(self) -> bool:
        """Return whether the temperature changes the distribution."""
        return self.temperature != 1.0

    def is_cut(self) -> bool:
        """Return whether only some tokens can be drawn."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    def is_processed(self) -> bool:
        """Return whether an option beside the temperature changes the distribution."""
        return self.is_cut() or self.repetition_penalty != 1.0

    def has_top_k_and_p(self) -> bool:
        """Return whether top-p may count only the tokens of top-k."""
        return self.top_k > 0 and self.top_p < 1.0


@dataclass(frozen=True)
class StackModel:
    """Model of a dump, other weights by description, and the tokens and tokenizer that may have changed its prompts."""

    model: PreTrainedModel
    others: Mapping[str, PreTrainedModel]
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    tokenizer: Any = None  # of transformers; None: without the causes that need one

    @property
    def models(self) -> dict[str, PreTrainedModel]:
        """Return all models by name."""
        return {"model": self.model, **self.others}


def positions(model: PreTrainedModel) -> float:
    """Return the number of positions of a model, infinity for no limit."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return math.inf if most is None else most


def vocabulary(model: PreTrainedModel) -> int:
    """Return the number of token ids of a model; a tokenizer may have more."""
    return int(model.config.get_text_config().vocab_size)
