"""Show responses: to held-out prompts of one run at every evaluation, of two runs at the last one; token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ppo_repro.analysis.html.markup import Html, differences, element, escape, evenly_spread, number, table
from ppo_repro.analysis.html.page import Section, scrolled
from ppo_repro.analysis.html.token_area import token_area
from ppo_repro.analysis.report.data.chosen_responses import MAX_TOKENS
from ppo_repro.analysis.report.data.run_facts import Facts
from ppo_repro.analysis.report.data.token_view import TokenView
from ppo_repro.records import manifest, reader

HELD_OUT_PROMPTS = 6
MOMENTS = 8
PROMPTS_OF_TWO_RUNS = 12
SHOWN_CHARACTERS = 400
_EVALUATION_COLUMNS = ["iteration", "prompt_key", "prompt", "response", "answer", "scores"]


def _evaluations(facts: Facts) -> pd.DataFrame | None:
    """Return the held-out responses of every evaluation; None if the run recorded none."""
    if "evaluations" not in manifest.table_names(facts.manifest):
        return None
    return reader.read_evaluations(facts.run_dir, columns=_EVALUATION_COLUMNS, recorded=facts.manifest)


def _is_at_the_end(facts: Facts, iteration: int) -> bool:
    """Return whether an evaluation followed the last update; its `iteration` is then the number of iterations."""
    return facts.manifest.status == "complete" and iteration == len(facts.iterations)


def samples_section(facts: Facts) -> list[Section]:
    """Return the section of held-out prompts whose score rose, fell or stayed; [] if no evaluation was recorded."""
    evaluated = _evaluations(facts)
    if evaluated is None:
        return []
    cards = "".join(_responses_over_time(rows, facts) for rows in _chosen(evaluated, HELD_OUT_PROMPTS))
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


def _responses_over_time(rows: pd.DataFrame, facts: Facts) -> str:
    """Return the responses of one run to one prompt as HTML."""
    shown = rows.iloc[evenly_spread(len(rows), MOMENTS)]
    moments = {
        "when": ["at the end" if _is_at_the_end(facts, i) else f"iteration {i}" for i in shown["iteration"].tolist()],
        "response": [_shortened(text) for text in shown["response"]],
        "score": shown["scores"].astype("float64").tolist(),
    }
    return _prompt_table(str(rows["prompt"].iloc[0]), str(rows["answer"].iloc[0]), pd.DataFrame(moments))


def last_responses_section(runs: Mapping[str, Facts]) -> list[Section]:
    """Return the section of two runs' last responses to the same held-out prompts; [] if a run recorded none.

    `runs` has the facts of the runs by name, A and B.
    """
    evaluated = [rows for facts in runs.values() if (rows := _evaluations(facts)) is not None]
    if len(evaluated) < len(runs):
        return []
    last = [int(rows["iteration"].max()) for rows in evaluated]
    a, b = (rows[rows["iteration"] == i].set_index("prompt_key") for rows, i in zip(evaluated, last, strict=True))
    both = [(a.loc[key], b.loc[key]) for key in a.index if key in b.index]
    if not both:
        return []
    both.sort(key=lambda rows: rows[0]["response"] == rows[1]["response"])  # different ones first
    different = sum(row_a["response"] != row_b["response"] for row_a, row_b in both)
    cards = [_last_responses(row_a, row_b, list(runs)) for row_a, row_b in both[:PROMPTS_OF_TWO_RUNS]]
    moments = " and ".join(
        f"{name} at the end" if _is_at_the_end(facts, iteration) else f"{name} before iteration {iteration}"
        for (name, facts), iteration in zip(runs.items(), last, strict=True)
    )
    note = (
        f"Greedy responses of the last evaluation ({moments}): {number(different)} of {number(len(both))} held-out "
        f"prompts have different ones. {len(cards)} are shown, different ones first."
    )
    return [Section("samples", "Last responses", (note,), blocks=[element("div", "".join(cards), class_="cards")])]


def _last_responses(row_a: pd.Series, row_b: pd.Series, names: Sequence[str]) -> str:
    """Return the responses of two runs to one prompt as HTML; marks show where they differ."""
    parts = differences(*(_shortened(str(row["response"])) for row in (row_a, row_b)))
    columns: dict[str, Any] = {
        "run": names,
        "response": [_side(parts, "-", "only-a"), _side(parts, "+", "only-b")],
        "score": [float(row["scores"]) for row in (row_a, row_b)],
    }
    return _prompt_table(str(row_a["prompt"]), str(row_a["answer"]), pd.DataFrame(columns, dtype=object))


def _side(parts: Sequence[tuple[str, str]], kind: str, class_: str) -> Html:
    """Return one of two texts as HTML; `mark` with `class_` has the parts that the other text does not have."""
    return Html(
        "".join(
            element("mark", escape(text), class_=class_) if part == kind else escape(text)
            for part, text in parts
            if part in ("=", kind)
        )
    )


def _prompt_table(prompt: str, answer: str, moments: pd.DataFrame) -> str:
    """Return a prompt with its answer as HTML, above a table of moments (or runs) with response and score."""
    wanted = f" → {_shortened(answer)}" if answer else ""
    return scrolled(table(moments, f"{_shortened(prompt)}{wanted}"), "card")


def _shortened(text: str) -> str:
    """Return the text; in a long text, a count of the missing characters replaces the middle."""
    missing = len(text) - SHOWN_CHARACTERS
    if missing <= 0:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]} … {number(missing)} more characters … {text[-half:]}"


def token_section(view: TokenView, recorded: int) -> Section:
    """Return the section that shows `view`; the run has `recorded` responses."""
    needs = element("noscript", element("p", "The token view needs the script inside this page."))
    shown = number(len(view["responses"]))
    note = (
        f"{shown} of {number(recorded)} responses: in turn those with the largest |old - rollout| difference, the most "
        "clipped token updates, the best score, the worst score (the latest first), and the first "
        f"responses of the first and of the last iteration; at most {number(MAX_TOKENS)} tokens. ppo-repro view "
        "shows every response."
    )
    return Section("tokens", "Tokens", (note,), blocks=(needs, token_area()))
