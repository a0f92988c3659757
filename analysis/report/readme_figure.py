"""The picture of the README: `python -m analysis.report.readme_figure RUN... --out FILE.svg`.

Left, held-out accuracy of the runs in deterministic numerics, mean over seeds and their range; right, the share of
tokens whose log-prob the trainer computes otherwise than the sampler did, deterministic and native. One SVG with
colours and background of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.program import program
from analysis.report.drawing.axes import BOTTOM, PLOT_HEIGHT, WIDTH, Axis
from analysis.report.drawing.charts import Line, line_chart
from analysis.report.drawing.markup import escape, share
from ppo_repro.errors import UserError
from ppo_repro.files import PICTURE, check_replaceable, write_over_earlier
from ppo_repro.output import Parser
from ppo_repro.records import reader
from ppo_repro.records.config_file import load_recorded_config

COLUMNS = ["iteration", "tokens", "unequal_old_rollout_logprobs", "eval_accuracy"]
TITLE, MARGIN = 34.0, 10.0
STYLE = """
text { font-family: system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; font-size: 12.5px; fill: #1b1f27 }
.title { font-size: 14px; font-weight: 600 } .label { fill: #545c6b } .middle { text-anchor: middle } .end { text-anchor: end }
.grid { stroke: #d5d9e0; stroke-width: .7; fill: none } .line { fill: none; stroke-width: 2; stroke-linejoin: round }
.band { fill-opacity: .2 } .fill0 { fill: #0072b2 } .stroke0 { stroke: #0072b2 } .fill1 { fill: #d55e00 } .stroke1 { stroke: #d55e00 }
"""  # noqa: E501, one rule after the other


def curves(folders: Sequence[Path]) -> pd.DataFrame:
    """mode, run, iteration, accuracy, tokens and unequal (a share of tokens) of every iteration of every run.

    The last evaluation of a run, after its last update, is a row of its own without a share. Raises UserError on
    records that are missing or damaged.
    """
    parts = []
    for folder in folders:
        rows = reader.read_iterations(folder, columns=COLUMNS)
        found = pd.DataFrame(
            {
                "iteration": rows["iteration"].to_numpy(np.int64),
                "accuracy": rows["eval_accuracy"].to_numpy(np.float64),
                "tokens": rows["tokens"].to_numpy(np.float64),
                "unequal": rows["unequal_old_rollout_logprobs"].to_numpy(np.float64)
                / rows["tokens"].to_numpy(np.float64),
            }
        )
        last = {"iteration": len(rows), "accuracy": float(reader.open_manifest(folder).final["eval_accuracy"])}
        found = pd.concat([found, pd.DataFrame([last])], ignore_index=True)
        parts.append(found.assign(mode=load_recorded_config(folder).numerics.mode, run=str(folder)))
    return pd.concat(parts, ignore_index=True)


def over_runs(found: pd.DataFrame, measure: str, name: str) -> Line:
    """Mean over runs by iteration, and their range as the band."""
    grouped = found[found[measure].notna()].groupby("iteration")[measure].agg(["mean", "min", "max"])
    mean, low, high = (grouped[column].to_numpy(np.float64) for column in ("mean", "min", "max"))
    return Line(name, grouped.index.to_numpy(np.float64), mean, low, high)


def unequal_tokens(found: pd.DataFrame) -> str:
    """How many tokens of all runs have unequal log-probs, in words."""
    total, unequal = int(found["tokens"].sum()), round(float((found["unequal"] * found["tokens"]).sum()))
    return share(unequal, total) if unequal else f"0 of {total:,}"


def draw(found: pd.DataFrame) -> str:
    """The picture; UserError unless runs of both numerics are there."""
    modes = {str(mode): rows for mode, rows in found.groupby("mode")}
    if set(modes) != {"deterministic", "native"}:
        raise UserError(
            f"runs in deterministic and in native numerics are needed; these are {', '.join(sorted(modes))}"
        )
    seeds = modes["deterministic"]["run"].nunique()
    accuracy = over_runs(modes["deterministic"], "accuracy", "deterministic")
    x = Axis("iteration of PPO", 0.0, float(accuracy.x.max()))
    top = float(max(accuracy.high.max(), 0.1)) if accuracy.high is not None else 1.0
    learning = line_chart(
        [accuracy], x, Axis("greedy accuracy, held out", 0.0, top * 1.05), "Held-out accuracy by iteration"
    )
    shares = [over_runs(rows, "unequal", f"{mode}: {unequal_tokens(rows)}") for mode, rows in modes.items()]
    highest = max(float(line.high.max()) for line in shares if line.high is not None)
    percent = tuple((k / 10, f"{10 * k} %") for k in range(11) if k / 10 <= highest * 1.15)
    mismatch = line_chart(
        shares,
        x,
        Axis("sampler ≠ trainer", 0.0, max(highest * 1.15, 0.1), ticks=percent),
        "Share of tokens whose log-prob differs between sampler and trainer, by iteration",
    )
    titles = (
        f"Learning, deterministic: mean and range of {seeds} seeds",
        "Tokens whose log-probs differ in any bit",
    )
    return _beside(titles, (learning, mismatch))


def _beside(titles: Sequence[str], charts: Sequence[str]) -> str:
    """Charts side by side with a title above each; `charts` are SVG elements of the width of a chart."""
    height = TITLE + PLOT_HEIGHT + BOTTOM + 72.0
    width = MARGIN * 2 + WIDTH * len(charts)
    parts = []
    for index, (title, chart) in enumerate(zip(titles, charts, strict=True)):
        left = MARGIN + WIDTH * index
        parts.append(f'<text class="title" x="{left + 12:g}" y="26">{escape(title)}</text>')
        place = f'x="{left:g}" y="{TITLE:g}" width="{WIDTH:g}" height="{height - TITLE - MARGIN:g}"'
        parts.append(chart.replace("<svg ", f'<svg {place} preserveAspectRatio="xMidYMax meet" ', 1))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'role="img"><title>{escape("; ".join(titles))}</title><style>{STYLE}</style>'
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


@program
def main(argv: Sequence[str] | None) -> None:
    """Write the picture; exit code 2 and one line where what the user wrote is wrong."""
    parser = Parser(
        prog="python -m analysis.report.readme_figure",
        description="the picture of the README, from recorded runs in both numerics",
    )
    parser.add_argument(
        "runs", metavar="RUN", type=Path, nargs="+", help="folders of runs that differ in seed and mode"
    )
    parser.add_argument("--out", type=Path, required=True, help="the SVG file to write")
    arguments = parser.parse_args(argv)
    check_replaceable(arguments.out, PICTURE)
    write_over_earlier(arguments.out, PICTURE, draw(curves(arguments.runs)).encode())


if __name__ == "__main__":
    sys.exit(main())
