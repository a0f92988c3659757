"""Which code runs a trunk: every line of the table of `TrunkForward`, with the same hidden states on every path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ppo_repro.models.batches import lay_out
from ppo_repro.numerics import backend
from ppo_repro.numerics.layers.families import trunk_of
from ppo_repro.numerics.layers.kv_cache import GridCache, SlotCache
from ppo_repro.numerics.trunk import decoding, forward, training
from ppo_repro.numerics.trunk.forward import TrunkForward
from tests.support.models import CONTEXT, bits, policy

CPU = torch.device("cpu")
MODULES, KERNELS = ["modules"] * 4, ["training", *["decoding"] * 3]
TABLE = [
    ("llama", "native", "float64", MODULES),
    ("llama", "exact", "eager", MODULES),
    ("gemma", "exact", "float64", MODULES),
    ("gpt2", "exact", "float64", MODULES),
    ("gpt_neox", "exact", "float64", MODULES),
    ("llama tied, biases, gelu", "exact", "float64", MODULES),
    ("llama", "exact", "float64", KERNELS),
    ("mistral", "exact", "float64", KERNELS),
]
TOKENS = [[5, 7, 11, 13, 17], [19, 23, 29, 31, 37]]


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the paths taken from now on, one for each pass."""
    calls: list[str] = []

    def record(module: Any, name: str, path: str) -> None:
        original: Callable[..., Tensor] = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *arguments: calls.append(path) or original(*arguments))

    record(forward, "_through_modules", "modules")
    record(training, "hidden_states", "training")
    record(decoding, "hidden_states", "decoding")
    return calls


def last_states(architecture: str, mode: str) -> list[Tensor]:
    """Hidden states [2, H] of the last tokens: of a batch, of prompts over a cache, and of one token over a cache."""
    model = policy(architecture, mode)
    run, rows = TrunkForward(trunk_of(model)), torch.tensor([4, 9])
    batch = lay_out(TOKENS, [[1], [1]], "right")
    ids, valid = torch.tensor(TOKENS), torch.ones(2, 5, dtype=torch.bool)
    positions = torch.arange(5).expand(2, 5)
    kind = GridCache if mode == "exact" else SlotCache
    whole, pieces = kind(model.config, 2, CONTEXT, CPU), kind(model.config, 2, CONTEXT, CPU)
    whole.aim(torch.arange(2), positions, valid)
    pieces.aim(torch.arange(2), positions[:, :4], valid[:, :4])
    with torch.no_grad():
        states = [
            run.over_batch(batch.input_ids, batch.position_ids, batch.first_key, rows),
            run.over_cache(ids, whole, rows),
        ]
        run.over_cache(ids[:, :4], pieces)
        pieces.aim(torch.arange(2), positions[:, 4:], valid[:, 4:])
        return [*states, run.over_cache(ids[:, 4:], pieces)]


@pytest.mark.parametrize(("architecture", "mode", "kernels", "expected"), TABLE)
def test_each_line_of_the_table_takes_its_path(
    architecture: str, mode: str, kernels: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.use(kernels, 1)
    calls = recorded(monkeypatch)
    states = last_states(architecture, mode)
    assert calls == expected
    for other in states[1:]:
        assert torch.equal(bits(other), bits(states[0])) if mode == "exact" else torch.allclose(other, states[0], 1e-4)


def test_a_position_beyond_the_rotary_tables_is_refused() -> None:
    backend.use("float64", 1)
    model = policy("llama", "exact")
    cache = GridCache(model.config, 1, CONTEXT + 8, CPU)
    cache.aim(torch.tensor([0]), torch.tensor([[CONTEXT]]), torch.tensor([[True]]))
    with pytest.raises(IndexError, match="rotary"):
        TrunkForward(trunk_of(model)).over_cache(torch.tensor([[5]]), cache)
