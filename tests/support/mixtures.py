"""Mixtures of experts: their definition, and small runs of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ppo_repro.config.files import load_config
from ppo_repro.config.run import RunConfig
from ppo_repro.watcher import Silent
from tests.support.language import run
from tests.support.paths import TINY

LAYOUT = (
    *("layout.rollout_slots=4", "layout.prefix_cache=false", "layout.prefill_chunk=2", "layout.padding=none"),
    *("layout.forward_micro_batch=4", "layout.update_micro_batch=1", "layout.gradient_checkpointing=true"),
    "layout.threads=2",
)


def reference(x: Tensor, gate: Tensor, gate_up: Tensor, down: Tensor, count: int, normalised: bool) -> Tensor:
    """The definition in float64, token by token and expert by expert; differentiable."""
    rows = []
    for token in x:
        p = (gate @ token).softmax(-1)
        best = sorted(sorted(range(len(p)), key=lambda e: (-float(p[e].detach()), e))[:count])
        total = sum(p[e] for e in best) if normalised else 1.0
        out = torch.zeros_like(token)
        for e in best:
            both = gate_up[e] @ token
            g, up = both[: len(both) // 2], both[len(both) // 2 :]
            out = out + p[e] / total * (down[e] @ (g * torch.sigmoid(g) * up))
        rows.append(out)
    return torch.stack(rows)


def config_of(family: str, *more: str) -> RunConfig:
    """`tiny.yaml` with two layers of 2 of 5 experts, shorter."""
    experts = f"model.experts={{family: {family}, count: 5, per_token: 2}}"
    small = ("model.intermediate_size=12", "model.num_layers=2", "model.warm_start_steps=10", "ppo.learning_rate=2e-2")
    return load_config(TINY, [experts, *small, "numerics.accuracy_sequences=2", *more])


def record(out: Path, family: str, *more: str) -> Path:
    return run(config_of(family, *more), out, Silent())[0]
