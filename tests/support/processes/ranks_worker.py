"""One process of several: runs everything `test_ranks.py` looks at, so that the slow imports are paid once.

Arguments: a folder to write to, and `whole` for all of it. Leaves `<rank>.json` there, and the recorded runs of the
first rank.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from ppo_repro import collectives
from ppo_repro.config.files import load_config
from ppo_repro.errors import PromiseBroken, UserError
from ppo_repro.numerics.optim import optimizer
from ppo_repro.ranks import Ranks, end_process, joined
from ppo_repro.records import manifest
from ppo_repro.watcher import Silent
from tests.support.language import rerun, run
from tests.support.paths import TINY
from tests.support.row_dependent import NOISE, row_dependent_linear

QUICK = ["model.warm_start_steps=4"]  # each process computes all of the warm start
SHORT = [*QUICK, "ppo.iterations=1"]
FIRST = "three to one"  # the only run of a short call
RUNS = {
    "equal": QUICK,
    "three to one": [*SHORT, "layout.rank_shares=[3,1]", "layout.padding=none", "layout.update_micro_batch=1"],
    "all on the second": [*SHORT, "layout.rank_shares=[0,1]"],
    "one sequence a minibatch": [*SHORT, "ppo.minibatch_size=1"],
    "native": [*SHORT, "numerics.mode=native"],
}


class WithoutReduction(Ranks):
    """Deliberately broken: every rank keeps its own gradients."""

    def add_up(self, tensors: Any) -> None:
        pass


def note_tokens() -> list[int]:
    """From now on, the tokens of every optimizer step that the no-overflow bound is asked about."""
    real, noted = optimizer.assert_no_wrap, []

    def noting(tokens: int) -> None:
        noted.append(tokens)
        real(tokens)

    optimizer.assert_no_wrap = noting
    return noted


def refused(call: Any) -> str:
    try:
        call()
    except (UserError, PromiseBroken) as error:
        return f"{type(error).__mro__[1].__name__}: {error}"
    return "nothing"


def exchanges(ranks: Ranks) -> dict[str, Any]:
    """Every exchange once, with values that tell the ranks apart."""
    mine = [(ranks.rank, torch.arange(3) + 10 * i) for i in range(ranks.rank)]  # rank 0 has none
    long = ranks.gather(["x" * (3 * collectives.HEAD_BYTES * (ranks.rank + 1))])
    whole = torch.tensor([2**62, -5]) - ranks.rank
    others = [torch.full((2, 3), 2.0**-ranks.rank), torch.zeros(0), torch.tensor(7, dtype=torch.int64)]
    ranks.add_up([whole, *others])
    return {
        "gather": [(rank, values.tolist()) for rank, values in ranks.gather(mine)],
        "long": [len(text) for text in long],
        "sums": [t.tolist() for t in (whole, *others)],
        "first": ranks.first(lambda name: f"{name} {ranks.rank}", "rank"),
    }


def main(folder: Path, is_whole: bool) -> None:
    found: dict[str, Any] = {}
    with joined(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) as ranks:
        found["exchanges"] = exchanges(ranks)
        collectives.BUCKET_ELEMENTS = 4
        found["exchanges in small buckets"] = exchanges(ranks)
        found["same"] = refused(lambda: ranks.require_same("thing", 5))
        found["not same"] = refused(lambda: ranks.require_same("thing", ranks.rank * 2))
        out_of_step = ranks.check if ranks.is_first else lambda: ranks.gather([1])
        found["out of step"] = refused(out_of_step)
        found["other shapes"] = refused(lambda: ranks.add_up([torch.zeros(1 + ranks.rank)]))
        noted = note_tokens()
        for name, overrides in RUNS.items() if is_whole else [(FIRST, RUNS[FIRST])]:
            with row_dependent_linear(NOISE):  # the layers of exact numerics are others
                run_dir, _ = run(load_config(TINY, overrides), folder / name, Silent(), ranks)
            found.setdefault("tokens", list(noted))  # of the first run
            ranks.check()
            whole = manifest.load(run_dir)
            found[name], found[f"chain of {name}"] = whole.fingerprint, [entry.chain for entry in whole.iterations]
        if not is_whole:
            (folder / f"{ranks.rank}.json").write_text(json.dumps(found))
            return
        report = rerun(folder.parent / "alone", Silent(), ["layout.rank_shares=[2,1]"], ranks)
        found["rerun"] = (report.difference is None, report.fingerprint)
        broken = WithoutReduction(ranks.rank, ranks.size)
        found["broken"] = refused(lambda: run(load_config(TINY, QUICK), folder / "broken", Silent(), broken))
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] == ["whole"])
    end_process(0)
