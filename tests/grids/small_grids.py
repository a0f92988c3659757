"""Small grids, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from ppo_repro.grids.cell import run_of
from ppo_repro.grids.grid import Outcome
from tests.support.paths import TINY

# of the reward function, in each process: more than its checks, two iterations and an evaluation make
FREE_CALLS = 88


def written_grid(folder: Path, **changes: object) -> Path:
    """A grid file of the tiny run; `changes` are its entries, of which None leaves one out."""
    tree = {"question": "q?", "expectation": "e.", "base": str(TINY), "seeds": [1], **changes}
    path = folder / "g.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in tree.items() if value is not None}))
    return path


def grid_file(folder: Path, axes: dict[str, object], seeds: Sequence[int], **fields: object) -> Path:
    """A grid of the tiny run, with a checkpoint after every iteration."""
    return written_grid(folder, axes=axes, seeds=list(seeds), set={"checkpoints.every": 1, **fields})


def held_grid_file(folder: Path, axes: dict[str, object], seeds: Sequence[int]) -> tuple[Path, Path]:
    """A grid whose cells stop after some iterations for as long as a file is there; both files.

    The reward is a function of the response alone: only its time depends on the file.
    """
    hold = folder / "hold"
    hold.touch()
    (folder / "reward.py").write_text(
        "import itertools, time\nfrom pathlib import Path\n\ncalls = itertools.count()\n\n\n"
        "def reward(prompt, response, answer):\n"
        f"    while next(calls) > {FREE_CALLS} and Path({str(hold)!r}).exists():\n"
        "        time.sleep(0.05)\n"
        "    return float(response == answer) + 0.01 * len(response)\n"
    )
    terms = [{"kind": "function", "path": f"{folder}/reward.py:reward"}]
    return grid_file(folder, axes, seeds, **{"ppo.iterations": 6, "reward.terms": terms}), hold


def fingerprints(outcome: Outcome) -> dict[str, str]:
    """Of every cell, all of which are complete."""
    assert (outcome.table["state"] == "complete").all(), outcome.table[["cell", "state", "message"]].to_string()
    return dict(zip(outcome.table["cell"], outcome.table["fingerprint"], strict=True))


def resumed(out: Path, cell: str) -> int:
    """How often the run of a cell was resumed."""
    run_dir = run_of(out / "g" / "cells" / cell)
    assert run_dir is not None
    return len(list(run_dir.glob("resumed-*.json")))
