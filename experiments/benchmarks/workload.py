"""Define the compared work: three sizes of Llama, prompts of 16 tokens, responses of 64 tokens without early stops."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from ppo_repro.base.seeding import bell, permutation
from ppo_repro.numerics.families import attention_of

PROMPT, RESPONSE = 16, 64  # tokens
SEQUENCES, EPOCHS, MINIBATCHES = 32, 4, 4  # of one iteration; minibatches of one epoch
CONTEXT = PROMPT + RESPONSE


@dataclass(frozen=True)
class Size:
    """Shape of a Llama whose heads have width 64."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    kv_heads: int
    vocabulary: int


SMALL = Size("4x128, vocabulary 512", 4, 128, 512, 1, 512)
MEDIUM = Size("4x256, vocabulary 512", 4, 256, 1024, 2, 512)
LARGE = Size("4x896, vocabulary 8192", 4, 896, 4864, 2, 8192)
SIZES = {"small": SMALL, "medium": MEDIUM, "large": LARGE}

# what the published models set, and transformers leaves out
NUMBERS = {"granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}}


def set_random_weights(model: PreTrainedModel) -> None:
    """Set random weights from named random streams."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.from_numpy(bell(p.numel(), "benchmark", 0, name)).view(p.shape)
            p.copy_(1.0 + 0.1 * noise if "norm" in name else noise * (p.shape[-1] ** -0.5))


def make_model(size: Size, family: str = "llama") -> PreTrainedModel:
    """Return a model with random weights and a Llama's shape; embedding and head share one matrix."""
    config = AutoConfig.for_model(
        family,
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        head_dim=64,
        **NUMBERS.get(family, {}),
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_of(config)).eval()
    set_random_weights(model)
    return model


def prompt_ids(size: Size, count: int, stream: int = 0) -> list[tuple[int, ...]]:
    """Return `count` different prompts of PROMPT tokens."""
    return [
        tuple(int(i) for i in permutation(size.vocabulary, "benchmark prompt", stream, row)[:PROMPT])
        for row in range(count)
    ]


def make_tokenizer(size: Size) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the word `w<i>` for token i. The last token is the end token, at which nothing stops."""
    words = {f"w{i}": i for i in range(size.vocabulary)}
    bare = Tokenizer(models.WordLevel(words, unk_token="w0"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    end = f"w{size.vocabulary - 1}"
    return PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="w0", eos_token=end)


def write_folder(size: Size, folder: Path, prompts: int) -> None:
    """Write model, tokenizer and `prompts.jsonl` with `prompts` prompts. Every candidate starts from this folder."""
    make_model(size).save_pretrained(folder)
    make_tokenizer(size).save_pretrained(folder)
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for ids in prompt_ids(size, prompts):
            # an answer, so that there are scores
            file.write(json.dumps({"prompt": " ".join(f"w{i}" for i in ids), "answer": "w1"}) + "\n")
