"""One process of several, for `test_ranks.py`: `exchanges FOLDER` or `runs FOLDER`. Leaves FOLDER/<rank>.json."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppo_repro.errors import PromiseBroken
from ppo_repro.ranks import Ranks, end_process, joined

QUICK = ["model.warm_start_steps=4"]  # each process computes all of the warm start
RUNS = {
    "equal": QUICK,
    "one sequence a minibatch": [*QUICK, "ppo.iterations=1", "ppo.minibatch_size=1"],
    "native": [*QUICK, "ppo.iterations=1", "numerics.mode=native"],
}


class WithoutSums(Ranks):
    """Deliberately broken: every rank keeps its own gradients."""

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        pass

    def exchange_sum(self, tensor: Tensor) -> None:
        pass


def summand(rank: int) -> Tensor:
    """Numbers whose float32 sum over ranks depends on the order."""
    return torch.randn(1000, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


def broken(call: Callable[[], object]) -> str:
    try:
        call()
    except PromiseBroken as error:
        return str(error)
    return "nothing"


def exchanges(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Every exchange once, with values that tell the ranks apart."""
    mine = [(ranks.rank, torch.arange(3) + 10 * i) for i in range(ranks.rank)]  # rank 0 has none
    long = ranks.gather(["x" * (10_000 * (ranks.rank + 1))])
    integers = [torch.tensor([2**60, -5]) - ranks.rank, torch.zeros(0, dtype=torch.int64)]
    ranks.add_up(integers)
    numbers = summand(ranks.rank)
    ranks.exchange_sum(numbers)
    return {
        "gather": [(rank, values.tolist()) for rank, values in ranks.gather(mine)],
        "everyone": ranks.everyone(ranks.rank),
        "long": [len(text) for text in long],
        "integers": [t.tolist() for t in integers],
        "numbers": numbers.view(torch.int32).tolist(),
        "first": ranks.first(lambda name: f"{name} {ranks.rank}", "rank"),
        "same": broken(lambda: ranks.require_same("thing", 5)),
        "not same": broken(lambda: ranks.require_same("thing", ranks.rank * 2)),
    }


def runs(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Fingerprints of some runs, a rerun of what one process recorded, and what a run without sums ends with."""
    # the exchanges need none of this, and start in a fraction of the time
    from ppo_repro.config.files import load_config
    from ppo_repro.records import manifest
    from ppo_repro.watcher import Silent
    from tests.support.language import rerun, run
    from tests.support.paths import TINY
    from tests.support.row_dependent import NOISE, row_dependent_linear

    found: dict[str, Any] = {}
    for name, overrides in RUNS.items():
        with row_dependent_linear(NOISE):  # kernels compute the others
            run_dir, _ = run(load_config(TINY, overrides), folder / name, Silent(), ranks)
        ranks.everyone(None)  # the first one has written all of it
        found[name] = manifest.load(run_dir).fingerprint
    report = rerun(folder.parent / "alone", Silent(), [], ranks)
    found["rerun"] = (report.difference is None, report.fingerprint)
    lonely = WithoutSums(ranks.rank, ranks.size)
    found["broken"] = broken(lambda: run(load_config(TINY, QUICK), folder / "broken", Silent(), lonely))
    return found


def main(what: str, folder: Path) -> None:
    with joined(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) as ranks:
        found = {"exchanges": exchanges, "runs": runs}[what](ranks, folder)
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    end_process(0)
