"""How good is a warm start, in a unit independent of the tokenizer? `python -m experiments.tokenization.warm_starts`

Prints, by tokenizer and warm-start steps, -log p(answer and its end | prompt) of held-out prompts in nats per character
of the answers, and in nats per token.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ppo_repro.config.files import load_config
from ppo_repro.config.run import RunConfig
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import policy_logits
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.runs.prepare import prepare

BASE = Path(__file__).with_name("base.yaml")
TOKENIZERS = {
    "characters": ["model.tokenizer=characters"],
    "bpe-64": ["model.tokenizer=bpe", "model.vocab_size=64"],
    "bpe-256": ["model.tokenizer=bpe", "model.vocab_size=256"],
    "bpe-1024": ["model.tokenizer=bpe", "model.vocab_size=1024"],
    "words": ["model.tokenizer=words"],
}


def held_out_nats(config: RunConfig) -> tuple[float, float]:
    """-sum log p of the held-out answers and their end tokens, per character of the answers and per token."""
    prepared = prepare(config, lambda step, total, loss: None)
    task = prepared.task
    tokenizer, problems = task.tokenizer, task.problems.held_out
    answers = [[*tokenizer(p.answer)["input_ids"], tokenizer.eos_token_id] for p in problems]
    batch = lay_out([task.prompt_ids[p.key] for p in problems], answers, "right")
    with torch.no_grad():
        logits = policy_logits(prepared.state.policy, batch)
        logprobs, _ = token_statistics(logits, batch.targets, 1.0, None, config.numerics.mode)
    total = -float(logprobs.to(torch.float64).sum())
    return total / sum(len(p.answer) for p in problems), total / len(logprobs)


def main() -> None:
    parser = argparse.ArgumentParser(description="held-out nats per character after a warm start")
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 200, 300])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tokenizers", nargs="+", choices=TOKENIZERS, default=list(TOKENIZERS))
    arguments = parser.parse_args()
    print("| tokenizer | steps | seed | nats per character | nats per token |\n|---|---|---|---|---|")
    for name in arguments.tokenizers:
        for steps in arguments.steps:
            for seed in arguments.seeds:
                overrides = [*TOKENIZERS[name], f"model.warm_start_steps={steps}", f"seed={seed}"]
                config = load_config(BASE, ["numerics.mode=native", *overrides])
                per_character, per_token = held_out_nats(config)
                print(f"| {name} | {steps} | {seed} | {per_character:.4f} | {per_token:.4f} |", flush=True)


if __name__ == "__main__":
    main()
