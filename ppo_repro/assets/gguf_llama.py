"""A Llama in a GGUF file as the files of a transformers folder, without transformers and without torch.

The names of fields and tensors are those of llama.cpp's `gguf-py` (constants.py, tensor_mapping.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ppo_repro.errors import UserError

_CONTROL = 3  # gguf.TokenType.CONTROL
_OF_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class LlamaFile:
    """The contents of a GGUF file whose architecture is `llama`."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, np.ndarray]  # by the file's own names, float32, [out, in] as in transformers


def read_llama(path: Path) -> LlamaFile:
    """All fields, and all tensors dequantised to float32; UserError for a file that is no GGUF, or no Llama."""
    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        if fields.get("general.architecture") != "llama":
            raise UserError(f"{path}: architecture {fields.get('general.architecture')}; only llama can be converted")
        tensors = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    except (OSError, ValueError, KeyError, IndexError, NotImplementedError) as error:
        raise UserError(f"{path}: cannot be read as GGUF ({' '.join(str(error).split())[:200]})") from error
    return LlamaFile(path, fields, tensors)


def weights(file: LlamaFile) -> dict[str, np.ndarray]:
    """The float32 tensors by their names in transformers; UserError for a tensor that a Llama does not have."""
    heads = int(file.fields["llama.attention.head_count"])
    key_heads = int(file.fields["llama.attention.head_count_kv"])
    result = {}
    for name, tensor in file.tensors.items():
        if name.endswith("attn_q.weight"):
            tensor = _rotary_halves(tensor, heads)
        elif name.endswith("attn_k.weight"):
            tensor = _rotary_halves(tensor, key_heads)
        result[_transformers_name(file.path, name)] = np.ascontiguousarray(tensor, dtype=np.float32)
    return result


def _transformers_name(path: Path, name: str) -> str:
    if name in _OF_MODEL:
        return _OF_MODEL[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    part = rest.removesuffix(".weight")
    if not (name.startswith("blk.") and block.isdecimal() and rest.endswith(".weight") and part in _OF_LAYER):
        raise UserError(f"{path}: tensor {name} belongs to no Llama; choose another file")
    return f"model.layers.{int(block)}.{_OF_LAYER[part]}.weight"


def _rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order of transformers.

    llama.cpp rotates neighbours (2i, 2i + 1) of a head, transformers (i, i + d/2); the file has the first order.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def model_config(file: LlamaFile) -> dict[str, Any]:
    """`config.json`."""
    fields = file.fields
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "dtype": "float32",
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": _as_written(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": {"rope_theta": _as_written(fields["llama.rope.freq_base"]), "rope_type": "default"},
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }


def _as_written(value: float) -> float:
    """The decimal number that a float32 of the file stands for: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def tokenizer_files(file: LlamaFile) -> dict[str, str]:
    """`tokenizer.json` and `tokenizer_config.json` of a byte-level BPE that keeps digits apart (`pre` = smollm)."""
    fields = file.fields
    kind = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if kind != ("gpt2", "smollm"):
        raise UserError(f"{file.path}: tokenizer {' '.join(map(str, kind))}; only gpt2 smollm can be converted")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
    }
