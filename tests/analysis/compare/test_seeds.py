"""Groups of seeds of a grid: by hand, Holm, pairing, error rates, wrong input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import pytest

from ppo_repro.analysis.compare.seeds import compare_groups
from ppo_repro.base.errors import UserError
from tests.support.cli import Cli
from tests.support.statistics import rng


def cells(values: Mapping[tuple[str, str], Sequence[float]], metric: str = "final.score") -> pd.DataFrame:
    """A cells.parquet with the axes x and z; seeds from 1."""
    rows = [
        {"cell": f"{x},{z},{seed}", "axis.x": x, "axis.z": z, "seed": seed, "state": "complete", metric: value}
        for (x, z), numbers in values.items()
        for seed, value in enumerate(numbers, start=1)
    ]
    return pd.DataFrame(rows)


GRID = cells(
    {
        ("p", "1"): [1, 2, 3, 4, 5, 6],
        ("q", "1"): [2, 3, 4, 5, 6, 8],
        ("p", "2"): [0, 0, 0, 0, 0, 0],
        ("q", "2"): [1, 1, 1, 3, 1, 1],
        ("r", "1"): [0, 0, 0, 0, 0, 0],
        ("r", "2"): [0, 0, 0, 0, 0, 0],
    }
)


def test_paired_by_hand() -> None:
    table = compare_groups(GRID, "x", "p", "q", "final.score", rng(), margin=9.0)
    first = table.iloc[0]
    # seeds are the units: differences 1, 1, 1, (1 + 3) / 2, 1, (2 + 1) / 2, all positive: 2 of 64 sign changes
    assert (first["stat"], first["p_value"], first["n_units"]) == (pytest.approx(7.5 / 6), 2 / 64, 6)
    assert (first["verdict"], first["run_a"], first["run_b"]) == ("different", "x=p", "x=q")
    equivalent = table.iloc[1]
    assert (equivalent["method"], equivalent["verdict"], equivalent["margin"]) == ("TOST", "equivalent", 9.0)
    turned = compare_groups(GRID, "x", "q", "p", "final.score", rng())
    assert (turned.iloc[0]["stat"], turned.iloc[0]["p_value"]) == (-first["stat"], first["p_value"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"axis": "y"}, "axis = 'y': the grid has x, z"),
        ({"b": "s"}, "no cell has label 's'; there are p, q, r"),
        ({"b": "p"}, "name two labels"),
        ({"metric": "cell"}, "is not a column of numbers; there are seed, final.score"),
        ({"margin": 0.0}, "margin = 0.0: must be positive"),
        ({"alpha": 0.5}, "alpha = 0.5: must be greater than 0 and less than 0.5"),
    ],
)
def test_wrong_input(change: dict[str, object], said: str) -> None:
    given = {"axis": "x", "a": "p", "b": "q", "metric": "final.score", "margin": None, "alpha": 0.05, **change}
    with pytest.raises(UserError, match=said):
        compare_groups(GRID, rng=rng(), **given)  # type: ignore[arg-type]


def test_the_command(tmp_path: Path, cli: Cli) -> None:
    GRID.rename(columns={"final.score": "final.eval_score"}).assign(**{"final.eval_accuracy": 1.0}).to_parquet(
        tmp_path / "cells.parquet"
    )
    GRID.drop(columns="state").assign(iteration=0, score_mean=GRID["final.score"]).to_parquet(
        tmp_path / "results.parquet"
    )
    arguments = ["analyse", "compare", tmp_path, "--axis", "x", "--a", "p", "--b", "q", "--seed", "0"]
    said = cli.done(*arguments)
    assert said.startswith("a  x=p\nb  x=q\n")
    assert "final.eval_accuracy" in said
    assert "0.03125" in said
    assert "Welch's t, unpaired" in cli.done(*arguments, "--metric", "score_mean", "--unpaired")
    assert "not both" in cli.refusal(*arguments, "--metric", "score_mean", "--metric", "final.eval_score")
    (tmp_path / "cells.parquet").unlink()
    assert "cells.parquet: is missing" in cli.refusal(*arguments)
