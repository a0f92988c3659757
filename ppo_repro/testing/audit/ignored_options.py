"""Find options that a model's configuration sets and its code never reads: transformers accepts unknown fields."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from ppo_repro.testing.audit.causes.fields import FieldChange, fields_read, is_off, with_fields
from ppo_repro.testing.audit.causes.names import FACTOR
from ppo_repro.testing.audit.causes.probe import probed

# what a configuration may ask for, and the class of a model may ignore
ASKED = (
    "alibi", "attention_multiplier", "attn_logit_softcapping", "clip_qkv", "embedding_multiplier",
    "final_logit_softcapping", "logit_scale", "logits_scaling", "parallel_attn", "qk_layernorm",
    "query_pre_attn_scalar", "residual_multiplier", "routed_scaling_factor", "scale_attn_by_inverse_layer_idx",
    "sliding_window", "use_parallel_residual", "use_qk_norm",
)  # fmt: skip


def not_computed(model: PreTrainedModel) -> dict[str, Any]:
    """Return the architecture's options that the configuration sets but the model's code never reads.

    transformers accepts unknown fields in config.json, and rotary factors that a type of scaling does not use.
    """
    config, read = model.config.get_text_config(), fields_read(model)
    asked = {field: getattr(config, field, None) for field in ASKED}
    if getattr(config, "layer_types", None):  # which say that no layer has a window
        del asked["sliding_window"]
    found = {field: value for field, value in asked.items() if not is_off(value) and field not in read}
    rope = config.to_dict().get("rope_parameters") or {}
    of_kinds = {key: inner for key, inner in rope.items() if isinstance(inner, dict)} or {"": rope}
    for kind, inner in of_kinds.items():
        for key in [key for key, value in inner.items() if FACTOR.recognise(key) and not is_off(value)]:
            change = FieldChange(("rope_parameters", *([kind] if kind else []), key), inner[key], None)
            without, whole = probed(partial(with_fields, model, [change])), probed(lambda: model)
            if without is not None and whole is not None and torch.equal(without, whole):
                found[change.field] = inner[key]
    return found
