"""Give a field of a model's configuration each value that another stack may have instead.

Nothing here knows a family: the fields are those that the model's code reads.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from ppo_repro.models.reading import quiet
from ppo_repro.models.stock import with_config
from ppo_repro.testing.audit.causes.cause import OtherModel, option
from ppo_repro.testing.audit.causes.names import (
    EPSILON,
    FACTOR,
    ROPE_TYPE,
    SCALE,
    SOFT_CAP,
    THETA,
    WINDOW,
    KnownNames,
    is_architecture,
)
from ppo_repro.testing.audit.causes.probe import is_finite
from ppo_repro.testing.audit.patches import override

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
_USUAL: Mapping[KnownNames, Sequence[float]] = {  # 0 and 1 say nothing there
    EPSILON: (1e-5, 1e-6, 1e-8, 1e-12),
    THETA: (1e4, 5e5, 1e6),
    SOFT_CAP: (30.0, 50.0),
}
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "quick_gelu")
FEW = 16  # experts, groups or kinds of layers, of which others may be taken
SHOWN = 60  # characters of a value


def of_fields(model: PreTrainedModel) -> Iterator[OtherModel]:
    """Yield the changes of each field that the model reads, and of options that are turned off together.

    A change that the model cannot compute is left out.
    """
    text, read = model.config.get_text_config(), fields_read(model)
    defaults = {f.name: f.default for f in dataclasses.fields(text) if f.default is not dataclasses.MISSING}
    off = list[FieldChange]()
    for field, value in sorted(text.to_dict().items()):
        if field in read and is_architecture(field):
            computed = _computed(model, _changes(text, field, value, defaults.get(field)))
            yield from (_cause_of(model, [change]) for change in computed)
            off += [change for change in computed if change.is_off]
    for count in sorted({2, len(off)} - {0, 1}):
        for some in itertools.combinations(off, count):
            if is_finite(partial(with_fields, model, some)):
                yield _cause_of(model, some)


def _computed(model: PreTrainedModel, changes: Iterable[FieldChange]) -> list[FieldChange]:
    """Return the changes that the model can compute, each once: of 1 and 1.0 the first that its class accepts."""
    found = list[FieldChange]()
    for change in changes:
        if not any(change.is_same(other) for other in found) and is_finite(partial(with_fields, model, [change])):
            found.append(change)
    return found


def _changes(config: PretrainedConfig, field: str, value: Any, default: Any) -> Iterator[FieldChange]:
    """Yield the alternatives of a field; if its value is a dict, the alternatives of each entry."""
    if not isinstance(value, dict):
        others = (other for other in _candidates(config, field, value, default) if other != value)
        yield from (FieldChange((field,), value, other) for other in others)
        return
    if value.get("rope_type", "default") != "default" and "attention_factor" not in value:
        yield FieldChange((field, "attention_factor"), None, 1.0)
    for key, inner in sorted(value.items()):
        if is_architecture(key):
            standard = "default" if ROPE_TYPE.recognise(key) else 1.0 if FACTOR.recognise(key) else None
            for change in _changes(config, key, inner, standard):
                yield FieldChange((field, *change.path), change.old, change.new)
    nested = {key: inner for key, inner in value.items() if isinstance(inner, dict)}
    for key, inner in nested.items():
        others = (other for name, other in nested.items() if name != key and other != inner)
        yield from (FieldChange((field, key), inner, other) for other in others)


def _candidates(config: PretrainedConfig, field: str, value: Any, default: Any) -> Iterable[Any]:
    usual = next((values for names, values in _USUAL.items() if names.recognise(field)), ())
    match value:
        case bool():
            return [not value]
        case str():
            return [*(ACTIVATIONS if value in ACT2FN else ()), default]
        case list() if value:
            return _other_lists(value)
        case int() | float() if WINDOW.recognise(field):
            return [None, value - 1, value + 1]
        case int() | float():
            neutral = [*usual, None] if usual else [None, 1, 1.0, 0, 0.0]
            neighbours = [value - 1, value + 1] if isinstance(value, int) and value <= FEW else []
            return [default, *neutral, *_scales(config, field), *neighbours]
        case None:
            return [default, *usual]
        case _:
            return []


def _other_lists(value: list[Any]) -> Iterator[list[Any]]:
    """Yield lists of one of the values, and of the values in another order."""
    kinds = [x for i, x in enumerate(value) if x not in value[:i]]
    if len(kinds) > FEW:
        yield [1.0] * len(value)  # as a factor of each frequency
        return
    yield from ([x] * len(value) for x in kinds)
    yield from ([*value[1:], *value[:1]], [*value[-1:], *value[:-1]], value[::-1])


def _scales(config: PretrainedConfig, field: str) -> Iterator[float]:
    """Yield the usual values of a scale: powers of a head's width."""
    if SCALE.recognise(field) and getattr(config, "num_attention_heads", None):
        own = config.hidden_size // config.num_attention_heads
        for w in {getattr(config, "head_dim", None) or own, own}:
            yield from (w, w**0.5, w**-0.5, 1 / w)


def is_off(value: object) -> bool:
    """Return whether a value of a field turns an option off."""
    return not value if isinstance(value, bool) else value in (None, 0, 1, "default")


@dataclass(frozen=True)
class FieldChange:
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

    def is_same(self, other: FieldChange) -> bool:
        """Return whether both give a field the same number, or turn the same option off."""
        return self.path == other.path and (self.new == other.new or (self.is_off and other.is_off))

    @property
    def words(self) -> str:
        """Describe the change."""
        if self.is_off:
            return f"{WITHOUT[self.field]} ({self.field})"
        if isinstance(self.new, list):
            return f"{self.field} {self._order(self.new)}"
        return f"{self.field} {_short(self.new)} instead of {_short(self.old)}"

    def _order(self, new: list[Any]) -> str:
        if all(x == new[0] for x in new):
            return f"{_short(new[0])} everywhere"
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


def _cause_of(model: PreTrainedModel, changes: Sequence[FieldChange]) -> OtherModel:
    said = " and ".join(f"{change.field} {_short(change.old)}" for change in changes)
    words = " and ".join(change.words for change in changes)
    advice = f"compute with {said} on both sides, as config.json says"
    return option(words, advice, partial(with_fields, model, changes), len(changes))


def with_fields(model: PreTrainedModel, changes: Sequence[FieldChange]) -> PreTrainedModel:
    """Return the model with some changes of its configuration."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    with quiet(), warnings.catch_warnings(action="ignore"):  # of matrices without elements
        for change in changes:
            change.apply(config.get_text_config())
        return with_config(model, config)


def _short(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def fields_read(model: PreTrainedModel) -> set[str]:
    """Return the names of the configuration's fields that a model reads in its constructor and its forward."""
    config, read = copy.deepcopy(model.config), set[str]()
    text = config.get_text_config()
    kind: Any = type(text)

    def reading(self: object, name: str) -> Any:
        read.add(kind.attribute_map.get(name, name))
        return kind.__getattribute__(self, name)

    override(text, "__getattribute__", reading)
    read.clear()
    with quiet(), torch.no_grad():
        stock: Any = with_config(model, config)
        stock(torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=False)
    return read
