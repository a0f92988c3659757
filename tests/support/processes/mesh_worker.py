"""One process of several: the runs under meshes that `test_mesh.py` looks at, so that the slow imports are paid once.

Arguments: a folder to write to, where `from one` is a run that one process did not finish, and names of what to run:
everything where there are none. Leaves `<rank>.json` there, and the recorded runs of the first rank.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppo_repro.config.files import load_config
from ppo_repro.numerics import gradients
from ppo_repro.numerics.pieces import Division, add_up_pieces
from ppo_repro.ranks import Ranks, end_process, joined
from ppo_repro.records import manifest
from ppo_repro.runs import run as runner
from ppo_repro.runs.language import LanguageKind
from ppo_repro.watcher import Silent
from tests.support.language import run
from tests.support.paths import TINY

QUICK = ["model.warm_start_steps=4"]  # each process computes all of the warm start
LONGER = [*QUICK, "ppo.iterations=3", "checkpoints.every=1", "checkpoints.keep=9"]
LORA = "lora={rank: 2, alpha: 4.0, target_modules: [q_proj, up_proj]}"
RUNS = {
    "data": ["layout.mesh.data=2"],
    "zero 1": ["layout.mesh.zero=1", "layout.rank_shares=[1,3]"],
    "zero 2": ["layout.mesh={data: 2, zero: 2}", "layout.padding=none", "layout.update_micro_batch=1"],
    "all on the second": ["layout.mesh.zero=2", "layout.rank_shares=[0,1]"],
    "zero 3": ["layout.mesh={data: 2, zero: 3}", "layout.rank_shares=[3,1]", "layout.update_micro_batch=1"],
    "zero 3, all on the second": ["layout.mesh.zero=3", "layout.rank_shares=[0,1]", "records.level=deep"],
    "deep": ["layout.mesh.zero=2", "records.level=deep"],
    "adapters": ["layout.mesh.zero=1", LORA],
    "head": ["layout.mesh.zero=3", "value={kind: head}", "layout.gradient_checkpointing=true"],
}
RUNS_OF_THREE = {
    "data": ["layout.mesh.data=3", "layout.rank_shares=[3,1,1]"],
    "zero 2": ["layout.mesh={data: 3, zero: 2}", "layout.rank_shares=[1,0,2]"],
    "zero 3": ["layout.mesh={data: 3, zero: 3}", "layout.rank_shares=[1,0,2]"],
}


class Interrupting(Silent):
    """Ctrl-C on this rank after the first iteration is told of."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def iteration(self, done: int, total: int, figures: str) -> None:
        if self.ranks.size == 1:
            raise KeyboardInterrupt
        self.ranks.interrupted.set()


def interrupted(folder: Path, overrides: list[str], ranks: Ranks) -> Path:
    """A run that Ctrl-C on the first rank ends after two iterations."""
    config = load_config(TINY, [*LONGER, *overrides])
    try:
        run(config, folder, Interrupting(ranks) if ranks.is_first else Silent(), ranks)
        raise AssertionError("nothing interrupted it")
    except KeyboardInterrupt:
        ranks.interrupted.clear()
    return next(path.parent for path in folder.rglob("manifest.json"))


def resume(run_dir: Path, zero: int, ranks: Ranks) -> str:
    runner.resume(LanguageKind(Silent(), ranks), run_dir, [f"layout.mesh={{zero: {zero}}}"])
    ranks.check()
    return manifest.load(run_dir).fingerprint


def held(zero: int, ranks: Ranks) -> tuple[int, int]:
    """The bytes of the moments of both trained models, and of the weights of all three, after an iteration."""
    config = load_config(TINY, [*QUICK, "ppo.iterations=1", f"layout.mesh.zero={zero}"])
    with LanguageKind(Silent(), ranks).begin(config, None) as execution:
        for _ in execution.iterations():
            pass
        state = execution.prepared.state  # type: ignore[attr-defined]
        tensors: list[Tensor] = []
        for optimizer in (state.policy_optimizer, state.value_optimizer):
            tensors += [*optimizer.adamw.first.values(), *optimizer.adamw.second.values()]
        weights = [p for model in (state.policy, state.value_model, state.reference) for p in model.parameters()]
    moments, parameters = (sum(t.untyped_storage().nbytes() for t in some) for some in (tensors, weights))
    return moments, parameters


def rounded_sums(tensors: list[Tensor], ranks: Ranks, apart: bool) -> None:
    """Deliberately broken: sums of gradients that are rounded to float32."""
    for i, tensor in enumerate(tensors):
        first, *others = ranks.gather([tensor.to(torch.float32)])
        for other in others:
            first = first + other
        tensors[i] = Division(ranks, 1).own(first.to(torch.int64).contiguous())


def main(folder: Path, names: list[str]) -> None:
    found: dict[str, Any] = {}
    with joined(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) as ranks:
        for name, overrides in (RUNS if ranks.size == 2 else RUNS_OF_THREE).items():
            if not names or name in names:
                run_dir, _ = run(load_config(TINY, [*QUICK, *overrides]), folder / name, Silent(), ranks)
                ranks.check()
                found[name] = manifest.load(run_dir).fingerprint
        if not names and ranks.size == 2:
            found["moments"], found["weights"] = zip(*(held(zero, ranks) for zero in (0, 1, 2, 3)), strict=True)
            found["resumed"] = resume(interrupted(folder / "interrupted", ["layout.mesh.zero=2"], ranks), 1, ranks)
            found["from one"] = resume(next((folder / "from one").rglob("manifest.json")).parent, 3, ranks)
            interrupted(folder / "for one", ["layout.mesh={data: 2, zero: 3}"], ranks)
            gradients.add_up_pieces = rounded_sums
            config = load_config(TINY, [*QUICK, "layout.mesh.zero=1", "ppo.learning_rate=0.01"])
            found["rounded"] = manifest.load(run(config, folder / "rounded", Silent(), ranks)[0]).fingerprint
            gradients.add_up_pieces = add_up_pieces
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    end_process(0)
