"""Check the numbers of a model's configuration, before anything of their size is allocated.

`validity.c` checks with the whole model that the numbers fit each other.
"""

from __future__ import annotations

from collections.abc import Mapping

from ppo_repro.base.errors import UserError
from ppo_repro.numerics.interface import constants

MAX_LAYERS, MAX_WIDTH = constants.MAX_LAYERS, constants.MAX_WIDTH
MAX_VOCABULARY, MAX_EXPERTS = constants.MAX_VOCABULARY, constants.MAX_EXPERTS
_MAX_INT = (1 << 31) - 1
_WHOLE = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), (1, MAX_LAYERS)),
    **dict.fromkeys(("hidden_size", "n_embd", "num_attention_heads", "n_head", "num_key_value_heads"), (1, MAX_WIDTH)),
    **dict.fromkeys(("head_dim", "intermediate_size", "moe_intermediate_size", "n_inner"), (1, MAX_WIDTH)),
    "vocab_size": (1, MAX_VOCABULARY),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), (1, MAX_EXPERTS)),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "original_max_position_embeddings"), (1, _MAX_INT)
    ),
    **dict.fromkeys(("sliding_window", "decoder_sparse_step"), (1, _MAX_INT)),
    "max_window_layers": (0, _MAX_INT),
    "num_labels": (1, MAX_WIDTH),
}
_NUMBERS = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), (1e-30, 1.0)),
    **dict.fromkeys(("rope_theta", "rotary_emb_base"), (1.0, 1e30)),  # from 1 on no angle exceeds its position
    "factor": (1.0, 1e9),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), (1e-9, 1e9)),
    **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"), (1e-9, 1e9)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier"), (1e-9, 1e9)),
    **dict.fromkeys(("logits_scaling", "query_pre_attn_scalar"), (1e-9, 1e9)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (1e-9, 1e9)),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (1e-9, 1.0)),
}
_ROPE = ("rope_parameters", "rope_scaling", "full_attention", "sliding_attention")  # the last two inside the first
RANGES = {**_WHOLE, **_NUMBERS}


def check_ranges(fields: Mapping[str, object], where: str) -> None:
    """Raise UserError, beginning with `where`, for the first value that is no number or out of range.

    `fields` are from config.json or a PretrainedConfig. transformers checks values of None.
    """
    for name, value in fields.items():
        if name in RANGES and value is not None:
            least, most = RANGES[name]
            if name == "sliding_window" and fields.get("use_sliding_window") is False:
                least = 0  # transformers writes 0 for a Qwen2-MoE without a window
            _check(f"{where} {name}", value, least, most, name in _WHOLE)
        if name in _ROPE and isinstance(value, Mapping):
            check_ranges(value, f"{where} {name}:")
    padding, tokens = fields.get("pad_token_id"), fields.get("vocab_size")
    if padding is not None and isinstance(tokens, int):
        _check(f"{where} pad_token_id", padding, -tokens, tokens - 1, whole=True)


def _check(name: str, value: object, least: float, most: float, whole: bool) -> None:
    """Raise UserError unless a value is a number, or a whole number, from `least` to `most`."""
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:  # type: ignore[operator]  # false for NaN
        kind = "a whole number" if whole else "a number"
        shown = f"{value:.6g}" if isinstance(value, float) else " ".join(f"{value!r:.60}".split())
        bounds = f"{least} to {most}" if whole else f"{least:g} to {most:g}"
        raise UserError(f"{name} = {shown}: must be {kind} from {bounds}; restore it, or choose another model")
