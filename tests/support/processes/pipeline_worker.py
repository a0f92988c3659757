"""One process of two: the runs under pipelines, and in native numerics, that `test_pipeline_mesh.py` looks at.

Argument: a folder to write to. Leaves `<rank>.json` there, and the recorded runs of the first rank.
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
from ppo_repro.numerics.arithmetic.divided import Holders
from ppo_repro.numerics.sharding import stages
from ppo_repro.ranks import Ranks, end_process, joined
from ppo_repro.runs.language import LanguageKind
from ppo_repro.watcher import Silent
from tests.support.paths import TINY
from tests.support.processes.tensor_worker import fingerprint, interrupted, resume

QUICK = ["model.warm_start_steps=2", "model.num_layers=2", "rollout.prompts_per_iteration=3", "ppo.iterations=1"]
LONGER = [*QUICK, "ppo.iterations=3", "checkpoints.every=1", "checkpoints.keep=9"]
HEAD = [*QUICK, "value={kind: head}", "layout.padding=none", "layout.gradient_checkpointing=true"]
NATIVE = [*QUICK, "numerics.mode=native", "ppo.learning_rate=0.01"]
PIPELINE = "layout.mesh={data: 1, pipeline: 2}"
RUNS = {
    "pipeline": ["layout.mesh.pipeline=2", "layout.update_micro_batch=1", *QUICK],
    "head": [PIPELINE, *HEAD],
    "native": ["layout.mesh.data=2", *NATIVE],
    "native, unequal": ["layout.mesh.data=2", "layout.rank_shares=[3,1]", *NATIVE],
}


def held(ranks: Ranks) -> dict[str, int]:
    """Numbers that this process holds of all three models."""
    with LanguageKind(Silent(), ranks).begin(load_config(TINY, [PIPELINE, *QUICK]), None) as execution:
        state = execution.prepared.state  # type: ignore[attr-defined]
        models = {"policy": state.policy, "value model": state.value_model, "reference": state.reference}
        return {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}


def rounded(x: Tensor, giver: int, holders: Holders) -> Tensor:
    """Deliberately broken: what is handed over arrives in 16 bits."""
    return usual(x, giver, holders).bfloat16().float()


usual = stages._handed_over


def main(folder: Path) -> None:
    found: dict[str, Any] = {}
    with joined(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) as ranks:
        for name, overrides in RUNS.items():
            found[name] = fingerprint(folder / name, overrides, ranks)
        found["held"] = held(ranks)
        stopped = interrupted(folder / "interrupted", [PIPELINE, *LONGER], ranks)
        found["resumed"] = resume(stopped, ["layout.mesh={data: 2, zero: 3}"], ranks)
        begun = next((folder / "from one").rglob("manifest.json")).parent
        found["from one"] = resume(begun, [PIPELINE], ranks)
        stages._handed_over = rounded
        found["rounded"] = fingerprint(folder / "rounded", RUNS["pipeline"], ranks)
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        end_process(1)
    end_process(0)
