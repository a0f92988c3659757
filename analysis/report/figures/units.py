"""Figures of units of text: KL(policy || reference) in five units, and the share of the first tokens of words."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.report.drawing.axes import Axis, axis_for
from analysis.report.drawing.charts import Line, area_chart, line_chart
from analysis.report.drawing.figure import Figure
from analysis.report.drawing.markup import number

UNITS = {"response": "sequences", "word": "words", "token": "tokens", "character": "characters", "byte": "bytes"}
PARTS = {"first": "first tokens of words", "continuation": "later tokens", "special": "special tokens"}


def unit_figure(sums: pd.DataFrame) -> Figure:
    """KL to the reference per response, word, token, character and byte, by iteration.

    `sums` has rows of `counts.text_row`: sums of one iteration in nats, and the counts of units.
    """
    at = sums["iteration"].to_numpy(np.float64)
    total = sums[[f"kl_{part}" for part in PARTS]].sum(axis=1).to_numpy(np.float64)
    lines, numbers = [], pd.DataFrame({"iteration": sums["iteration"]})
    for unit, column in UNITS.items():
        size = sums[column].to_numpy(np.float64)
        value = np.divide(total, size, out=np.full(len(total), np.nan), where=size > 0)
        numbers[f"nats per {unit}"] = value
        positive = value > 0  # a logarithmic scale has no zero
        lines.append(Line(f"per {unit}", at[positive], value[positive]))
    drawn = [line for line in lines if len(line.x)]
    y = axis_for("KL(policy || reference) (nats)", [line.y for line in drawn], log=True)
    last = ", ".join(f"{number(line.y[-1], 3)} {line.name}" for line in drawn)
    chart = line_chart(drawn, axis_for("iteration", [at]), y, f"KL to the reference in five units; at the end {last}.")
    caption = (
        "One sum over the iteration, exact over the vocabulary, divided by five counts; equal counts give one line. "
        "Nats per response can be compared between tokenizers, nats per token cannot."
    )
    return Figure("KL in five units", chart, caption, numbers)


def share_figure(sums: pd.DataFrame, quantity: str) -> Figure:
    """The shares of first, later and special tokens in `quantity`, `kl` or `entropy`; `sums` as in `unit_figure`."""
    quantities = {name: sums[f"{quantity}_{part}"].to_numpy(np.float64) for part, name in PARTS.items()}
    total = np.sum(list(quantities.values()), axis=0)
    positive = total > 0
    at = sums["iteration"].to_numpy(np.float64)[positive]
    layers = [(name, value[positive] / total[positive]) for name, value in quantities.items()]
    tokens = sums[[f"tokens_{part}" for part in PARTS]].sum()
    token_shares = ", ".join(
        f"{number(100 * tokens[f'tokens_{part}'] / tokens.sum(), 3)} % {name}" for part, name in PARTS.items()
    )
    words = {"kl": "KL to the reference", "entropy": "entropy"}[quantity]
    ends = ", ".join(f"{name} {number(float(value[-1]), 3)}" for name, value in layers) if len(at) else "nothing"
    y = Axis(f"share of the {words}", 0.0, 1.0)
    chart = area_chart(at, layers, axis_for("iteration", [at]), y, f"Share of the {words}; at the end {ends}.")
    numbers = pd.DataFrame({"iteration": at.astype(np.int64), **dict(layers)})
    return Figure(f"Where the {words} lies", chart, f"Of the tokens, {token_shares}.", numbers)
