"""One process of several: the runs under tensor meshes that `test_tensor_mesh.py` looks at.

Arguments: a folder to write to, and names of what to run: all of this number of processes where there are none;
`fails` for a run that ends in the middle of a layer.
Leaves `<rank>.json` there, and the recorded runs of the first rank.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from torch import Tensor

from ppo_repro.config.files import load_config
from ppo_repro.errors import NumericsError
from ppo_repro.numerics.arithmetic import contraction
from ppo_repro.numerics.arithmetic.divided import Share
from ppo_repro.numerics.sharding import layers
from ppo_repro.ranks import Ranks, end_process, joined
from ppo_repro.records import manifest
from ppo_repro.runs import run as runner
from ppo_repro.runs.language import LanguageKind
from ppo_repro.watcher import Silent
from tests.support.language import run
from tests.support.paths import TINY
from tests.support.processes.mesh_worker import Interrupting

# each process computes all of the warm start; two heads of keys, so that two processes can divide them
QUICK = ["model.warm_start_steps=2", "model.num_key_value_heads=2", "rollout.prompts_per_iteration=3"]
STAGED = [*QUICK, "model.num_layers=2", "ppo.iterations=1"]
LONGER = [*QUICK, "ppo.iterations=3", "checkpoints.every=1", "checkpoints.keep=9"]
CUT = [*QUICK, "rollout.top_p=0.9", "records.level=deep", "ppo.iterations=1", "kl={placement: loss, estimator: exact}"]
HEAD = [*QUICK, "value={kind: head}", "ppo.iterations=1", "layout.padding=none", "layout.gradient_checkpointing=true"]
RUNS = {
    2: {
        "tensor": ["layout.mesh.tensor=2", *QUICK],
        "cut": ["layout.mesh={data: 1, tensor: 2}", *CUT],
        "head": ["layout.mesh.tensor=2", *HEAD],
    },
    4: {
        "both": ["layout.mesh={data: 2, tensor: 2}", "layout.rank_shares=[1,2]", *QUICK],
        "pipeline": ["layout.mesh={data: 2, pipeline: 2}", "layout.rank_shares=[1,2]", *STAGED],
    },
}


def fingerprint(folder: Path, overrides: list[str], ranks: Ranks) -> str:
    run_dir, _ = run(load_config(TINY, overrides), folder, Silent(), ranks)
    ranks.check()
    return manifest.load(run_dir).fingerprint


def interrupted(folder: Path, overrides: list[str], ranks: Ranks) -> Path:
    """A run that Ctrl-C on the first rank ends after two iterations."""
    try:
        run(load_config(TINY, overrides), folder, Interrupting(ranks) if ranks.is_first else Silent(), ranks)
        raise AssertionError("nothing interrupted it")
    except KeyboardInterrupt:
        ranks.interrupted.clear()
    return next(path.parent for path in folder.rglob("manifest.json"))


def resume(run_dir: Path, overrides: list[str], ranks: Ranks) -> str:
    runner.resume(LanguageKind(Silent(), ranks), run_dir, overrides)
    ranks.check()
    return manifest.load(run_dir).fingerprint


def held(ranks: Ranks) -> dict[str, int]:
    """Numbers that this process holds of both trained models and of their moments, after an iteration."""
    config = load_config(TINY, [*QUICK, "ppo.iterations=1", "layout.mesh.tensor=2"])
    with LanguageKind(Silent(), ranks).begin(config, None) as execution:
        for _ in execution.iterations():
            pass
        state = execution.prepared.state  # type: ignore[attr-defined]
        networks = state.policy, state.value_model
        weights = [p for network in networks for p in network.parameters()]
        optimizers = state.policy_optimizer.adamw, state.value_optimizer.adamw
        moments = [m for adamw in optimizers for m in (*adamw.first.values(), *adamw.second.values())]
    return {name: sum(t.numel() for t in some) for name, some in (("weights", weights), ("moments", moments))}


def rounded(x: contraction.Operand, w: contraction.Operand, bias: Any = None, share: Share | None = None) -> Any:
    """Deliberately broken: the partial sums are rounded to float32 before they are added up."""
    assert share is not None
    parts = share.holders.gather([contraction.contract((x.integers, x.scale), (w.integers, w.scale))])
    total = sum(parts[1:], parts[0])
    return total if bias is None else total + bias


class Failing(layers.DividedWeight):
    """Deliberately broken: not a number appears in the middle of a layer, and this process alone sees it."""

    def contract(self, x: Tensor, weight: Tensor, dim: int, bias: Tensor | None = None) -> Tensor:
        if dim == self.dim and "down_proj" in self.name:
            raise NumericsError("wrong on purpose")
        return super().contract(x, weight, dim, bias)


def main(folder: Path, names: list[str]) -> None:
    found: dict[str, Any] = {}
    with joined(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) as ranks:
        if "fails" in names and not ranks.is_first:
            layers.DividedWeight = Failing  # type: ignore[misc]
        if "fails" in names:
            fingerprint(folder / "fails", RUNS[2]["tensor"], ranks)
        for name, overrides in RUNS[ranks.size].items():
            if not names or name in names:
                found[name] = fingerprint(folder / name, overrides, ranks)
        if not names and ranks.size == 2:
            found["held"] = held(ranks)
            stopped = interrupted(folder / "interrupted", ["layout.mesh.tensor=2", *LONGER], ranks)
            found["resumed"] = resume(stopped, ["layout.mesh={data: 2, zero: 1}"], ranks)
            interrupted(folder / "for one", ["layout.mesh.tensor=2", *LONGER], ranks)
            found["from one"] = resume(
                next((folder / "from one").rglob("manifest.json")).parent, ["layout.mesh.tensor=2"], ranks
            )
            layers.contract = rounded
            found["rounded"] = fingerprint(folder / "rounded", RUNS[2]["tensor"], ranks)
            layers.contract = contraction.linear
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
    except BaseException:
        traceback.print_exc()
        end_process(1)
    end_process(0)
