"""Exact against native numerics, phase by phase: decoding, full forward, forward and backward.

`python -m experiments.benchmarks.numerics` interleaves, on 1 and 2 threads, stock transformers in float32, a lean
hand-written float32 loop and the exact numerics (AMX, float64). It prints medians as ratios to
stock, and as multiples of the floor that follows from the machine's measured peaks.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from experiments.benchmarks import lean
from experiments.benchmarks.machine import Peaks, measure
from experiments.benchmarks.workload import set_random_weights
from ppo_repro.models.batches import TokenBatch, lay_out
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.numerics import backend
from ppo_repro.numerics.gradients import GradientAccumulator
from ppo_repro.numerics.layers.kv_cache import GridCache
from ppo_repro.numerics.layers.lowering import attach
from ppo_repro.numerics.logprobs import token_statistics
from ppo_repro.numerics.trunk.forward import TrunkForward

PROMPT, RESPONSE = 32, 64
CONTEXT = PROMPT + RESPONSE
LAYERS, VOCABULARY = 4, 512
WIDTHS = {256: 1024, 896: 4864}
PHASES = ("decode", "forward", "forward+backward")


@dataclass(frozen=True)
class Candidate:
    """One way to compute; `run[phase]` runs the phase once."""

    name: str
    backend: str  # of the exact kernels; eager for candidates without them
    run: dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Result:
    """Median seconds of one candidate and its ratio to stock transformers, with the smallest and largest ratio."""

    hidden: int
    sequences: int
    threads: int
    phase: str
    candidate: str
    seconds: float
    ratio: float
    lowest: float
    highest: float


def source(hidden: int) -> Qwen2ForCausalLM:
    """A Qwen2 of 4 layers with random weights."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=WIDTHS[hidden],
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden // 64,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).eval()
    set_random_weights(model)
    return model


def products(hidden: int) -> int:
    """Multiply-accumulates of the weight matrices for one token; attention adds a few per cent."""
    kv = 2 * 64
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * WIDTHS[hidden]
    return LAYERS * layer + hidden * VOCABULARY


def _stock(model: PreTrainedModel, ids: Tensor, batch: TokenBatch) -> Candidate:
    policy = make_policy(model, "native", CONTEXT)

    @torch.no_grad()
    def decode() -> None:
        cache = DynamicCache(config=policy.config)
        policy(input_ids=ids[:, :PROMPT], past_key_values=cache, use_cache=True, logits_to_keep=1)
        for t in range(PROMPT, CONTEXT):
            policy(input_ids=ids[:, t : t + 1], past_key_values=cache, use_cache=True)

    def forward() -> Tensor:
        return policy_logits(policy, batch)

    def both() -> None:
        policy.zero_grad(set_to_none=True)
        logprobs, _ = token_statistics(forward(), batch.targets, 1.0, None, "native")
        torch.autograd.backward(logprobs, torch.ones_like(logprobs))

    return Candidate("stock float32", "eager", {"decode": decode, "forward": _frozen(forward), PHASES[2]: both})


