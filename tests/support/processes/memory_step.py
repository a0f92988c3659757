"""Run as a program: one rollout, scoring and update as large as a plan says; prints bytes, planned and measured."""

from __future__ import annotations

import json
import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import freeze, make_policy, make_value_model, policy_logits, value_predictions
from ppo_repro.numerics import backend
from ppo_repro.numerics.logprobs import token_statistics
from ppo_repro.numerics.optim.adamw import AdamWSettings
from ppo_repro.numerics.optim.optimizer import make_optimizer
from ppo_repro.plan.memory import PROCESS, Plan, Work, make_plan
from ppo_repro.plan.shapes import model_shape
from ppo_repro.rollout.engine import Request, Sampling
from ppo_repro.rollout.torch_engine import TorchEngine

PROMPT, RESPONSE, SEQUENCES, UPDATE = 16, 80, 24, 12
SETTINGS = AdamWSettings(1e-4, 0.9, 0.95, 1e-8, 0.0, 1.0)


def config(hidden: int, layers: int, vocab_size: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )


def work_of(kernels: str, sequences: int, update: int) -> Work:
    context = PROMPT + RESPONSE
    return Work(kernels, sequences, context, RESPONSE, sequences, sequences, update, False, False, 0, False)


def iteration(mode: str, shape: Qwen3Config, work: Work) -> None:
    """What an iteration of PPO computes, every sequence as long as the plan takes it."""
    torch.manual_seed(0)
    source = Qwen3ForCausalLM(shape).eval()
    policy, reference = make_policy(source, mode, work.max_context), freeze(make_policy(source, mode, work.max_context))
    value_model = make_value_model(source, mode, work.max_context, 0)
    del source
    optimizers = [make_optimizer(m, SETTINGS, mode) for m in (policy, value_model)]
    engine = TorchEngine(policy, frozenset(), mode, work.max_context, work.slots, 0, prefix_cache=False)
    requests = [Request(tuple(range(i, i + PROMPT)), i) for i in range(work.sequences)]
    responses = [c.response_ids for c in engine.generate(requests, Sampling(1.0, 0, 1.0, RESPONSE))]
    prompts = [r.prompt_ids for r in requests]
    everything = lay_out(prompts, responses, "right")
    with torch.no_grad():
        for model in (policy, reference):
            token_statistics(policy_logits(model, everything), everything.targets, 1.0, None, mode)
        value_predictions(value_model, everything)
    batch = lay_out(prompts[: work.update_sequences], responses[: work.update_sequences], "right")

    def policy_backward() -> None:
        logprobs, _ = token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, mode)
        torch.autograd.backward(logprobs, torch.full_like(logprobs, 1.0 / len(logprobs)))

    def value_backward() -> None:
        values = value_predictions(value_model, batch)
        torch.autograd.backward(values, torch.full_like(values, 1.0 / len(values)))

    for _ in range(2):  # moments of stock AdamW are there from the second step on
        optimizers[0].step(policy_backward, batch.real_tokens)
        optimizers[1].step(value_backward, batch.real_tokens)


def status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))


def measured(mode: str, shape: Qwen3Config, work: Work) -> int:
    """Growth of the resident set from before the models to its peak."""
    small = work_of(work.kernels, 2, 2)
    iteration(mode, config(64, 1, 64), small)  # compiles the kernels
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again from now
    before = status("VmRSS")
    iteration(mode, shape, work)
    return status("VmHWM") - before


def main(mode: str, kernels: str) -> None:
    backend.use(kernels if mode == "exact" else "eager", 1)
    work = work_of(kernels if mode == "exact" else "native", SEQUENCES, UPDATE)
    shape = config(512, 3, 4096)
    causal = model_shape(shape, mode == "exact")
    plan: Plan = make_plan(causal, causal, None, work)
    print(
        json.dumps({"planned": plan.peak - PROCESS, "resident": plan.resident, "measured": measured(mode, shape, work)})
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
