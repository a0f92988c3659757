"""Plan the memory of Qwen3 models on 1, 2, 4 and 8 GPUs, without weights: `python -m experiments.benchmarks.cards`.

GRPO on 64 responses a step, contexts of 1,024 tokens, one response at a time in an update, activations recomputed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from transformers import Qwen3Config

from ppo_repro.config.run import RunConfig
from ppo_repro.runs.plan import plan_run

MODELS = {  # hidden size, layers, heads, intermediate size, whether the head is the embedding
    "0.6B": (1024, 28, 16, 3072, True),
    "1.7B": (2048, 28, 16, 6144, True),
    "4B": (2560, 36, 32, 9728, True),
    "8B": (4096, 36, 32, 12288, False),
}
GPUS = (1, 2, 4, 8)
CARDS = (24e9, 80e9)  # bytes
LORA = {"rank": 16, "alpha": 32.0}


def write_config(folder: Path, name: str) -> None:
    """Write config.json of a Qwen3 model."""
    hidden, layers, heads, intermediate, tied = MODELS[name]
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=tied,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(folder)


def config_of(folder: Path, lora: bool) -> RunConfig:
    """Return the run that is planned, of the model in a folder."""
    tree = {
        "experiment": "cards",
        "seed": 1,
        "model": {"kind": "folder", "path": str(folder)},
        "task": {"kind": "arithmetic", "max_operand": 12, "num_eval_prompts": 16},
        "rollout": {"prompts_per_iteration": 16, "samples_per_prompt": 16, "max_response_tokens": 512},
        "lora": LORA if lora else None,
        "kl": {"placement": "loss"},
        "value": {"kind": "none"},
        "advantages": {"kind": "group"},
        "ppo": {"iterations": 100, "epochs": 1, "minibatch_size": 64, "learning_rate": 1e-6},
        "numerics": {"max_context": 1024},
        "layout": {
            "device": "cuda",
            "rollout_slots": 16,
            "forward_micro_batch": 1,
            "update_micro_batch": 1,
            "gradient_checkpointing": True,
        },
    }
    return RunConfig.model_validate(tree)


def row(name: str, lora: bool) -> str:
    """Return the row of a model in the table: the peak of each process in GB, and the smallest GPU that has it."""
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), name)
        plans = [plan_run(config_of(Path(folder), lora), gpus) for gpus in GPUS]
    cells = []
    for plan in plans:
        fits = next((f" ({card / 1e9:.0f})" for card in CARDS if plan.peak <= card), " (no)")
        cells.append(f"{plan.peak / 1e9:.1f}{fits}")
    sent = " | ".join(f"{plan.sent / 1e9:.2f}" for plan in plans[1:])
    return f"| {name}, {'LoRA' if lora else 'all weights'} | {' | '.join(cells)} | {sent} |"


def table() -> list[str]:
    """Return the table in Markdown."""
    gpus = " | ".join(f"{count} GPU{'s' if count > 1 else ''}" for count in GPUS)
    sent = " | ".join(f"sent, {count}" for count in GPUS[1:])
    head = [f"| Qwen3 | {gpus} | {sent} |", "|---" * (2 * len(GPUS)) + "|"]
    return [*head, *(row(name, lora) for name in MODELS for lora in (False, True))]


if __name__ == "__main__":
    print("\n".join(table()))