def _frozen(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.no_grad():
            return forward()

    return run


def _lean(model: Qwen2ForCausalLM, ids: Tensor, batch: TokenBatch) -> Candidate:
    fixed, trained = lean.from_model(model, CONTEXT, False), lean.from_model(model, CONTEXT, True)
    shape = (len(ids), fixed.kv_heads, CONTEXT, 64)
    cache = [(torch.zeros(shape), torch.zeros(shape)) for _ in fixed.layers]

    def decode() -> None:
        lean.forward(fixed, ids[:, :PROMPT], 0, cache)
        for t in range(PROMPT, CONTEXT):
            lean.forward(fixed, ids[:, t : t + 1], t, cache)

    def both() -> None:
        for p in trained.parameters:
            p.grad = None
        logits = lean.forward(trained, ids, 0, None).view(-1, VOCABULARY)[batch.predictors]
        logprobs, _ = token_statistics(logits, batch.targets, 1.0, None, "native")
        torch.autograd.backward(logprobs, torch.ones_like(logprobs))

    return Candidate(
        "lean float32",
        "eager",
        {"decode": decode, "forward": lambda: lean.forward(fixed, ids, 0, None), PHASES[2]: both},
    )


def _exact(model: PreTrainedModel, ids: Tensor, batch: TokenBatch, name: str, kind: str) -> Candidate:
    policy = make_policy(model, "exact", CONTEXT)
    accumulator = GradientAccumulator(policy.named_parameters())
    attach(policy, accumulator)
    slots, everywhere = torch.arange(len(ids)), torch.ones_like(ids, dtype=torch.bool)
    positions = torch.arange(CONTEXT).expand(len(ids), -1)

    @torch.no_grad()
    def decode() -> None:
        cache = GridCache(policy.config, len(ids), CONTEXT, ids.device)
        trunk = TrunkForward(policy.model)
        cache.aim(slots, positions[:, :PROMPT], everywhere[:, :PROMPT])
        policy.lm_head(trunk.over_cache(ids[:, :PROMPT], cache, slots * PROMPT + PROMPT - 1))
        for t in range(PROMPT, CONTEXT):
            cache.aim(slots, positions[:, t : t + 1], everywhere[:, t : t + 1])
            policy.lm_head(trunk.over_cache(ids[:, t : t + 1], cache))

    def forward() -> Tensor:
        return policy_logits(policy, batch)

    def both() -> None:
        accumulator.begin()
        logprobs, _ = token_statistics(forward(), batch.targets, 1.0, None, "exact")
        torch.autograd.backward(logprobs, torch.ones_like(logprobs))
        accumulator.finish()

    return Candidate(name, kind, {"decode": decode, "forward": _frozen(forward), PHASES[2]: both})


def candidates(hidden: int, sequences: int) -> list[Candidate]:
    """All candidates, on the same weights and tokens."""
    model = source(hidden)
    ids = torch.randint(0, VOCABULARY, (sequences, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    rows = ids.tolist()
    batch = lay_out([r[:PROMPT] for r in rows], [r[PROMPT:] for r in rows], "right")
    ids = ids[:, :CONTEXT]
    compared = [_stock(model, ids, batch), _lean(model, ids, batch)]
    if backend.has_amx():
        compared.append(_exact(model, ids, batch, "exact, AMX", "amx"))
    return [*compared, _exact(model, ids, batch, "exact, float64", "float64")]


def compare(hidden: int, sequences: int, threads: int, rounds: int) -> Iterator[Result]:
    """Interleaved rounds after a warm-up round; the ratio is the median over rounds of time / stock's time."""
    compared = candidates(hidden, sequences)
    for phase in PHASES:
        times: dict[str, list[float]] = {c.name: [] for c in compared}
        for round_index in range(rounds + 1):
            for c in compared:
                backend.use(c.backend, threads)
                started = time.perf_counter()
                c.run[phase]()
                if round_index:
                    times[c.name].append(time.perf_counter() - started)
        stock = times[compared[0].name]
        for name, own in times.items():
            ratios = [a / b for a, b in zip(own, stock, strict=True)]
            yield Result(hidden, sequences, threads, phase, name, median(own), median(ratios), min(ratios), max(ratios))


def floor_seconds(hidden: int, sequences: int, phase: str, rate: float, bytes_per_weight: float, peak: Peaks) -> float:
    """Floor of a phase: multiply-accumulates / rate or, for decoding, bytes of weights read / bandwidth, if larger."""
    weights = products(hidden)
    if phase == "decode":
        arithmetic = weights * sequences * CONTEXT / rate
        return max(arithmetic, weights * bytes_per_weight * (RESPONSE + 1) / peak.bandwidth)
    return weights * sequences * CONTEXT * (3 if phase == PHASES[2] else 1) / rate


def report(results: list[Result], peaks: dict[int, Peaks]) -> str:
    """A Markdown table; `/ floor` is the time over the floor of that candidate's own arithmetic."""
    lines = ["| hidden | batch | threads | phase | | seconds | / stock | range | / floor |", "|" + "---|" * 9]
    for r in results:
        peak = peaks[r.threads]
        rate, size = peak.float32, 4.0
        if "AMX" in r.candidate:
            rate, size = peak.exact_amx, 3.0
        elif "float64" in r.candidate:
            rate, size = peak.float64, 4.0
        floor = floor_seconds(r.hidden, r.sequences, r.phase, rate, size, peak)
        lines.append(
            f"| {r.hidden} | {r.sequences} | {r.threads} | {r.phase} | {r.candidate} | {r.seconds:.3f} "
            f"| {r.ratio:.2f} | {r.lowest:.2f}-{r.highest:.2f} | {r.seconds / floor:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="exact against native numerics, interleaved, as ratios")
    parser.add_argument("--hidden", type=int, nargs="+", choices=sorted(WIDTHS), default=sorted(WIDTHS))
    parser.add_argument("--sequences", type=int, default=16, help="batch size (default 16)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds (default 7)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    peaks = {threads: measure(threads) for threads in arguments.threads}
    for peak in peaks.values():
        print(
            f"peaks, {peak.threads} threads: float32 {peak.float32 / 1e9:.0f}, float64 {peak.float64 / 1e9:.0f}, "
            f"exact on AMX {peak.exact_amx / 1e9:.0f} GMAC/s; {peak.bandwidth / 1e9:.0f} GB/s read",
            flush=True,
        )
    results = [
        result
        for hidden in arguments.hidden
        for threads in arguments.threads
        for result in compare(hidden, arguments.sequences, threads, arguments.rounds)
    ]
    print(report(results, peaks))
    if arguments.json:
        tree = {"peaks": [asdict(p) for p in peaks.values()], "results": [asdict(r) for r in results]}
        arguments.json.write_text(json.dumps(tree, indent=1) + "\n")


if __name__ == "__main__":
    main()
