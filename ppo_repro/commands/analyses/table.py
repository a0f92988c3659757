"""Implement `ppo-repro analyse table`, which prints two tables as Markdown.

1. A row per setting: mean and 95 % Student interval over seeds of one measure, means of the other measures, and the
   number of fingerprints.
2. The differences of the measure from one setting, paired by seed, with Holm's correction.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from ppo_repro.analysis.grid_outcomes import ACCURACY, MEASURES, outcomes
from ppo_repro.analysis.grid_table import comparisons, markdown, measures_table
from ppo_repro.analysis.mean_text import with_interval
from ppo_repro.base.output import print_result


def add_options(option: Callable[..., argparse.Action]) -> None:
    """Add the options of the command."""
    option("grid", type=Path, help="folder of a grid")
    option("--measure", choices=MEASURES, default=ACCURACY, help="what is compared")
    option("--against", help="the setting that every setting is compared with: its labels joined by ', '")


def command(arguments: argparse.Namespace) -> None:
    """Print the settings of a grid, and their differences."""
    cells = outcomes(arguments.grid)
    value, text = answer(cells, arguments.measure, arguments.against or str(cells["point"].iloc[0]))
    print_result(arguments.json, value, [text])


def answer(cells: pd.DataFrame, measure: str, against: str) -> tuple[dict[str, Any], str]:
    """Return the JSON object of a grid's `outcomes`, and the text."""
    compared = comparisons(cells, measure, against)
    value = {
        "measure": measure,
        "against": against,
        "cells": cells.to_dict("records"),
        "differences": compared.to_dict("records"),
    }
    tables = [measures_table(cells, measure)]
    if len(compared):
        tables.append(_differences(compared, measure, against))
    return value, "\n\n".join(map(markdown, tables))


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
