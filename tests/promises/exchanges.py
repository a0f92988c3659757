"""One process of several that makes every exchange once. Leaves FOLDER/<rank>.json."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppo_repro.errors import PromiseBroken
from ppo_repro.ranks import Ranks, end_process, joined


def summand(rank: int) -> Tensor:
    """Numbers whose float32 sum over ranks depends on the order."""
    return torch.randn(1000, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


def broken(call: Callable[[], object]) -> str:
    try:
        call()
    except PromiseBroken as error:
        return str(error)
    return "nothing"


def exchanges(ranks: Ranks) -> dict[str, Any]:
    mine = [(ranks.rank, torch.arange(3) + 10 * i) for i in range(ranks.rank)]  # rank 0 has none
    numbers = summand(ranks.rank)
    ranks.exchange_sum(numbers)
    return {
        "gather": [(rank, values.tolist()) for rank, values in ranks.gather(mine)],
        "everyone": [len(text) for text in ranks.everyone("x" * (10_000 * (ranks.rank + 1)))],
        "numbers": numbers.view(torch.int32).tolist(),
        "first": ranks.first(lambda name: f"{name} {ranks.rank}", "rank"),
        "same": broken(lambda: ranks.require_same("thing", 5)),
        "not same": broken(lambda: ranks.require_same("thing", ranks.rank * 2)),
    }


if __name__ == "__main__":
    with joined(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) as ranks:
        found = exchanges(ranks)
    (Path(sys.argv[1]) / f"{ranks.rank}.json").write_text(json.dumps(found))
    end_process(0)
