"""Implement `ppo-repro analyse table`, which prints three things as Markdown.

1. A row per setting: mean and 95 % Student interval over seeds of one measure, means of the other measures, and the
   number of fingerprints.
2. The differences of the measure from one setting, paired by seed, with Holm's correction.
3. The rank correlation of each clipped share and the measure, unless a setting lacks one of them or all are equal.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from ppo_repro.analysis.grid_outcomes import ACCURACY, MEASURES, outcomes
from ppo_repro.analysis.grid_table import (
    MIN_RANKED,
    RankCorrelation,
    comparisons,
    markdown,
    measures_table,
    rank_correlations,
)
from ppo_repro.analysis.significance import finite_of, with_interval
from ppo_repro.base.output import print_result


def add_options(option: Callable[..., argparse.Action]) -> None:
    """Add the options of the command."""
    option("grid", type=Path, help="folder of a grid")
    option("--measure", choices=MEASURES, default=ACCURACY, help="what is compared")
    option("--against", help="the setting that every setting is compared with: its labels joined by ', '")


def command(arguments: argparse.Namespace) -> None:
    """Print settings, differences and rank correlations of a grid."""
    cells = outcomes(arguments.grid)
    value, text = answer(cells, arguments.measure, arguments.against or str(cells["point"].iloc[0]))
    print_result(arguments.json, value, [text])


def answer(cells: pd.DataFrame, measure: str, against: str) -> tuple[dict[str, Any], str]:
    """Return the JSON object of a grid's `outcomes`, and the text."""
    compared, correlations = comparisons(cells, measure, against), rank_correlations(cells, measure)
    value = {
        "measure": measure,
        "against": against,
        "cells": cells.to_dict("records"),
        "differences": compared.to_dict("records"),
        "rank_correlations": {share: rank._asdict() for share, rank in correlations.items()},
    }
    paragraphs = [
        markdown(measures_table(cells, measure)),
        *([markdown(_differences(compared, measure, against))] if len(compared) else []),
        *_sentences(correlations, measure, cells),
    ]
    return value, "\n\n".join(paragraphs)


def _differences(compared: pd.DataFrame, measure: str, against: str) -> pd.DataFrame:
    """Return a frame of `comparisons` as text."""
    signed, intervals = MEASURES[measure].form.replace(":", ":+"), compared[["difference", "ci_lo", "ci_hi"]].to_numpy()
    return pd.DataFrame(
        {
            "setting": compared["point"],
            f"{measure} minus {measure} of {against}, 95 % interval": [
                with_interval(signed, *row) for row in intervals
            ],
            "p, paired t-test": _texts_of_p(compared["p_value"]),
            "p, Holm": _texts_of_p(compared["p_holm"]),
        }
    )


def _texts_of_p(values: Iterable[float]) -> list[str]:
    return ["" if math.isnan(p) else f"{p:.4f}" for p in values]


def _sentences(correlations: Mapping[str, RankCorrelation], measure: str, cells: pd.DataFrame) -> list[str]:
    _, others = finite_of(cells[measure])
    if others and cells["point"].nunique() >= MIN_RANKED:
        return [f"no rank correlation of clipped shares and {measure}{others}"]
    return [  # a run may lack a clipped share, which then has no sentence
        f"rank correlation of {share} and {measure}: {rank.value:.2f} over {cells['point'].nunique()} settings "
        f"(bootstrap of seeds, 95 % [{rank.low:.2f}, {rank.high:.2f}]), {rank.over_runs:.2f} over {len(cells)} runs"
        for share, rank in correlations.items()
    ]
