"""Give a field of a model's configuration another value."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from ppo_repro.models.reading import quiet
from ppo_repro.models.stock import with_config
from ppo_repro.testing.audit.causes.architecture.option import Option, short

WITHOUT = {  # what a field that is left out means; other fields are named by themselves
    "attention_bias": "attention without its biases",
    "attn_logit_softcapping": "attention without its soft cap",
    "clip_qkv": "queries, keys and values without their limit",
    "embedding_multiplier": "embeddings without their factor",
    "final_logit_softcapping": "logits without their soft cap",
    "logit_scale": "logits without their factor",
    "logits_scaling": "logits without their divisor",
    "residual_multiplier": "residuals without their factor",
    "rope_parameters.partial_rotary_factor": "rotary positions in whole heads",
    "rope_parameters.rope_type": "rotary positions without their scaling",
    "routed_scaling_factor": "experts without their factor",
    "sliding_window": "attention without its sliding window",
}


def is_off(value: object) -> bool:
    """Return whether a value of a field turns an option off."""
    return value in (None, False, 0, 1, "default")


@dataclass(frozen=True)
class Change:
    """Another value of a field, or of an entry of a field; the value None removes the entry."""

    path: tuple[str, ...]
    old: Any
    new: Any

    @property
    def field(self) -> str:
        """Return the path with dots, as in `rope_parameters.factor`."""
        return ".".join(self.path)

    @property
    def is_off(self) -> bool:
        """Return whether the change turns off an option of WITHOUT."""
        return self.field in WITHOUT and is_off(self.new)

    @property
    def words(self) -> str:
        """Describe the change."""
        if self.is_off:
            return f"{WITHOUT[self.field]} ({self.field})"
        if isinstance(self.new, list):
            return f"{self.field} {self._order(self.new)}"
        return f"{self.field} {short(self.new)} instead of {short(self.old)}"

    def _order(self, new: list[Any]) -> str:
        if all(x == new[0] for x in new):
            return f"{short(new[0])} everywhere"
        if new == self.old[::-1]:
            return "in the opposite order"
        return f"moved {'back' if new == [*self.old[1:], self.old[0]] else 'on'} by one place"

    def apply(self, config: PretrainedConfig) -> None:
        """Write the value into the configuration without its validation."""
        if len(self.path) == 1:
            setattr(config, self.path[0], self.new)
            return
        entry = copy.deepcopy(getattr(config, self.path[0]))
        inner = entry
        for key in self.path[1:-1]:
            inner = inner[key]
        if isinstance(inner, PretrainedConfig):
            setattr(inner, self.path[-1], self.new)
        elif self.new is None:
            del inner[self.path[-1]]
        else:
            inner[self.path[-1]] = self.new
        setattr(config, self.path[0], entry)


def changed(model: PreTrainedModel, changes: Sequence[Change]) -> Option:
    """Return the option of the model with some changes of its configuration."""

    def make() -> PreTrainedModel:
        config = copy.deepcopy(model.config)
        config._attn_implementation = "eager"
        with quiet(), warnings.catch_warnings(action="ignore"):  # of matrices without elements
            for change in changes:
                change.apply(config.get_text_config())
            return with_config(model, config)

    said = " and ".join(f"{change.field} {short(change.old)}" for change in changes)
    words = " and ".join(change.words for change in changes)
    return Option(words, f"compute with {said} on both sides, as config.json says", make, len(changes))
