"""Draw figures for papers, in one style. Each function draws runs or a grid into matplotlib axes, by default new ones.

    from ppo_repro.analysis import figures
    left, right = figures.new_axes(9.5, 3.6, 2)
    figures.agreement_figure([RUN_1, RUN_2], left)
    figures.mismatch_figure([RUN_1, RUN_2], right)
    right.figure.savefig("mismatch.pdf")

`agreement_figure` and `mismatch_figure` draw runs; `settings_figure` and `differences_figure` draw a grid.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ppo_repro.analysis.grid_outcomes import MEASURES
from ppo_repro.analysis.grid_table import comparisons
from ppo_repro.analysis.mean_text import finite_of
from ppo_repro.analysis.run_tables import run_tables
from ppo_repro.analysis.significance import one_sample, t_interval
from ppo_repro.base.errors import UserError
from ppo_repro.config.run import RunConfig
from ppo_repro.records.logprob_pairs import deltas

RUN, MEAN = "#0072b2", "#d55e00"
STYLE: Any = {
    "figure.figsize": (9, 3.3), "figure.dpi": 80, "figure.constrained_layout.use": True, "figure.facecolor": "white",
    "font.family": "DejaVu Sans", "font.size": 9.5, "axes.titlesize": 10.5, "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "axes.prop_cycle": "cycler('color', ['0072b2', 'd55e00', '009e73', 'cc79a7', 'e69f00', '56b4e9'])",
    "grid.color": "#e3e6ea", "grid.linewidth": 0.7, "lines.linewidth": 1.6, "lines.markersize": 4,
    "legend.frameon": False, "legend.fontsize": 9, "svg.fonttype": "none", "svg.hashsalt": "ppo_repro",
}  # fmt: skip


def use_style() -> None:
    """Set the style of all later figures of matplotlib."""
    matplotlib.rcParams.update(STYLE)


def new_axes(width: float = 4.5, height: float = 3.3, columns: int = 1) -> list[Axes]:
    """Return `columns` empty axes side by side in a new figure without a window; width and height are in inches."""
    use_style()
    figure = Figure(figsize=(width, height))
    return [figure.add_subplot(1, columns, k + 1) for k in range(columns)]


def band(rows: pd.DataFrame, measure: str, axes: Axes, label: str) -> None:
    """Draw the mean over runs by iteration as a line, and their range as a band.

    `rows` has columns iteration and `measure`, one row per run and iteration; NaN is not drawn.
    """
    line = rows[rows[measure].notna()].groupby("iteration")[measure].agg(["mean", "min", "max"])
    (drawn,) = axes.plot(line.index, line["mean"], label=label)
    axes.fill_between(line.index, line["min"], line["max"], color=drawn.get_color(), alpha=0.2, linewidth=0)


def agreement_figure(runs: Sequence[Path], axes: Axes | None = None) -> Axes:
    """Draw the share of tokens whose log-probs differ between sampler and trainer, by iteration."""
    axes = axes or new_axes()[0]
    curves = []
    for folder in runs:
        tables = run_tables(folder)
        rows = tables.read("iterations", ["iteration", "tokens", "unequal_old_rollout_logprobs"])
        curves.append(rows.assign(mode=tables.config.numerics.mode))
    for mode, rows in pd.concat(curves).groupby("mode"):
        unequal = rows["unequal_old_rollout_logprobs"]
        label = f"{mode}: {int(unequal.sum()):,} of {int(rows['tokens'].sum()):,}"
        band(rows.assign(percent=100 * unequal / rows["tokens"]), "percent", axes, label)
    axes.set(title="Tokens whose log-probs differ in any bit", xlabel="iteration", ylabel="sampler ≠ trainer, %")
    axes.set_ylim(bottom=0)
    axes.legend()
    return axes


def mismatch_figure(runs: Sequence[Path], axes: Axes | None = None) -> Axes:
    """Draw per run the share of tokens whose log-probs differ by more than x nats between sampler and trainer."""
    axes = axes or new_axes(7.0, 3.3 + 0.2 * len(runs))[0]
    for folder in runs:
        tables = run_tables(folder)
        distances = np.abs(deltas(tables.read("tokens", ["rollout_logprobs", "old_logprobs"])))
        # one point per token that differs; a logarithmic axis has no place for the others
        drawn = np.sort(distances[np.isfinite(distances) & (distances > 0)])[::-1]
        most = f", by {drawn[0]:.2g} at most" if len(drawn) else ""
        label = f"{sampler_of(tables.config)}: {len(drawn):,} of {len(distances):,} differ{most}"
        if lost := int(np.count_nonzero(~np.isfinite(distances))):
            label += f" ({lost} not finite)"
        axes.plot(drawn, 100 * np.arange(1, len(drawn) + 1) / len(distances), label=label)
    axes.set(title="Mismatch of sampler and trainer", ylabel="tokens further apart, %", xscale="log")
    axes.set_xlabel("difference of the log-probs, nats")
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.15))
    return axes


def sampler_of(config: RunConfig) -> str:
    """Return a name of a run's sampler for the legend."""
    engine, stock = config.rollout.engine, config.mismatch.sampler.stock
    if engine.kind == "function":
        switched_on = [name for name, value in engine.parameters.items() if value is True]
        words = Path(engine.path.rpartition(":")[0]).stem, engine.parameters.get("dtype", ""), *switched_on
        return " ".join(filter(None, map(str, words)))
    if engine.kind == "sglang":
        return f"SGLang, {engine.numerics}"
    return f"torch, {stock}" if stock else f"built in, {config.numerics.mode}"


