"""The page of one DPO run: its steps, and how far it parted preferred from other responses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from analysis.report.drawing.axes import axis_for
from analysis.report.drawing.charts import Line, line_chart
from analysis.report.drawing.figure import Figure, Section, Verdict
from analysis.report.drawing.markup import number
from analysis.report.drawing.page import folded_table, folded_text, page, summary_html
from analysis.report.figures.scores import bins_of, grouped_bars
from analysis.words import config_in_words, terms
from ppo_repro.config.files import load_dpo_config
from ppo_repro.preferences.dpo.summary import DPO_RUNS
from ppo_repro.records import reader
from ppo_repro.records.config_file import CONFIG_NAME, ENVIRONMENT_NAME, read_checked, read_note

# column of steps -> title, unit, caption
STEPS = {
    "loss": ("Loss", "nats", "DPO loss before each step, mean over the pairs of a minibatch; log 2 = 0.693 at first."),
    "margin": ("Margin", "reward", "Difference of the implicit rewards of preferred and other response, mean."),
    "accuracy": ("Pairs in the right order", "", "Share of a minibatch's pairs with a positive margin; 0 counts half."),
    "grad_norm": ("Gradient norm", "", "Global norm before clipping."),
}


def dpo_page(folder: Path) -> str:
    """The report of one DPO run as HTML; the same records give the same bytes."""
    recorded = reader.open_manifest(folder)
    text = read_checked(folder, CONFIG_NAME, recorded.files[CONFIG_NAME]).decode()
    config, environment = load_dpo_config(folder / CONFIG_NAME), read_note(folder, recorded, ENVIRONMENT_NAME)
    steps = reader.read_steps(folder)
    last = [recorded.num_iterations - 1]
    pairs = reader.TableReader("margins")(folder, iterations=last, columns=["held_out", "margins"])
    summary = DPO_RUNS.summarise(folder, None)
    name = f"{config.experiment}/{folder.resolve().name}"
    facts = [
        ("run", name),
        ("fingerprint", recorded.fingerprint),
        ("configuration", recorded.config_digest),
        ("seed", str(config.seed)),
        ("numerics", config.numerics.mode),
        ("code", f"ppo_repro {environment.get('ppo_repro', 'not recorded')}"),
        ("machine", str(environment.get("platform", "not recorded"))),
    ]
    rows = [
        ("training pairs", int((~pairs["held_out"]).sum())),
        ("held-out pairs", int(pairs["held_out"].sum())),
        ("optimizer steps", len(steps)),
        *((name, value) for name, value in recorded.final.items() if not isinstance(value, str)),
    ]
    tables = (("Whole run", pd.DataFrame(rows, columns=["quantity", "value"])),)
    folded = (
        folded_text("Configuration", text),
        folded_table("Configuration, field by field in words", config_in_words(config)),
        folded_table("Terms in words", terms()),
    )
    sections = (
        Section("steps", "Steps", (), tuple(_curve(steps, column) for column in STEPS)),
        Section("pairs", "Pairs", (), (_margins(pairs),)),
    )
    verdicts = [Verdict("fact", f"{line[0].upper()}{line[1:]}.") for line in DPO_RUNS.verdicts(summary)]
    return page(name, summary_html(verdicts, facts, tables, folded), sections)


def _curve(steps: pd.DataFrame, column: str) -> Figure:
    title, unit, caption = STEPS[column]
    at, values = np.arange(len(steps), dtype=np.float64), steps[column].to_numpy(np.float64)
    y = axis_for(f"{title.lower()}{f' ({unit})' if unit else ''}", [values])
    about = f"{title} by step: {number(float(values[0]))} to {number(float(values[-1]))}."
    chart = line_chart([Line("this run", at, values)], axis_for("step", [at]), y, about)
    return Figure(title, chart, caption, steps[["iteration", "minibatch", "pairs", column]])


def _margins(pairs: pd.DataFrame) -> Figure:
    groups = {
        name: rows["margins"].to_numpy(np.float64)
        for name, rows in (("training pairs", pairs[~pairs["held_out"]]), ("held-out pairs", pairs[pairs["held_out"]]))
        if len(rows)
    }
    bins = bins_of(np.concatenate([*groups.values()]), "margin")
    counted = {name: bins.counts(values) for name, values in groups.items()}
    caption = "Difference of the implicit rewards after training; above 0 the preferred response is the likelier one."
    return grouped_bars("Margins after training", counted, bins, "margin", "pairs", caption)
