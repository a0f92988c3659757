"""The names in transformers by which the audit recognises what a cause may change: every pattern, with an example.

A pattern is a regular expression. Most causes need no name: the audit tries every field that a model's code reads,
every norm, every vector. The names say which values a field may have, which module is a router, and which fields change
no log-prob. If transformers renames something, its row recognises nothing, and a cause is lost:
`tests/testing/audit/test_names.py` says which rows each family has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["field", "class", "module", "tensor", "number", "function"]


@dataclass(frozen=True)
class KnownNames:
    """The names of one kind that a regular expression matches as a whole.

    A field is of `config.json`, or an entry of its rotary parameters. A class is of a module. A tensor is a weight or a
    buffer in its module, a number an attribute of a module. A function is called by name in a family's code.
    """

    kind: Kind
    pattern: str
    example: str
    family: str  # the `model_type` of a family that has the example

    def recognise(self, name: str) -> bool:
        """Return whether the pattern matches a name."""
        return re.fullmatch(self.pattern, name) is not None


# parts of a model

NORM = KnownNames("class", "(?i:.*norm.*)", "LlamaRMSNorm", "llama")
ROUTER = KnownNames("class", ".*(Router|Gate|Gating)", "MixtralTopKRouter", "mixtral")
EXPERTS = KnownNames("module", ".*experts", "model.layers.0.mlp.experts", "mixtral")
SHARED_EXPERTS = KnownNames("module", ".*shared_experts?", "model.layers.1.mlp.shared_experts", "deepseek_v3")
BIAS = KnownNames("tensor", ".*bias", "bias", "qwen2")
FREQUENCIES = KnownNames("tensor", ".*inv_freq", "inv_freq", "llama")
EMBED_SCALE = KnownNames("tensor", "embed_scale", "embed_scale", "gemma2")
ROTATION = KnownNames("function", "apply_rotary_pos_emb", "apply_rotary_pos_emb", "llama")
REPETITION = KnownNames("function", "repeat_kv", "repeat_kv", "llama")

# fields with values of their own

EPSILON = KnownNames("field", ".*eps(ilon)?", "rms_norm_eps", "llama")
THETA = KnownNames("field", ".*theta", "rope_theta", "llama")
SOFT_CAP = KnownNames("field", ".*softcapping", "attn_logit_softcapping", "gemma2")
SCALE = KnownNames("field", ".*(scal|multiplier).*", "attention_multiplier", "granite")
WINDOW = KnownNames("field", ".*window", "sliding_window", "mistral")
FACTOR = KnownNames("field", ".*factor", "partial_rotary_factor", "gpt_neox")
ROPE_TYPE = KnownNames("field", "rope_type", "rope_type", "llama")

# fields of training, of tokens and of what is returned: no log-prob depends on them
OTHER_FIELDS = (
    KnownNames("field", ".*dropout.*", "attention_dropout", "llama"),
    KnownNames("field", ".*pdrop.*", "resid_pdrop", "gpt2"),
    KnownNames("field", ".*initializ.*", "initializer_range", "llama"),
    KnownNames("field", ".*init_.*", "init_std", "xglm"),
    KnownNames("field", ".*token_id.*", "pad_token_id", "llama"),
    KnownNames("field", "output_.*", "output_router_logits", "mixtral"),
    KnownNames("field", "return_.*", "return_dict", "llama"),
    KnownNames("field", "use_cache", "use_cache", "llama"),
    KnownNames("field", "_.*", "_name_or_path", "llama"),
    KnownNames("field", ".*aux_loss.*", "router_aux_loss_coef", "mixtral"),
    KnownNames("field", ".*jitter.*", "router_jitter_noise", "mixtral"),
    KnownNames("field", "dtype", "dtype", "llama"),
    KnownNames("field", ".*vocab_size.*", "vocab_size", "llama"),
    KnownNames("field", ".*is_encoder_decoder.*", "is_encoder_decoder", "llama"),
    KnownNames("field", ".*max_position_embeddings.*", "max_position_embeddings", "llama"),
    KnownNames("field", ".*problem_type.*", "problem_type", "llama"),
    KnownNames("field", ".*label.*", "id2label", "llama"),
    KnownNames("field", "num_hidden_layers", "num_hidden_layers", "llama"),
    KnownNames("field", "n_layer", "n_layer", "gpt2"),
)

# numbers of modules that change no log-prob, or that another cause changes
OTHER_NUMBERS = (
    KnownNames("number", ".*eps.*", "variance_epsilon", "llama"),
    KnownNames("number", ".*dropout.*", "attention_dropout", "llama"),
    KnownNames("number", "p", "p", "gpt2"),
    KnownNames("number", ".*norm_type.*", "norm_type", "llama"),
    KnownNames("number", ".*embed_scale.*", "scalar_embed_scale", "gemma2"),
    KnownNames("number", ".*aux_loss.*", "router_aux_loss_coef", "mixtral"),
    KnownNames("number", ".*attention_scaling.*", "attention_scaling", "llama"),
    KnownNames("number", ".*jitter.*", "jitter_noise", "mixtral"),
)


def is_architecture(field: str) -> bool:
    """Return whether a log-prob may depend on a field."""
    return not any(names.recognise(field) for names in OTHER_FIELDS)


def is_constant(number: str) -> bool:
    """Return whether a number of a module may be a constant that another stack has otherwise."""
    return not any(names.recognise(number) for names in OTHER_NUMBERS)