def settings_figure(cells: pd.DataFrame, measure: str, axes: Axes | None = None) -> Axes:
    """Draw a row for each setting of `outcomes`: a dot per seed, and the mean with its 95 % Student interval.

    The label of a row counts values that are not finite.
    """
    groups = list(cells.groupby("point", sort=False))
    axes = axes or new_axes(8.0, 0.8 + 0.3 * len(groups))[0]
    names = []
    for row, (point, group) in enumerate(groups):
        finite, others = finite_of(group[measure])
        names.append(f"{point}{others}")
        axes.plot(finite, np.full(len(finite), row), "o", color=RUN, alpha=0.55, markersize=5)
        if len(finite) > 1:
            estimate = one_sample(finite)
            axes.plot(t_interval(estimate, 0.95), (row, row), color=MEAN, linewidth=2)
            axes.plot([estimate.mean], [row], "|", color=MEAN, markersize=11, markeredgewidth=2.5)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(MEASURES[measure].meaning if measure in MEASURES else measure)
    return axes


def differences_figure(cells: pd.DataFrame, measure: str, axes: Axes | None = None) -> Axes:
    """Draw the difference of each setting from the first one, paired by seed, with 95 % Student intervals.

    `cells` is the frame of `outcomes`. The label of a row says if the difference is not finite. Raises UserError if
    there is one setting, or if settings have different seeds.
    """
    against = str(cells["point"].iloc[0])
    differences = comparisons(cells, measure, against)
    if differences.empty:
        raise UserError("the complete cells have one setting, so nothing differs; draw `settings`")
    axes = axes or new_axes(8.0, 1.0 + 0.3 * len(differences))[0]
    reach = np.abs(differences[["ci_lo", "ci_hi"]].to_numpy().T - differences["difference"].to_numpy())
    rows = range(len(differences))
    axes.errorbar(differences["difference"], rows, xerr=reach, fmt="o", capsize=3)
    axes.axvline(0, color="0.4", linewidth=1)
    names = differences["point"].where(differences["difference"].notna(), differences["point"] + " (not finite)")
    axes.set_yticks(rows, names)
    axes.invert_yaxis()
    axes.set(title=f"{measure} minus that of {against}, 95 % intervals", xlabel="difference")
    return axes


def svg(axes: Axes) -> str:
    """Return the figure of the axes as SVG; equal figures give equal text."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    width, height = (72 * inches for inches in figure.get_size_inches())
    inside = buffer.getvalue().partition("<svg ")[2].partition(">")[2]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" data-generator="ppo-repro" viewBox="0 0 {width:g} {height:g}"'
        f' xmlns:xlink="http://www.w3.org/1999/xlink" width="{width:g}">{inside}'
    )
