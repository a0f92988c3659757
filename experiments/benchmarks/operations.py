"""What single operations cost in exact numerics, beside torch: `python -m experiments.benchmarks.operations`.

Both sides take turns on one thread; the table has the median times and the median ratio with its range over rounds.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from ppo_repro.numerics import backend
from ppo_repro.numerics.kernels import activations, norms
from ppo_repro.numerics.logprobs import token_statistics
from ppo_repro.numerics.optim.adamw import AdamWSettings, ExactAdamW, exact_norm
from ppo_repro.rollout.engine import Sampling
from ppo_repro.rollout.sampler import sample
from ppo_repro.seeding import bell

ROWS, WIDTH, VOCABULARY, POSITIONS = 2048, 896, 8192, 256
SETTINGS = AdamWSettings(1e-3, 0.9, 0.999, 1e-8, 0.0, 1.0)


@dataclass(frozen=True)
class Pair:
    """One operation, exact and as torch has it."""

    name: str
    exact: Callable[[], object]
    stock: Callable[[], object]


def numbers(*shape: int) -> Tensor:
    """Float32 numbers of about a normal distribution, the same at every call."""
    return torch.from_numpy(bell(math.prod(shape), "operations")).to(torch.float32).reshape(shape)


def pairs() -> list[Pair]:
    """The operations whose order or library functions the exact numerics replace."""
    x, out, weight, inverse = numbers(ROWS, WIDTH), torch.empty(ROWS, WIDTH), torch.ones(WIDTH), torch.empty(ROWS)
    logits, seeds = numbers(POSITIONS, VOCABULARY) * 4.0, torch.arange(POSITIONS)
    gradient = {"w": numbers(ROWS, WIDTH)}
    ours, theirs = {"w": numbers(ROWS, WIDTH)}, nn.Parameter(numbers(ROWS, WIDTH))
    theirs.grad = gradient["w"].clone()
    adamw, stock_adamw = ExactAdamW(ours), torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0.0)
    arrays = x.numpy(), weight.numpy(), inverse.numpy(), out.numpy()
    flat, flat_out = arrays[0].reshape(-1), arrays[3].reshape(-1)
    everything = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_response_tokens=1)
    return [
        Pair("SiLU (exp)", lambda: activations.silu(flat, flat_out), lambda: nn.functional.silu(x)),
        Pair(
            "RMS norm",
            lambda: norms.rms_norm(arrays[0], arrays[1], 1e-6, arrays[2], arrays[3]),
            lambda: nn.functional.rms_norm(x, (WIDTH,), weight, 1e-6),
        ),
        Pair(
            "log-prob and entropy",
            lambda: token_statistics(logits, seeds, 1.0, None, "exact"),
            lambda: token_statistics(logits, seeds, 1.0, None, "native"),
        ),
        Pair(
            "sampling",
            lambda: sample(logits, seeds, seeds, everything, "exact"),
            lambda: torch.multinomial(torch.softmax(logits, -1), 1),
        ),
        Pair("gradient norm", lambda: exact_norm([gradient["w"]]), lambda: nn.utils.get_total_norm([gradient["w"]])),
        Pair("AdamW", lambda: adamw.apply(SETTINGS, gradient, 1.0), stock_adamw.step),
    ]


def seconds(operation: Callable[[], object]) -> float:
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start


def main(given: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="single operations, exact beside torch")
    parser.add_argument("--rounds", type=int, default=21, help="measured rounds (default 21)")
    rounds = parser.parse_args(given).rounds
    print(f"{backend.use('auto', 1)}; {ROWS} x {WIDTH} numbers, or {POSITIONS} x {VOCABULARY} logits; one thread")
    torch.set_num_threads(1)
    print("| operation | exact ms | torch ms | exact / torch |\n|---|---|---|---|")
    for pair in pairs():
        pair.exact()
        pair.stock()
        times = [(seconds(pair.exact), seconds(pair.stock)) for _ in range(rounds)]
        exact, stock = (median(column) * 1e3 for column in zip(*times, strict=True))
        ratios = sorted(a / b for a, b in times)
        spread = f"{median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        print(f"| {pair.name} | {exact:.2f} | {stock:.2f} | {spread} |")


if __name__ == "__main__":
    main()
