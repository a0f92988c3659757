"""Compare the phases of PPO with stock float32: sampling, scoring, forward and backward pass, optimizer step.

`python -m experiments.benchmarks.numerics` interleaves transformers and torch with both precisions of deterministic
numerics, on the same weights and tokens, in one process. Stock sampling is `generate` with a dynamic cache. The stock
optimizer step is clip_grad_norm_ and fused AdamW. `--model FOLDER` takes a Llama from a folder instead of random
weights. `--families` interleaves models of other families, in the same shape, with the Llama.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from experiments.benchmarks import sampling, timing, workload
from experiments.benchmarks.timing import Cost, Measured
from experiments.benchmarks.workload import CONTEXT, PROMPT, RESPONSE, SEQUENCES, SIZES, Size, prompt_ids
from ppo_repro.base.mode import Precision
from ppo_repro.base.output import Parser
from ppo_repro.base.program import program
from ppo_repro.base.seeding import bell
from ppo_repro.models.batches import TokenBatch, lay_out
from ppo_repro.models.load import load_folder
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.numerics import library
from ppo_repro.numerics.adamw import AdamWSettings
from ppo_repro.numerics.families import FAMILIES
from ppo_repro.numerics.interface import Ints
from ppo_repro.numerics.optimizer import Optimizer
from ppo_repro.numerics.sequences import slots_of
from ppo_repro.numerics.token_statistics import token_statistics

PEER = "stock float32"
MINIBATCH, SLOTS = 8, 8  # sequences of a backward pass, and the slots of their gradients
SETTINGS = AdamWSettings(learning_rate=1e-6, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)
Run = Callable[[], Cost]
Make = Callable[[], PreTrainedModel]
LIKE_LLAMA = [name for name, family in FAMILIES.items() if family.gated and not family.mixture and name != "llama"]
PRECISIONS: tuple[Precision, ...] = ("highest", "high")
PHASES = ("sampling", "scoring", "forward and backward", "optimizer step")


def directions(sequences: int) -> Tensor:
    """Return random gradients [sequences, RESPONSE] of the loss with respect to log-probs, of both signs as in PPO."""
    draws = torch.from_numpy(bell(sequences * RESPONSE, "benchmark directions", 0)).float()
    return draws.view(sequences, RESPONSE) / (sequences * RESPONSE)


class Stock:
    """Phases of PPO by unmodified transformers and torch."""

    def __init__(self, model: PreTrainedModel, size: Size) -> None:
        self.model, self.size = model, size
        self.texts = torch.tensor(texts(size))
        self.adamw = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
        self.directions = directions(MINIBATCH)

    def logprobs(self, ids: Tensor) -> Tensor:
        """Return the log-probs [S, RESPONSE] of the response tokens."""
        logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=RESPONSE + 1).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, ids[:, PROMPT:, None])[..., 0]

    def score(self) -> None:
        with torch.no_grad():
            self.logprobs(self.texts)

    def forward_backward(self) -> None:
        self.adamw.zero_grad(set_to_none=True)
        (self.logprobs(self.texts[:MINIBATCH]) * self.directions).sum().backward()

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), SETTINGS.max_grad_norm)
        self.adamw.step()


class Deterministic:
    """Phases of PPO by the kernels."""

    def __init__(self, model: PreTrainedModel, size: Size, precision: Precision) -> None:
        self.policy = make_policy(model, "deterministic", CONTEXT, precision)
        self.optimizer = Optimizer(self.policy, SETTINGS, "deterministic")
        rows = texts(size)
        self.all = self._batch(rows)
        minibatch = self._batch(rows[:MINIBATCH], slots_of(range(MINIBATCH), MINIBATCH, SLOTS))
        self.minibatch = minibatch.with_sums(self.optimizer.sink)
        self.directions = directions(MINIBATCH).flatten()
        self.gradients: dict[str, Tensor] = {}

    @staticmethod
    def _batch(rows: Sequence[Sequence[int]], slots: Ints | None = None) -> TokenBatch:
        return lay_out([r[:PROMPT] for r in rows], [r[PROMPT:] for r in rows], slots=slots)

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Return the log-probs [n] of the response tokens."""
        return token_statistics(policy_logits(self.policy, batch), batch.targets, 1.0, None, "deterministic")[0]

    def score(self) -> None:
        with torch.no_grad():
            self.logprobs(self.all)

    def forward_backward(self) -> None:
        self.optimizer.sums.begin()
        (self.logprobs(self.minibatch) * self.directions).sum().backward()
        self.gradients = self.optimizer.sums.finish()

    def step(self) -> None:
        self.optimizer.adamw.apply(SETTINGS, self.gradients)


