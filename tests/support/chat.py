"""A random model with a chat template, and runs on prompts of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import AddedToken

from ppo_repro.tasks.tokenizer import train_bpe
from tests.support.models import gpt2_config, small_model

TRIMMING = (
    "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] | trim }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def make_chat_folder(folder: Path, template: str = TRIMMING, rows: int = 0) -> Path:
    """A random model of ten tokens; `<answer>` and `<end>` are special, and the chat template trims, as Llama 3's.

    `rows`: how many rows the model has more than the tokenizer tokens.
    """
    tokenizer = train_bpe(["ab ", "us"], 9)
    tokenizer.add_tokens([AddedToken(text, special=True) for text in ("<answer>", "<end>")])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    model: Any = small_model(gpt2_config(vocab_size=len(tokenizer) + rows, tie_word_embeddings=False), 0)
    with torch.no_grad():  # hidden state 0 is always 5, and makes `<pad>` impossible
        model.transformer.ln_f.weight[0], model.transformer.ln_f.bias[0] = 0.0, 5.0
        model.lm_head.weight[:, 0] = torch.tensor([-20.0] + [0.0] * (len(tokenizer) + rows - 1))
    model.save_pretrained(folder)
    return folder


def chat_tree(model: Path, task: dict[str, Any], reward: dict[str, Any], **rollout: Any) -> dict[str, Any]:
    """A run of one iteration."""
    return {
        "experiment": "chat",
        "seed": 1,
        "model": {"kind": "folder", "path": str(model)},
        "task": {"num_eval_prompts": 2, "chat_template": True, **task},
        "rollout": {"prompts_per_iteration": 6, "samples_per_prompt": 4, "max_response_tokens": 12, **rollout},
        "reward": {"terms": [reward]},
        "value": {"learning_rate": 1e-4},
        "ppo": {"iterations": 1, "epochs": 1, "minibatch_size": 8, "learning_rate": 1e-4},
        "numerics": {"max_context": 40, "accuracy_sequences": 0},
    }


def write_tree(folder: Path, tree: dict[str, Any]) -> Path:
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder / "run.yaml"
