"""A small GGUF file, written with llama.cpp's own writer: what is read from it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from ppo_repro.assets import gguf_llama
from ppo_repro.errors import UserError
from tests.support.small_models import llama_config

TO_FILE = {name: key for key, name in gguf_llama._OF_LAYER.items()}
LETTERS = [chr(0x21 + i) for i in range(70)]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = llama_config(
        vocab_size=3 + len(LETTERS) + 2,
        hidden_size=64,
        intermediate_size=96,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def neighbours(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order of llama.cpp, row by row from its definition: its row 2i is our i, 2i + 1 our i + d/2 of a head."""
    size = len(weight) // heads
    rows = [head * size + i + half * (size // 2) for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return weight[rows]


def write_gguf(path: Path, model: LlamaForCausalLM, architecture: str = "llama", pre: str = "smollm") -> None:
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokens = ["<|end|>", "<|begin|>", "Ġ", *LETTERS, "ab", "Ġa"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (len(tokens) - 2))
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, parameter in model.named_parameters():
        add_tensor(writer, name, parameter.detach().numpy(), config.num_attention_heads, config.num_key_value_heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(writer: GGUFWriter, name: str, weight: np.ndarray, heads: int, key_heads: int) -> None:
    by_model = {ours: theirs for theirs, ours in gguf_llama._OF_MODEL.items()}
    if name in by_model:
        writer.add_tensor(by_model[name], weight)
        return
    _, _, index, rest = name.split(".", 3)
    key = TO_FILE[rest.removesuffix(".weight")]
    if key in ("attn_q", "attn_k"):
        weight = neighbours(weight, heads if key == "attn_q" else key_heads)
    if key == "ffn_up":  # one quantised tensor
        packed = quantize(weight, GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"blk.{index}.{key}.weight", packed, raw_dtype=GGMLQuantizationType.Q8_0)
        return
    writer.add_tensor(f"blk.{index}.{key}.weight", weight)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return small_llama()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, model: LlamaForCausalLM) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(path, model)
    return path


def test_weights_are_the_models_own(path: Path, model: LlamaForCausalLM) -> None:
    weights = gguf_llama.weights(gguf_llama.read_llama(path))
    expected = {name: p.detach().numpy() for name, p in model.named_parameters()}
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert weight.dtype == np.float32
        if "up_proj" in name:  # 8 bits: off by half a step of its block at most
            step = np.abs(expected[name]).reshape(-1, 32).max(1) / 127
            error = np.abs(weight - expected[name]).reshape(-1, 32).max(1)
            # float16 scales lose 2^-11 of the largest of up to 127 steps
            assert error.max() > 0 and (error <= step * (0.5 + 127 * 2**-11)).all()
        else:
            assert np.array_equal(weight, expected[name]), name


def test_transformers_reads_the_same_tensors(path: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    weights = gguf_llama.weights(gguf_llama.read_llama(path))
    for name, parameter in theirs.named_parameters():
        assert np.array_equal(weights[name], parameter.detach().numpy()), name


def test_without_the_row_order_queries_differ(path: Path, model: LlamaForCausalLM) -> None:
    """The negative control: rows of the file as they stand are another matrix."""
    raw = gguf_llama.read_llama(path).tensors["blk.0.attn_q.weight"]
    assert not np.array_equal(raw, model.model.layers[0].self_attn.q_proj.weight.detach().numpy())


def test_config_and_tokenizer_load_in_transformers(path: Path, model: LlamaForCausalLM, tmp_path: Path) -> None:
    file = gguf_llama.read_llama(path)
    config = gguf_llama.model_config(file)
    for name in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "vocab_size"):
        assert config[name] == getattr(model.config, name), name
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, text in gguf_llama.tokenizer_files(file).items():
        (tmp_path / name).write_text(text)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token == "<|end|>" and tokenizer.eos_token_id == 0
    # merges apply, a space goes with the letter after it, digits stand alone, special tokens are one
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("ab a 12<|end|>").input_ids)
    assert pieces == ["ab", "Ġa", "Ġ", "1", "2", "<|end|>"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"


def test_what_is_no_llama_is_refused(tmp_path: Path, model: LlamaForCausalLM) -> None:
    write_gguf(tmp_path / "other.gguf", model, architecture="qwen2")
    with pytest.raises(UserError, match="architecture qwen2; only llama"):
        gguf_llama.read_llama(tmp_path / "other.gguf")
    write_gguf(tmp_path / "pre.gguf", model, pre="default")
    with pytest.raises(UserError, match="tokenizer gpt2 default; only gpt2 smollm"):
        gguf_llama.tokenizer_files(gguf_llama.read_llama(tmp_path / "pre.gguf"))
    (tmp_path / "text.gguf").write_bytes(b"GGUF is not what follows")
    with pytest.raises(UserError, match="cannot be read as GGUF"):
        gguf_llama.read_llama(tmp_path / "text.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(UserError, match="cannot be read as GGUF"):
        gguf_llama.read_llama(tmp_path / "empty.gguf")
