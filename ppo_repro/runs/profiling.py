"""How fast an iteration was compared with this machine: multiply-accumulates per second over a measured peak."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from ppo_repro.buffers import Iteration
from ppo_repro.config.run import RunConfig
from ppo_repro.models.state import TrainState
from ppo_repro.numerics.families import trunk_of
from ppo_repro.numerics.linear import PackedMatrix, product

PHASES = ("rollout", "forward", "update")
ROWS, TERMS, OUTPUTS, REPEATS = 512, 1024, 1024, 9  # about a tenth of a second in all
BACKWARD = 3  # products of a forward and backward pass over those of a forward


@dataclass(frozen=True)
class Peak:
    """The rate of a large product in the run's numerics and on its threads, and the products that a token needs."""

    rate: float  # multiply-accumulates per second
    policy: int  # multiply-accumulates of one token in the weight matrices; attention is not counted
    value: int  # of a value model of its own; 0 otherwise


def product_rate(mode: str) -> float:
    """Multiply-accumulates per second [1/s] of a float32 product of 512 x 1024 x 1024, median of 9.

    `mode` deterministic: by the kernels, the weight packed in advance; native: stock torch.
    """
    x = torch.ones(ROWS, TERMS) / 3
    w = torch.ones(OUTPUTS, TERMS) / 7
    matrix = PackedMatrix([w])

    def work() -> Tensor:
        return product(x, matrix) if mode == "deterministic" else x @ w.t()

    return ROWS * TERMS * OUTPUTS / _median_seconds(work)


def _median_seconds(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return median(times)


def products_of(module: nn.Module) -> int:
    """Elements of the matrices that a token is multiplied with: an embedding is looked up, a tied head counts."""
    looked_up = {id(m) for m in module.modules() if "Embedding" in type(m).__name__}
    return sum(
        weight.numel()
        for m in module.modules()
        if id(m) not in looked_up and (weight := getattr(m, "weight", None)) is not None and weight.dim() == 2
    )


def measure_peak(config: RunConfig, state: TrainState) -> Peak:
    """Measure this machine once, for a run that is prepared."""
    value = state.value_model
    own = 0 if value is None or value.trunk is trunk_of(state.policy) else products_of(value)
    rate = product_rate(config.numerics.mode)
    return Peak(rate, products_of(state.policy), own)


def fractions(item: Iteration, peak: Peak) -> dict[str, float]:
    """Achieved share of the peak by phase: useful multiply-accumulates over seconds and rate.

    The products of every input token are useful, once per pass that the algorithm asks for; a backward pass counts
    as two forward passes. Recomputation and padding are not useful. NaN for a phase that took no time.
    """
    rollout = item.rollout
    inputs = torch.tensor([len(ids) for ids in rollout.prompts.prompt_ids]) + rollout.lengths - 1
    sequence_of = rollout.sequence_of_token()
    once = int(inputs.sum())
    work = {"rollout": once * peak.policy, "forward": once * (2 * peak.policy + peak.value), "update": 0}
    for step in item.updates:
        tokens = int(inputs[sequence_of[step.tokens].unique()].sum())
        products = (peak.policy if step.policy is not None else 0) + (peak.value if step.value is not None else 0)
        work["update"] += BACKWARD * tokens * products
    return {
        phase: work[phase] / (item.seconds[phase] * peak.rate) if item.seconds[phase] else float("nan")
        for phase in PHASES
    }


def speed(item: Iteration, peak: Peak | None) -> dict[str, float | None]:
    """Columns of the table `iterations` about the speed of this machine, which is no result."""
    reached = dict.fromkeys(PHASES) if peak is None else fractions(item, peak)
    spent = math.fsum(item.seconds[phase] for phase in PHASES)
    return {
        "tokens_per_second": len(item.rollout.response_ids) / spent if spent else None,
        "memory_peak": float(memory_peak()),
        **{f"peak_fraction_{phase}": fraction for phase, fraction in reached.items()},
    }


def memory_peak() -> int:
    """The largest number of bytes of memory that this process has used at once."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
