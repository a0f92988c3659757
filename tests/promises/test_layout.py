"""The layout never changes a run's fingerprint, and passes are laid out as it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_repro.base.watcher import Watcher
from ppo_repro.numerics.network import Network
from ppo_repro.numerics.sequences import Ragged
from ppo_repro.records import manifest
from tests.support.language import run, small_run
from tests.support.runs import small_config

# with the most that one pass then has, see `Passes`
LAYOUTS = [
    (
        ("layout.rollout_slots=3", "layout.prefill_chunk=2", "layout.forward_micro_batch=1"),
        {"sampled": 3, "chunk": 2, "scored": 1},
    ),
    (
        ("layout.rollout_slots=16", "layout.padding=none", "layout.update_micro_batch=5"),
        {"sampled": 16, "trained": 5, "copied": 1, "kept": 1},
    ),
    (
        ("layout.threads=2", "layout.padding=left", "layout.prefix_cache=false", "layout.gradient_checkpointing=true"),
        {"sampled": 48, "copied": 0, "kept": 0},
    ),
]


class Passes(Watcher):
    """Notes the most of each kind that a pass of a network has, from the second iteration on.

    Sequences sampled, their new tokens, sequences scored and trained on; 1 if any prefix was copied, if activations
    were kept for any backward pass.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.most = dict.fromkeys(("sampled", "chunk", "scored", "trained", "copied", "kept"), 0)
        over_cache, over_batch, copy_prefix = Network.over_cache, Network.over_batch, Network.copy_prefix

        def sampled(network: Network, batch: Ragged, *others: Any, **named: Any) -> Any:
            self.note(sampled=len(batch.lengths), chunk=int(batch.lengths.max()))
            return over_cache(network, batch, *others, **named)

        def whole(network: Network, batch: Ragged, *others: Any, **named: Any) -> Any:
            if torch.is_grad_enabled():
                self.note(trained=len(batch.lengths), kept=int(not network.lowered.recompute))
            else:
                self.note(scored=len(batch.lengths))
            return over_batch(network, batch, *others, **named)

        def copied(*arguments: Any) -> None:
            self.note(copied=1)
            copy_prefix(*arguments)

        patch.setattr(Network, "over_cache", sampled)
        patch.setattr(Network, "over_batch", whole)
        patch.setattr(Network, "copy_prefix", copied)

    def note(self, **found: int) -> None:
        self.most |= {name: max(number, self.most[name]) for name, number in found.items()}

    def iteration(self, done: int, *_: Any) -> None:
        if done == 1:
            self.most = dict.fromkeys(self.most, 0)


@pytest.mark.parametrize(("layout", "most"), LAYOUTS)
def test_no_layout_changes_the_fingerprint(
    deterministic_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: tuple[str, ...],
    most: dict[str, int],
) -> None:
    passes = Passes(monkeypatch)
    run_dir, _ = run(small_config(*layout), tmp_path, passes)
    assert manifest.load(run_dir).fingerprint == manifest.load(deterministic_run).fingerprint
    assert passes.most | most == passes.most


@pytest.mark.usefixtures("row_noise")
def test_native_layouts_change_the_fingerprint(native_run: Path, tmp_path: Path) -> None:
    """The negative control."""
    run_dir = small_run(tmp_path, *LAYOUTS[1][0], "numerics.mode=native")
    assert manifest.load(run_dir).fingerprint != manifest.load(native_run).fingerprint
