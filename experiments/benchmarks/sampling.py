"""Both sides of sampling: `generate` of transformers and the engine; 32 prompts, 64 tokens each; none stops early.

The engine also returns the log-prob of every token; `generate` only tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import DynamicCache, PreTrainedModel

from experiments.benchmarks import timing
from experiments.benchmarks.timing import Cost
from experiments.benchmarks.workload import CONTEXT, RESPONSE, SEQUENCES, Size, prompt_ids
from ppo_repro.base.mode import Precision
from ppo_repro.models.networks import make_policy
from ppo_repro.numerics import library
from ppo_repro.sampler import Request, Sampling
from ppo_repro.sampling.built_in import BuiltInSampler

SAMPLING = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_response_tokens=RESPONSE)


def engine(model: PreTrainedModel, size: Size, threads: int, precision: Precision = "highest") -> Callable[[], Cost]:
    """Return a function that samples once with the built-in engine; threads are set before the clock starts."""
    policy = make_policy(model, "deterministic", CONTEXT, precision)
    sampler = BuiltInSampler(policy, frozenset(), "deterministic", CONTEXT, SEQUENCES, 0)
    requests = [Request(ids, seed) for seed, ids in enumerate(prompt_ids(size, SEQUENCES))]

    def work() -> None:
        completions = sampler.generate(requests, SAMPLING)
        assert sum(len(c.response_ids) for c in completions) == SEQUENCES * RESPONSE

    def run() -> Cost:
        library.use_threads(threads, torch_computes=False)
        return timing.cost_of(work)

    return run


def stock(model: PreTrainedModel, size: Size, threads: int) -> Callable[[], Cost]:
    """Return a function that runs `generate` once."""
    ids = torch.tensor(prompt_ids(size, SEQUENCES))
    mask = torch.ones_like(ids)

    def work() -> None:
        out = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=RESPONSE,
            max_new_tokens=RESPONSE,
            past_key_values=DynamicCache(config=model.config),
            pad_token_id=0,
        )
        assert out.shape == (SEQUENCES, CONTEXT)

    def run() -> Cost:
        torch.set_num_threads(threads)
        return timing.cost_of(work)

    return run
