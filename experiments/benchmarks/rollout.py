"""Sampling beside `generate` of transformers: 32 prompts of 16 tokens, 64 new tokens each, no early stop.

`python -m experiments.benchmarks.rollout`: the exact and the native engine and stock `generate` (float32, dynamic
cache), interleaved in one process. The engines also return the log-prob of every token; `generate` only tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from transformers import DynamicCache, LlamaForCausalLM

from experiments.benchmarks import timing
from experiments.benchmarks.timing import Cost, Measured
from experiments.benchmarks.workload import CONTEXT, RESPONSE, SEQUENCES, SIZES, Size, make_model, prompt_ids
from ppo_repro.models.networks import make_policy
from ppo_repro.numerics import backend
from ppo_repro.rollout.engine import Request, Sampling
from ppo_repro.rollout.torch_engine import TorchEngine

QUESTION = "rollout"
PEER = "transformers generate"
SAMPLING = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_response_tokens=RESPONSE)


def engine(
    model: LlamaForCausalLM, size: Size, mode: str, kind: str, threads: int, sequences: int = SEQUENCES
) -> Callable[[], Cost]:
    """One execution of the built-in engine; its backend is chosen before the clock starts."""
    sampler = TorchEngine(make_policy(model, mode, CONTEXT), frozenset(), mode, CONTEXT, sequences, 0)
    requests = [Request(ids, seed) for seed, ids in enumerate(prompt_ids(size, sequences))]

    def work() -> None:
        completions = sampler.generate(requests, SAMPLING)
        assert sum(len(c.response_ids) for c in completions) == sequences * RESPONSE

    def run() -> Cost:
        backend.use(kind, threads)
        return timing.cost_of(work)

    return run


def stock(model: LlamaForCausalLM, size: Size, threads: int, sequences: int = SEQUENCES) -> Callable[[], Cost]:
    """One execution of `generate`."""
    ids = torch.tensor(prompt_ids(size, sequences))
    mask = torch.ones_like(ids)

    def work() -> None:
        out = model.generate(
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
        assert out.shape == (sequences, CONTEXT)

    def run() -> Cost:
        backend.use("eager", threads)
        return timing.cost_of(work)

    return run


def candidates(size: Size, threads: int) -> dict[str, Callable[[], Cost]]:
    """All candidates, on the same weights and prompts."""
    model = make_model(size)
    compared = {PEER: stock(model, size, threads), "exact": engine(model, size, "exact", "auto", threads)}
    if backend.has_amx():
        compared["exact, float64"] = engine(model, size, "exact", "float64", threads)
    return {**compared, "native": engine(model, size, "native", "eager", threads)}


def measure(sizes: Sequence[str], threads: Sequence[int], rounds: int) -> list[Measured]:
    """Every size on every number of threads."""
    rows = []
    for name in sizes:
        for count in threads:
            costs = timing.interleaved(candidates(SIZES[name], count), rounds)
            tokens = SEQUENCES * RESPONSE
            rows += timing.compared(QUESTION, SIZES[name].name, count, tokens, costs, PEER)
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Sampling with the built-in engine and with transformers generate.")
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=sorted(SIZES, reverse=True))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    timing.add_options(parser, rounds=5)
    arguments = parser.parse_args()
    rows = measure(arguments.sizes, arguments.threads, arguments.rounds)
    timing.report(rows, arguments.json)


if __name__ == "__main__":
    main()
