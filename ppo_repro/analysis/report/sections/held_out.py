"""Show held-out prompts over time: the response to the same prompt at every evaluation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from ppo_repro.analysis.html.markup import element, evenly_spread, number, table
from ppo_repro.analysis.html.page import Section, scrolled
from ppo_repro.analysis.report.data.run_facts import Facts
from ppo_repro.records import manifest, reader
from ppo_repro.records.manifest import Manifest

HELD_OUT_PROMPTS = 6
MOMENTS = 8
SHOWN_CHARACTERS = 400
_EVALUATION = ["iteration", "prompt_key", "prompt", "response", "answer", "scores"]


def evaluations(run_dir: Path, recorded: Manifest) -> pd.DataFrame | None:
    """Return the held-out responses of every evaluation; None if the run recorded none."""
    if "evaluations" not in manifest.table_names(recorded):
        return None
    return reader.read_evaluations(run_dir, columns=_EVALUATION, recorded=recorded)


def is_at_the_end(facts: Facts, iteration: int) -> bool:
    """Return whether an evaluation followed the last update; its `iteration` is then the number of iterations."""
    return facts.manifest.status == "complete" and iteration == len(facts.iterations)


def samples_section(facts: Facts) -> list[Section]:
    """Return the section of held-out prompts whose score rose, fell or stayed; [] if no evaluation was recorded."""
    evaluated = evaluations(facts.run_dir, facts.manifest)
    if evaluated is None:
        return []
    cards = "".join(_held_out(rows, facts) for rows in _chosen(evaluated, HELD_OUT_PROMPTS))
    note = (
        f"Held-out prompts whose score rose, fell or stayed, in turn; greedy responses at up to {MOMENTS} evaluations."
    )
    return [Section("samples", "Samples over time", (note,), blocks=[element("div", cards, class_="cards")])]


def _chosen(evaluated: pd.DataFrame, count: int) -> list[pd.DataFrame]:
    """Return the rows of up to `count` prompts; prompts with a rising, a falling and an equal score take turns."""
    groups = {str(key): rows for key, rows in evaluated.groupby("prompt_key", sort=False)}
    change = {key: np.sign(rows["scores"].iloc[-1] - rows["scores"].iloc[0]) for key, rows in groups.items()}
    kinds = [[key for key in groups if change[key] == sign] for sign in (1.0, -1.0, 0.0)]
    # scores that are not numbers have no sign
    kinds.append([key for key in groups if not any(key in kind for kind in kinds)])
    ordered = [kind[rank] for rank in range(max(map(len, kinds))) for kind in kinds if rank < len(kind)]
    return [groups[key] for key in ordered[:count]]


def _held_out(rows: pd.DataFrame, facts: Facts) -> str:
    shown = rows.iloc[evenly_spread(len(rows), MOMENTS)]
    moments = {
        "when": ["at the end" if is_at_the_end(facts, i) else f"iteration {i}" for i in shown["iteration"].tolist()],
        "response": [shortened(text) for text in shown["response"]],
        "score": shown["scores"].astype("float64").tolist(),
    }
    return prompt_table(str(rows["prompt"].iloc[0]), str(rows["answer"].iloc[0]), pd.DataFrame(moments))


def prompt_table(prompt: str, answer: str, moments: pd.DataFrame) -> str:
    """Return a prompt with its answer as HTML, above a table of moments (or runs) with response and score."""
    wanted = f" → {shortened(answer)}" if answer else ""
    return scrolled(table(moments, f"{shortened(prompt)}{wanted}"), "card")


def shortened(text: str) -> str:
    """Return the text; in a long text, a count of the missing characters replaces the middle."""
    missing = len(text) - SHOWN_CHARACTERS
    if missing <= 0:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]} … {number(missing)} more characters … {text[-half:]}"
