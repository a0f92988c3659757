"""What does a mesh cost and save: bytes that a process sends in a step, and bytes that it holds, beside those of bf16.

`python -m experiments.benchmarks.mesh [--processes 2 3] [--hidden 256] [--layers 4]` trains a Llama of random weights
for a few steps in each mesh, in processes of their own, and prints a table. Exit status 1 if weights of meshes differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks.workload import Size, make_model
from ppo_repro.errors import Failure
from ppo_repro.mesh.shards import ShardRanks
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.numerics import backend
from ppo_repro.numerics.logprobs import token_statistics
from ppo_repro.numerics.optim.optimizer import AdamWSettings, ExactOptimizer, weights_digest
from ppo_repro.numerics.pieces import Division
from ppo_repro.numerics.sharding.parts import hold, whole_parameters
from ppo_repro.ranks import Ranks, end_process, joined

SEQUENCES, LENGTH, STEPS = 6, 32, 3
SETTINGS = AdamWSettings(1e-3, 0.9, 0.95, 1e-8, 0.01, 1.0)


@dataclass(frozen=True)
class Measured:
    """One process of a mesh; bytes."""

    processes: int
    zero: int
    parameters: int
    sent_gradients: float  # in the last step: sums of gradients
    sent_weights: float
    sent_rest: float  # norms, grids, what is agreed on
    weights: int  # held after it
    moments: int
    sums: int
    digest: str


@dataclass(frozen=True)
class Counting(Ranks):
    """Ranks that count the bytes they send; of a reduction those of a ring, which gloo takes."""

    sent: dict[str, float] = field(default_factory=dict)

    def _count(self, what: str, count: float) -> None:
        self.sent[what] = self.sent.get(what, 0.0) + count

    def deal(self, parts: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        self._count("dealt", sum(len(part) for other, part in enumerate(parts) if other != self.rank))
        return super().deal(parts, lengths)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        self._count("reduced", sum(2 * (self.size - 1) / self.size * t.numel() * t.element_size() for t in tensors))
        super().add_up(tensors)

    def _exchange(self, what: str, value: Any, failure: Failure | None = None) -> list[Any]:
        self._count("rest", (self.size - 1) * 4104)  # a message has one head, and here no body
        return super()._exchange(what, value, failure)


@dataclass(frozen=True)
class CountingShards(ShardRanks, Counting):
    """The same with weights in pieces."""

    def _give(self, wanted: int | None) -> Tensor | None:
        before = self.sent.get("dealt", 0.0)
        found = super()._give(wanted)
        self._count("weights", self.sent.get("dealt", 0.0) - before)
        return found


def bf16_bytes(parameters: int, processes: int) -> float:
    """What a process sends in a step of 16-bit data parallelism, and of ZeRO 1 and 2: 2 (n - 1) / n numbers each.

    All-reduce of gradients, or reduce-scatter of gradients and all-gather of weights. Rajbhandari et al., 2020, section
    7.
    """
    return 2 * (processes - 1) / processes * 2 * parameters


def work(ranks: Counting, zero: int, size: Size) -> Measured:
    """Train as one process, on its share of the same sequences."""
    backend.use("float64", 1)
    policy = hold(make_policy(make_model(size), "exact", 2 * LENGTH), ranks)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, size.vocabulary, (SEQUENCES, LENGTH), generator=generator).tolist()
    mine = ranks.mine(SEQUENCES, ())
    batch = lay_out([rows[i][:4] for i in mine], [rows[i][4:] for i in mine], "right")

    def backward() -> None:
        logprobs, _ = token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, "exact")
        torch.autograd.backward(-logprobs, torch.full_like(logprobs, 1.0 / (SEQUENCES * LENGTH)))

    optimizer = ExactOptimizer(policy, SETTINGS, Division(ranks, zero))
    for _ in range(STEPS):
        ranks.sent.clear()
        optimizer.step(backward, SEQUENCES * LENGTH, ranks)
    parameters = sum(optimizer.accumulator.shapes[name].numel() for name, _ in policy.named_parameters())
    own = optimizer.adamw.first.values()
    in_pieces = optimizer.parts.flat
    spread = sum(t.numel() for name, t in optimizer.adamw.first.items() if name not in in_pieces)
    weights = ranks.sent.get("weights", 0.0)
    weights += 4.0 * (ranks.size - 1) * spread if optimizer.division.divides else 0.0
    dealt, reduced, rest = (ranks.sent.get(what, 0.0) for what in ("dealt", "reduced", "rest"))
    return Measured(
        processes=ranks.size,
        zero=zero,
        parameters=parameters,
        sent_gradients=reduced + dealt - weights,
        sent_weights=weights,
        sent_rest=rest,
        weights=sum(p.untyped_storage().nbytes() for p in policy.parameters()),
        moments=sum(t.untyped_storage().nbytes() for t in (*own, *optimizer.adamw.second.values())),
        sums=sum(t.untyped_storage().nbytes() for t in optimizer.accumulator._sums_memory.values()),
        digest=weights_digest(whole_parameters(policy)),
    )


def _start(processes: int, arguments: Sequence[str]) -> list[Measured]:
    """What the first of so many processes measured; CalledProcessError where one fails."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    about = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "experiments.benchmarks.mesh", "--work", *arguments]
    started = [
        subprocess.Popen(command, env={**os.environ, **about, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(processes)
    ]
    outputs = [process.communicate()[0] for process in started]
    for process in started:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
    return [Measured(**row) for row in json.loads(outputs[0])]


def markdown(rows: Sequence[Measured]) -> str:
    """One row per mesh; bytes for each parameter."""
    lines = [
        "| processes | zero | sent: gradients | weights | rest | together | bf16 | held: weights | moments | sums |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for m in rows:
        sent = (m.sent_gradients, m.sent_weights, m.sent_rest)
        counts = (*sent, sum(sent), bf16_bytes(m.parameters, m.processes), m.weights, m.moments, m.sums)
        each = " | ".join(f"{count / m.parameters:.2f}" for count in counts)
        lines.append(f"| {m.processes} | {m.zero} | {each} |")
    return "\n".join(lines)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="bytes sent and held under each mesh")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--zero", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    hidden, layers, vocabulary = arguments.hidden, arguments.layers, arguments.vocabulary
    size = Size("mesh", layers, hidden, 3 * hidden, hidden // 64, vocabulary)
    if arguments.work:
        with joined(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) as ranks:
            found = []
            for zero in arguments.zero if ranks.size > 1 else [0]:
                kind = CountingShards if zero == 3 else Counting
                counting = kind(ranks.rank, ranks.size, ranks.interrupted, ranks.beats, ranks.patience)
                found.append(asdict(work(counting, zero, size)))
                counting.check()
                gc.collect()
            if ranks.is_first:
                print(json.dumps(found))
        end_process(0)
    shape = ["--hidden", str(hidden), "--layers", str(layers), "--vocabulary", str(vocabulary)]
    zeros = ["--zero", *map(str, arguments.zero)]
    rows = [row for n in (1, *arguments.processes) for row in _start(n, [*shape, *zeros])]
    print(f"{rows[0].parameters:,} parameters; bytes for each, of one process, in a step\n\n{markdown(rows)}")
    return 0 if len({row.digest for row in rows}) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
