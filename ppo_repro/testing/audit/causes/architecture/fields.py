"""Change one field of a model's configuration to each value that a stack may have instead."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from ppo_repro.testing.audit.causes.architecture.change import Change, changed
from ppo_repro.testing.audit.causes.architecture.fields_read import fields_read
from ppo_repro.testing.audit.causes.architecture.option import Option

# fields of training, of tokens and of what is returned: no log-prob depends on them
_OTHER_FIELDS = re.compile(
    r"dropout|pdrop|initializ|init_|token_id|^output_|^return_|^use_cache$|^_|aux_loss|jitter|^dtype$|vocab_size|"
    r"is_encoder_decoder|max_position_embeddings|problem_type|label|^num_hidden_layers$|^n_layer$"
)
_USUAL: Mapping[str, Sequence[float]] = {  # of fields that end so; 0 and 1 say nothing there
    "eps": (1e-5, 1e-6, 1e-8, 1e-12),
    "epsilon": (1e-5, 1e-6, 1e-8, 1e-12),
    "theta": (1e4, 5e5, 1e6),
    "softcapping": (30.0, 50.0),
}
_SCALES = re.compile("scal|multiplier")  # their usual values are powers of a head's width
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "quick_gelu")
FEW = 16  # experts, groups or kinds of layers, of which others may be taken


def of_fields(model: PreTrainedModel) -> Iterator[Option]:
    """Yield changes of each field that the model reads, and of all options together that can be turned off."""
    text, read = model.config.get_text_config(), fields_read(model)
    defaults = {f.name: f.default for f in dataclasses.fields(text) if f.default is not dataclasses.MISSING}
    left: dict[str, Change] = {}
    for field, value in sorted(text.to_dict().items()):
        if field in read and not _OTHER_FIELDS.search(field):
            for change in _changes(text, field, value, defaults.get(field)):
                option = changed(model, [change])
                yield option
                if change.is_off and change.field not in left and option.is_computed:
                    left[change.field] = change
    for count in sorted({2, len(left)} - {0, 1}):
        for some in itertools.combinations(left.values(), count):
            yield changed(model, some)


def _changes(config: PretrainedConfig, field: str, value: Any, default: Any) -> Iterator[Change]:
    """Yield the alternatives of a field; if its value is a dict, the alternatives of each entry."""
    if not isinstance(value, dict):
        yield from (Change((field,), value, other) for other in _others(config, field, value, default))
        return
    if value.get("rope_type", "default") != "default" and "attention_factor" not in value:
        yield Change((field, "attention_factor"), None, 1.0)
    for key, inner in sorted(value.items()):
        if not _OTHER_FIELDS.search(key):
            standard = "default" if key == "rope_type" else 1.0 if key.endswith("factor") else None
            for change in _changes(config, key, inner, standard):
                yield Change((field, *change.path), change.old, change.new)
    nested = {key: inner for key, inner in value.items() if isinstance(inner, dict)}
    for key, inner in nested.items():
        others = (other for name, other in nested.items() if name != key and other != inner)
        yield from (Change((field, key), inner, other) for other in others)


def _others(config: PretrainedConfig, field: str, value: Any, default: Any) -> list[Any]:
    usual = next((list(values) for end, values in _USUAL.items() if field.endswith(end)), None)
    candidates: list[Any] = []
    if isinstance(value, bool):
        candidates = [not value]
    elif isinstance(value, str):
        candidates = [*(ACTIVATIONS if value in ACT2FN else ()), default]
    elif isinstance(value, list) and value:
        kinds = [x for i, x in enumerate(value) if x not in value[:i]]
        whole = kinds if len(kinds) <= FEW else [1.0]  # as a factor of each frequency
        candidates = [[x] * len(value) for x in whole]
        candidates += [[*value[1:], *value[:1]], [*value[-1:], *value[:-1]], value[::-1]] * (len(kinds) <= FEW)
    elif isinstance(value, int | float):
        candidates = [default, *usual, None] if usual else [default, None, 1, 1.0, 0, 0.0]
        if _SCALES.search(field) and getattr(config, "num_attention_heads", None):
            own = config.hidden_size // config.num_attention_heads
            widths = {getattr(config, "head_dim", None) or own, own}
            candidates += [scale for w in widths for scale in (w, w**0.5, w**-0.5, 1 / w)]
        if field.endswith("window"):
            candidates = [None, value - 1, value + 1]
        elif isinstance(value, int) and value <= FEW:
            candidates += [value - 1, value + 1]
    else:
        candidates = [default, *(usual or ())] if value is None else []
    found: list[Any] = []
    for other in candidates:
        if other != value and not any(other == x and type(other) is type(x) for x in found):
            found.append(other)
    return [x for x in found if x is not None or value is not None]