def texts(size: Size) -> list[tuple[int, ...]]:
    """Return SEQUENCES rows of CONTEXT token ids."""
    parts = [prompt_ids(size, SEQUENCES, stream) for stream in range(CONTEXT // PROMPT)]
    return [tuple(token for part in row for token in part) for row in zip(*parts, strict=True)]


def candidates(model: Callable[[], PreTrainedModel], size: Size, phase: str, threads: int) -> dict[str, Run]:
    """Return the peer and both precisions in a phase; threads are set before the clock starts."""
    if phase == "sampling":
        runs: dict[str, Run] = {PEER: sampling.stock(model(), size, threads)}
        return runs | {precision: sampling.engine(model(), size, threads, precision) for precision in PRECISIONS}
    peer = Stock(model(), size)
    sides: dict[str, Stock | Deterministic] = {PEER: peer}
    sides |= {precision: Deterministic(model(), size, precision) for precision in PRECISIONS}
    if phase == "optimizer step":
        for side in sides.values():
            side.forward_backward()

    def of(side: Stock | Deterministic) -> Run:
        work = {"scoring": side.score, "forward and backward": side.forward_backward, "optimizer step": side.step}

        def run() -> Cost:
            library.use_threads(threads, torch_computes=side is peer)
            return timing.cost_of(work[phase])

        return run

    return {name: of(side) for name, side in sides.items()}


def measure(
    models: Mapping[str, Make], size: Size, phases: Sequence[str], threads: Sequence[int], rounds: int
) -> list[Measured]:
    """Measure every phase with every number of threads, all models of one size interleaved."""
    rows: list[Measured] = []
    for phase in phases:
        sequences = {"forward and backward": MINIBATCH, "optimizer step": 0}.get(phase, SEQUENCES)
        for count in threads:
            sides = {name: candidates(model, size, phase, count) for name, model in models.items()}
            runs = {(name, side): run for name, both in sides.items() for side, run in both.items()}
            costs = timing.interleaved(runs, rounds)
            for name, both in sides.items():
                own = {side: costs[name, side] for side in both}
                rows += timing.compared(phase, name, count, sequences * RESPONSE, own, PEER)
    return rows


@program
def main(given: Sequence[str] | None) -> None:
    """Run the command line."""
    parser = Parser(description="Phases of PPO in deterministic numerics and in stock float32.")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a Llama, in place of --sizes")
    about = "of the same shape, beside the Llama"
    parser.add_argument("--families", nargs="+", choices=LIKE_LLAMA, default=[], help=about)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    timing.add_options(parser, rounds=7)
    arguments = parser.parse_args(given)
    subjects: list[tuple[dict[str, Make], Size]] = []
    for size in (SIZES[name] for name in arguments.sizes):
        others = {f"{family} {size.name}": partial(workload.make_model, size, family) for family in arguments.families}
        subjects.append(({size.name: partial(workload.make_model, size), **others}, size))
    if arguments.model:
        vocabulary = load_folder(arguments.model)[0].config.vocab_size
        size = replace(SIZES["small"], name=arguments.model.name, vocabulary=vocabulary)
        subjects = [({size.name: lambda: load_folder(arguments.model)[0]}, size)]
    rows = [
        row
        for models, size in subjects
        for row in measure(models, size, arguments.phases, arguments.threads, arguments.rounds)
    ]
    timing.report(rows, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
