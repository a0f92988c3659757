"""Sample with llama.cpp, one rollout at a time: read `step THREADS` lines, and answer each with a line of JSON.

The script runs in an environment of its own and imports nothing of ppo_repro. Arguments: the folder of a Llama with
tied embeddings and `prompt_ids.json`, then response length. The script writes the weights as float32 GGUF, as
llama.cpp's own converter does. Its first answer has the logits after the first prompt, which the other side compares.
Then each step samples one response to every prompt, all in one batch, at temperature 1.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as llama
import numpy as np
from safetensors.numpy import load_file

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
F32 = 0  # GGML_TYPE_F32; the cache of keys and values would be float16


def interleaved(w: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows of queries or keys for llama.cpp, which rotates neighbours where transformers rotates halves."""
    rows, columns = w.shape
    return w.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(folder: Path, path: Path) -> int:
    """Write the model in `folder` as float32 GGUF without a tokenizer; return the size of its vocabulary."""
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("no_vocab")
    tensors = load_file(folder / "model.safetensors")
    writer.add_tensor("token_embd.weight", tensors["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", tensors["model.norm.weight"])
    for layer in range(config["num_hidden_layers"]):
        for name, theirs in NAMES.items():
            w = tensors[f"model.layers.{layer}.{name}.weight"]
            count = {"attn_q": heads, "attn_k": kv_heads}.get(theirs)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", interleaved(w, count) if count else w)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return int(config["vocab_size"])


class Sampler:
    """Sampler of llama.cpp: a float32 context with room for all prompts and responses."""

    def __init__(self, path: Path, prompts: list[list[int]], response: int) -> None:
        self.prompts, self.response, self.seed = prompts, response, 0
        length = len(prompts[0]) + response
        llama.llama_backend_init()
        self.model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        settings = llama.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = len(prompts) * -(-length // 256) * 256, len(prompts)
        settings.n_batch = settings.n_ubatch = len(prompts) * len(prompts[0])
        settings.type_k = settings.type_v = F32
        settings.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED  # that of the CPU is in float16
        self.context = llama.llama_init_from_model(self.model, settings)
        if not self.model or not self.context:
            raise SystemExit("llama.cpp did not load the model")
        self.batch = llama.llama_batch_init(settings.n_batch, 0, 1)

    def decode(self, rows: list[list[int]], position: int) -> list[int]:
        """Add tokens to all sequences, and return the index in the batch of each sequence's last token."""
        batch, place, last = self.batch, 0, []
        for sequence, tokens in enumerate(rows):
            for offset, token in enumerate(tokens):
                batch.token[place], batch.pos[place] = token, position + offset
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
                batch.logits[place] = offset == len(tokens) - 1
                place += 1
            last.append(place - 1)
        batch.n_tokens = place
        if llama.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        return last

    def clear(self, threads: int) -> None:
        llama.llama_set_n_threads(self.context, threads, threads)
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)

    def first_logits(self, vocabulary: int) -> list[float]:
        """Return the logits after the first prompt."""
        self.clear(1)
        (place,) = self.decode(self.prompts[:1], 0)
        pointer = llama.llama_get_logits_ith(self.context, place)
        return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (vocabulary,)).tolist()

    def responses(self, threads: int) -> list[list[int]]:
        """Return a response to every prompt; each sequence has random numbers of its own."""
        self.clear(threads)
        chains = []
        for _ in self.prompts:
            self.seed += 1
            chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
            llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_temp(1.0))
            llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_dist(self.seed))
            chains.append(chain)
        found: list[list[int]] = [[] for _ in self.prompts]
        rows, position = self.prompts, 0
        for _ in range(self.response):
            places = self.decode(rows, position)
            position += len(rows[0])
            rows = [[llama.llama_sampler_sample(c, self.context, i)] for c, i in zip(chains, places, strict=True)]
            for tokens, row in zip(found, rows, strict=True):
                tokens += row
        for chain in chains:
            llama.llama_sampler_free(chain)
        return found


def main() -> None:
    folder, response = Path(sys.argv[1]), int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what llama.cpp prints must not mix with the answers

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    prompts = json.loads((folder / "prompt_ids.json").read_text())
    vocabulary = write_gguf(folder, folder / "model.gguf")
    sampler = Sampler(folder / "model.gguf", prompts, response)
    answer(sampler.first_logits(vocabulary))
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        found = sampler.responses(int(line.split()[1]))
        answer({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu})
        assert all(len(tokens) == response for tokens in found)


if __name__ == "__main__":
    main()
